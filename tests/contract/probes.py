"""Probes look at each backend's sandboxes from outside of the daemon, and change them: one `Probe` for each backend.

A probe owns a host for sandboxes, a state directory and all that belongs to it, and makes backends on it: one after the
other, as a daemon that is started again does. It looks for the sandboxes themselves, and never asks the backend.
"""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import struct
import sys
import venv
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Protocol

import psutil

from executor_server.backends.base import Backend, KnownSandbox
from executor_server.backends.directory import is_sandbox_id
from executor_server.backends.docker import DockerBackend
from executor_server.backends.docker.resources import SANDBOX_LABEL
from executor_server.backends.local import LocalBackend
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core.config.backend_config import DockerImage, DockerSection, E2BSection, LocalImage
from executor_server.core.model import SandboxSpec
from executor_server.sessions import Session
from tests.support.backends import DOCKER_IMAGE, egress_bundle, make_backend
from tests.support.engine import engine_client
from tests.support.forked_backend import local_backend
from tests.support.killed_daemon import killed_daemon
from tests.support.polling import eventually_async, has_ended

MISSING = "missing"
"""An image that the backends of a probe know, and that does not exist."""
STRAY_ID = "0" * 16
FULL_AT = 2
"""Sandboxes that the backend of `small_backend` may have."""
PAUSE_IDLE_S = 0.3
_ABSENT_SOCKET = "unix:///nonexistent/engine.sock"


class Probe(Protocol):
    """One backend's host. `spec` is that of its sandboxes, unless a test needs another."""

    @property
    def name(self) -> str: ...

    def backend(self) -> Backend:
        """Returns a daemon's backend on this host; at most one is used at a time."""
        ...

    def small(self) -> Backend:
        """Returns one that may have `FULL_AT` sandboxes, if the backend has such a limit."""
        ...

    def pausing(self) -> Backend:
        """Returns one whose sandboxes are paused after PAUSE_IDLE_S without use, if they can be."""
        ...

    def with_lost_image(self) -> Backend:
        """Returns one that knows an image MISSING, which does not exist any more after `lose_image`."""
        ...

    def lose_image(self) -> None: ...

    def without_host(self) -> Backend:
        """Returns one whose host, engine or cloud does not work."""
        ...

    @property
    def egress_bundle(self) -> Path:
        """The file of certificate authorities that sandboxes with a network get."""
        ...

    async def left_by_a_killed_daemon(self, spec: SandboxSpec) -> tuple[KnownSandbox, str]:
        """Runs a daemon that makes a sandbox and is killed. Returns the sandbox as its registry knew it, and the fingerprint."""
        ...

    async def session_of_a_killed_daemon(self, spec: SandboxSpec) -> tuple[Path, str, str]:
        """Runs a daemon that is killed while killed_daemon.PROGRAM runs: its registry, ids of session and execution."""
        ...

    async def existing(self) -> set[str]:
        """Returns the ids of all sandboxes that exist, completely or in part, known to a daemon or not."""
        ...

    async def make_stray(self) -> None:
        """Makes a stray: it carries the daemon's id and belongs to no known sandbox. Its id is STRAY_ID."""
        ...

    async def kill(self, sandbox_id: str) -> None:
        """Ends a sandbox by the means of its host or cloud. It has ended on return."""
        ...

    def watch(self, session: Session) -> Callable[[], bool]:
        """Returns a function that is True once the session's supervisor, and so every program of it, has ended."""
        ...

    async def kill_supervisor(self, session: Session) -> None: ...

    async def kill_interpreter(self, session: Session) -> None: ...

    async def aclose(self) -> None: ...


@asynccontextmanager
async def probe_of(backend: str, directory: Path) -> AsyncIterator[Probe]:
    """Provides the probe of a backend, with its host below the directory."""
    probe: Probe
    if backend == "e2b":
        from tests.contract.e2b_probe import E2BProbe

        probe = await E2BProbe.open(directory)
    else:
        probes: dict[str, Callable[[Path], Probe]] = {"local": LocalProbe, "docker": DockerProbe}
        probe = probes[backend](directory)
    try:
        yield probe
    finally:
        await probe.aclose()


class RealProbe:
    """The common part of the probes of real backends: a state directory, and daemons that are processes."""

    name = ""
    section: E2BSection | None = None

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory

    def backend(self) -> Backend:
        return make_backend(self.name, self.state_dir, e2b=self.section)

    @property
    def egress_bundle(self) -> Path:
        return egress_bundle(self.state_dir)

    def small(self) -> Backend:
        return self.backend()

    def pausing(self) -> Backend:
        return self.backend()

    async def left_by_a_killed_daemon(self, spec: SandboxSpec) -> tuple[KnownSandbox, str]:
        left = await killed_daemon(self.name, self.state_dir, "sandbox", spec, self.section)
        known = KnownSandbox(left["sandbox_id"], spec, bytes.fromhex(left["token"]), self.name)
        return known, left["fingerprint"]

    async def session_of_a_killed_daemon(self, spec: SandboxSpec) -> tuple[Path, str, str]:
        left = await killed_daemon(self.name, self.state_dir, "session", spec, self.section)
        return self.state_dir, left["session_id"], left["execution_id"]

    def supervisor(self, session: Session) -> psutil.Process:
        raise NotImplementedError

    def watch(self, session: Session) -> Callable[[], bool]:
        supervisor = self.supervisor(session)
        return lambda: not supervisor.is_running()

    async def kill_supervisor(self, session: Session) -> None:
        self.supervisor(session).kill()

    async def kill_interpreter(self, session: Session) -> None:
        self.supervisor(session).children()[0].kill()

    async def aclose(self) -> None:
        return


