"""A real Engine with what tests need around it: strange images, a bad line to it, a registry to fetch from."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import docker
import psutil

from executor_server.backends.docker.host import NoEngine, engine_socket
from tests.support.polling import eventually

SOCKET = Path("/var/run/docker.sock")
# Seconds for an Engine to start or to end, which takes two on a machine that has nothing else to do.
ENGINE_TIMEOUT_S = 100.0
_CHUNK_BYTES = 65_536
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@contextmanager
def engine_client(socket: Path = SOCKET) -> Iterator[Any]:
    client = docker.APIClient(f"unix://{socket}")
    try:
        yield cast(Any, client)
    finally:
        client.close()


# ---------------------------------------------------------------------------------------------------------------------
# Images


def layer_of(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def config_of(layer: bytes, architecture: str = "amd64") -> bytes:
    root = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    return json.dumps({"architecture": architecture, "os": "linux", "config": {}, "rootfs": root}).encode()


@contextmanager
def image_of_files(tag: str, files: Mapping[str, bytes], architecture: str = "amd64") -> Iterator[str]:
    """An image of nothing but these files."""
    layer = layer_of(files)
    manifest = [{"Config": "config.json", "RepoTags": [f"{tag}:latest"], "Layers": ["layer.tar"]}]
    parts = {"config.json": config_of(layer, architecture), "layer.tar": layer, "manifest.json": b""}
    parts["manifest.json"] = json.dumps(manifest).encode()
    with engine_client() as client:
        for _ in client.load_image(layer_of(parts)):
            pass
        try:
            yield tag
        finally:
            client.remove_image(tag, force=True)


@contextmanager
def changed_image(
    base: str, tag: str, changes: Sequence[str], files: Mapping[str, bytes] | None = None
) -> Iterator[str]:
    """An image with instructions of a Dockerfile, and files, on top of another."""
    with engine_client() as client:
        container = client.create_container_from_config({"Image": base, "Cmd": ["true"]})["Id"]
        try:
            client.put_archive(container, "/", layer_of(files or {}))
            image = client.commit(container, repository=tag, changes=list(changes))["Id"]
        finally:
            client.remove_container(container, v=True)
        try:
            yield tag
        finally:
            client.remove_image(image, force=True)  # the tag may have gone to another by now


# ---------------------------------------------------------------------------------------------------------------------
# An Engine that may be killed


class OwnEngine:
    """An Engine of the test's own, with crun besides runc, and one image from the Engine of all.

    It lives in a mount namespace without the second hierarchy of control groups, which crun does not stand on a host
    that has both; and in a network namespace, because an Engine without a bridge removes docker0, whose ever it is.
    """

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "engine.sock"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def start(self, *more: str) -> None:
        places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        options = [f"--{option}={self._directory / name}" for option, name in places.items()]
        options += [f"--host={self.host}", "--bridge=none", "--iptables=false", *more]
        if crun := shutil.which("crun"):
            options.append(f"--add-runtime=crun={crun}")
        script = 'mount --make-rslave /; umount /sys/fs/cgroup/unified 2>/dev/null; exec dockerd "$@"'
        with (self._directory / "log").open("ab") as log:
            # Its containerd, found too slow and asked for its stacks, writes them into the temporary directory.
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--net", "sh", "-c", script, "sh", *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._directory)},
            )
        if not eventually(self.answers, timeout_s=ENGINE_TIMEOUT_S):
            self.end(signal.SIGKILL)  # or the next start would meet this one
            raise AssertionError((self._directory / "log").read_text()[-2000:])

    def end(self, number: signal.Signals) -> None:
        """Returns when it has ended, and its containerd. It is killed if it does not follow the signal. Idempotent."""
        if self._process is None or self._process.poll() is not None:
            return
        containerd = psutil.Process(self.pid).children()
        self.signal(number)
        try:
            self._process.wait(ENGINE_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            for process in psutil.wait_procs(containerd, ENGINE_TIMEOUT_S)[1]:
                process.kill()
            # One that was killed leaves them, and to the next one they are those of whatever has these numbers by then.
            for left in ("pid", "exec/containerd/containerd.pid"):
                (self._directory / left).unlink(missing_ok=True)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def data(self) -> Path:
        """The directory that it keeps everything in."""
        return self._directory / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def mounts(self) -> int:
        """The number of its mounts. Its mount namespace has those of the host's Engine too, which come and go."""
        mounted = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        return sum(str(self._directory) in line for line in mounted)

    def load(self, image: str) -> None:
        with engine_client() as client:
            saved = client.get_image(image)
            with engine_client(self.socket) as own:
                for _ in own.load_image(saved):
                    pass

    def answers(self) -> bool:
        try:
            engine_socket(self.host)
        except NoEngine:
            return False
        with engine_client(self.socket) as client:
            return bool(client.ping())


@contextmanager
def own_engine(image: str) -> Iterator[OwnEngine]:
    with tempfile.TemporaryDirectory(prefix="e-") as directory:
        engine = OwnEngine(Path(directory))
        engine.start()
        try:
            engine.load(image)
            yield engine
        finally:
            engine.end(signal.SIGTERM)


# ---------------------------------------------------------------------------------------------------------------------
# The line to the Engine


class EngineLine:
    """A socket that leads to the Engine, and can be made to hang, or to swallow the answers to some requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hangs = False
        self.swallow: bytes | None = None  # answers to requests that hold this
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(str(SOCKET))
        swallowing = False

        async def answers() -> None:
            while data := await up_reader.read(_CHUNK_BYTES):
                if swallowing or self.hangs:
                    continue
                writer.write(data)
                await writer.drain()
            writer.close()

        answering = asyncio.create_task(answers())
        try:
            while data := await reader.read(_CHUNK_BYTES):
                if self.hangs:
                    continue
                swallowing = swallowing or (self.swallow is not None and self.swallow in data)
                up_writer.write(data)
                await up_writer.drain()
        finally:
            if not swallowing:
                up_writer.close()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await answering
            up_writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def engine_line(path: Path) -> AsyncIterator[EngineLine]:
    line = EngineLine(path)
    server = await asyncio.start_unix_server(line.accept, path=str(path))
    try:
        yield line
    finally:
        server.close()
        await line.close()
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# A registry


class Registry:
    """Holds one image, `HOST/image:latest`; its layer is handed out when the test lets it."""

    def __init__(self) -> None:
        self.layer_may_go = threading.Event()
        layer = layer_of({"file": bytes(200_000)})
        config = config_of(layer)
        self.blobs = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in (layer, config)}
        self.layer_digest, config_digest = self.blobs
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": {
                    "mediaType": "application/vnd.docker.container.image.v1+json",
                    "size": len(config),
                    "digest": config_digest,
                },
                "layers": [
                    {
                        "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
                        "size": len(layer),
                        "digest": self.layer_digest,
                    }
                ],
            }
        ).encode()


@contextmanager
def running_registry() -> Iterator[tuple[Registry, str]]:
    """A registry on this host, and the reference of its image."""
    registry = Registry()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            kind, data = "application/octet-stream", registry.blobs.get(self.path.rpartition("/")[2])
            if self.path == "/v2/":
                data = b"{}"
            elif self.path.startswith("/v2/image/manifests/"):
                kind, data = _MANIFEST, registry.manifest
            if self.path.endswith(registry.layer_digest):
                registry.layer_may_go.wait(30)
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield registry, f"127.0.0.1:{server.server_port}/image"
    finally:
        registry.layer_may_go.set()
        server.shutdown()
        thread.join()
        server.server_close()