class LocalProbe(RealProbe):
    """Sandboxes of namespaces: each is its first process, and a directory."""

    name = "local"

    @property
    def _sandboxes(self) -> Path:
        return self.state_dir / "sandboxes"

    def with_lost_image(self) -> Backend:
        venv.create(self.state_dir / "env", symlinks=True)
        images = {"base": LocalImage(python=Path(sys.executable)), MISSING: LocalImage(python=self.state_dir / "env")}
        return local_backend(self.state_dir, images)

    def lose_image(self) -> None:
        shutil.rmtree(self.state_dir / "env")

    def without_host(self) -> Backend:
        return LocalBackend(self.state_dir, bwrap=Path("/nonexistent/bwrap"))

    async def existing(self) -> set[str]:
        return _ids_in(self._sandboxes)

    async def make_stray(self) -> None:
        (self._sandboxes / STRAY_ID).mkdir()

    async def kill(self, sandbox_id: str) -> None:
        process = psutil.Process(_recorded_pid(self._sandboxes / sandbox_id))
        process.kill()
        await _ended(process)

    def supervisor(self, session: Session) -> psutil.Process:
        return supervisor_of(session)


class NodesProbe:
    """Sandboxes of nodes that are processes of this machine, with the local backend, by their state directories.

    It has what tests of sessions need. The sandbox of a session is the one that its node's registry names: others may be
    there, as of a session that has just ended.
    """

    def __init__(self, state_dirs: Mapping[str, Path]) -> None:
        self._state_dirs = state_dirs

    @property
    def state_dirs(self) -> Collection[Path]:
        return self._state_dirs.values()

    def supervisor(self, session: Session) -> psutil.Process:
        return self._supervisor(session.session_id)

    async def existing(self) -> set[str]:
        return {f"{node} {each}" for node, place in self._state_dirs.items() for each in _ids_in(place / "sandboxes")}

    async def kill(self, session_id: str) -> None:
        supervisor = self._supervisor(session_id)
        supervisor.kill()
        await _ended(supervisor)

    def watch(self, session: Session) -> Callable[[], bool]:
        supervisor = self.supervisor(session)
        return lambda: not supervisor.is_running()

    async def kill_supervisor(self, session: Session) -> None:
        self.supervisor(session).kill()

    async def kill_interpreter(self, session: Session) -> None:
        self.supervisor(session).children()[0].kill()

    def _supervisor(self, session_id: str) -> psutil.Process:
        state_dir = self._state_dirs[session_id.rpartition("-")[0]]
        with closing(sqlite3.connect(f"file:{state_dir / 'registry.db'}?mode=ro", uri=True)) as registry:
            ((sandbox_id,),) = registry.execute("SELECT sandbox_id FROM sessions WHERE session_id = ?", [session_id])
        return psutil.Process(_recorded_pid(state_dir / "sandboxes" / sandbox_id))


class DockerProbe(RealProbe):
    """Sandboxes that are containers, found by the label with their id, and a directory for each."""

    name = "docker"

    @property
    def _sandboxes(self) -> Path:
        return self.state_dir / "docker"

    def with_lost_image(self) -> Backend:
        base, missing = DockerImage(reference=DOCKER_IMAGE), DockerImage(reference="remote-executor/missing")
        return DockerBackend(self.state_dir, DockerSection(images={"base": base, MISSING: missing}))

    def lose_image(self) -> None:
        return  # the Engine never had it

    def without_host(self) -> Backend:
        base = DockerImage(reference=DOCKER_IMAGE)
        return DockerBackend(self.state_dir, DockerSection(host=_ABSENT_SOCKET, images={"base": base}))

    async def existing(self) -> set[str]:
        with engine_client() as client:
            listed = client.containers(all=True, filters={"label": "executor.daemon"})
        ours = [one for one in listed if any(each["Source"].startswith(str(self.state_dir)) for each in one["Mounts"])]
        return {one["Labels"][SANDBOX_LABEL] for one in ours} | _ids_in(self._sandboxes)

    async def make_stray(self) -> None:
        (self._sandboxes / STRAY_ID).mkdir()

    async def kill(self, sandbox_id: str) -> None:
        with engine_client() as client:
            (one,) = client.containers(all=True, filters={"label": f"{SANDBOX_LABEL}={sandbox_id}"})
            client.remove_container(one["Id"], force=True, v=True)

    def supervisor(self, session: Session) -> psutil.Process:
        return supervisor_of(session)


def supervisor_of(session: Session) -> psutil.Process:
    """Returns the first process of the session's sandbox, as the host sees it; for the local and the Docker backend."""
    sandbox = session._sandbox
    if isinstance(sandbox, LocalSandbox):
        assert sandbox.process is not None and sandbox.process.init_pid is not None
        return psutil.Process(sandbox.process.init_pid)
    # In a container the guest itself listens, and the kernel names the listener.
    assert session._channel._transport is not None
    connection = session._channel._transport.get_extra_info("socket")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return psutil.Process(pid)


def pid_inside(process: psutil.Process) -> list[int]:
    """Returns its id in each pid namespace that it is in, the host's first."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("NSpid:"))
    return [int(number) for number in line.split()[1:]]


def _recorded_pid(directory: Path) -> int:
    pid = json.loads((directory / "record.json").read_text())["pid"]
    assert isinstance(pid, int)
    return pid


async def _ended(process: psutil.Process) -> None:
    assert await eventually_async(lambda: has_ended(process))


def _ids_in(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir() if is_sandbox_id(each.name)} if directory.exists() else set()
