"""Bad input of the Docker backend: listeners that are no Engine, images that are none, names that are tricks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from executor_client import InvalidRequest, UnavailableError, Wait, WaitKind
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.backends.docker import DockerBackend, check, probe
from executor_server.backends.docker.host import NoEngine, engine_socket
from executor_server.core.config.backend_config import DockerImage, DockerSection
from executor_server.core.config.config import load
from executor_server.core.config.key_types import ConfigError
from executor_server.core.errors import ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
from tests.support.backends import require
from tests.support.daemon import running_daemon
from tests.support.engine import changed_image, engine_client, running_registry
from tests.support.fork_server import server
from tests.support.polling import eventually
from tests.support.tuned_daemon import tuned

IMAGE = "remote-executor/base"
SPEC = SandboxSpec("base", memory_bytes=2**28, processes=32, disk_bytes=2**24, orphan_time_s=60.0)
TIMEOUT_S = 30.0


@pytest.fixture
def directory() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="d-"))
    yield place
    shutil.rmtree(place)


@pytest.fixture
def state_dir(directory: Path) -> Path:
    require("docker")
    return directory


# ---------------------------------------------------------------------------------------------------------------------
# No Engine


def http(body: str, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


NO_ENGINES: dict[str, tuple[bytes | None, str]] = {
    "silent": (None, "nothing came within 0.3 s"),
    "hangs up": (b"", "hangs up, or is no Engine"),
    "another protocol": (b"\xff\x00SSH-2.0\r\n\r\n", "hangs up, or is no Engine"),
    "a web site": (http("<html>It works!</html>"), "what came is not an Engine's answer"),
    "a list": (http("[1, 2]"), "what came is not an Engine's answer"),
    "an object": (http("{}"), "what came is not an Engine's answer"),
    "a version that is none": (http('{"ApiVersion": "x.y"}'), "does not answer like one"),
    "a version and nothing else": (http('{"ApiVersion": "1.41"}'), "does not answer like one"),
    "an old one": (http('{"ApiVersion": "1.12"}'), "API versions below"),
    "an error": (http("oh", "500 Internal Server Error"), "500 Server Error"),
}


@contextmanager
def listener(path: Path, answer: bytes | None) -> Iterator[None]:
    """Gives the same answer to every request; with None, none."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(16)
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # shut down
                    return
                taken.append(connection)
                if answer is not None:
                    with suppress(OSError):  # a client that only connected has closed the connection
                        if connection.recv(65_536):
                            connection.sendall(answer)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in taken:
                connection.close()


@pytest.mark.parametrize("kind", NO_ENGINES)
async def test_a_listener_that_is_no_engine_is_reported(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "DOCKER_REQUEST_TIMEOUT_S", 0.3)
    answer, message = NO_ENGINES[kind]
    backend = DockerBackend(directory / "s", DockerSection(host=f"unix://{directory}/engine.sock"))
    with listener(directory / "engine.sock", answer):
        (finding,) = await backend.check_host()
        assert (finding.subject, finding.ok, finding.required) == ("Engine", False, True)
        assert message in finding.detail and finding.remedy, finding
        with pytest.raises(SandboxFailure, match="cannot run Docker sandboxes"):
            await backend.start()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return server(*arguments, "--backend", "docker", **environment)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("unix:///nowhere/engine.sock", "does not exist"),
        ("unix:///dev/null", "is not a socket"),
        ("tcp://192.0.2.1:2376", "not on this host"),
        ("ssh://user@192.0.2.1", "not on this host"),
    ],
)
def test_without_an_engine_both_commands_end_with_a_sentence(directory: Path, host: str, message: str) -> None:
    variables = {"DOCKER_HOST": host, "DOCKER_TLS_VERIFY": "1", "EXECUTOR_STATE_DIR": str(directory / "s")}
    for name in ("check-host", "serve"):
        ended = command(name, "--listen", f"unix:{directory}/listen.sock", **variables)
        assert ended.returncode == 1
        assert message in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr


def test_an_error_about_permission_for_the_engine_names_the_remedy(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    with listener(directory / "engine.sock", None):
        (directory / "engine.sock").chmod(0o600)
        directory.chmod(0o711)
        process = os.fork()
        if process == 0:
            os._exit(_as_nobody(f"unix://{directory}/engine.sock"))
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def _as_nobody(host: str) -> int:
    """Runs a process as the user nobody; its exit code is 0 when the error names the remedy."""
    os.setgroups([])
    os.setresgid(65_534, 65_534, 65_534)
    os.setresuid(65_534, 65_534, 65_534)
    try:
        engine_socket(host)
    except NoEngine as problem:
        return 0 if "may not speak" in problem.detail and "usermod" in problem.remedy else 1
    return 2


# ---------------------------------------------------------------------------------------------------------------------
# Images

# Programs under the name of Python that make no proper socket.
_LISTENS = """\
import os, socket, time
path = "/run/executor/socket/guest.sock"
listener = socket.socket(socket.AF_UNIX)
listener.bind(path + ".new")
os.chmod(path + ".new", 0o777)
listener.listen(1)
os.rename(path + ".new", path)
connection = listener.accept()[0]
"""
_FOREVER = "\nimport time\ntime.sleep(1000)"
IMPOSTORS = {
    "prints": ("print('x' * 10**8)", "does not run: its container ended at once"),
    "ends": ("", "does not run: its container ended at once"),
    "links": ("import os; os.symlink('/etc/passwd', '/run/executor/socket/guest.sock')" + _FOREVER, "does not answer"),
    "pipes": ("import os; os.mkfifo('/run/executor/socket/guest.sock')" + _FOREVER, "does not answer"),
    "floods": (_LISTENS + "while True: connection.sendall(b'[' * 65536)", "does not answer like one"),
    "drips": (_LISTENS + "while True:\n    connection.sendall(b'[')\n    time.sleep(0.1)", "does not answer"),
}


async def refusal(state_dir: Path, reference: str) -> SandboxFailure:
    """Returns the error of an image; a sandbox of the other image can still be made."""
    images = {"base": DockerImage(reference=IMAGE), "odd": DockerImage(reference=reference)}
    backend = DockerBackend(state_dir, DockerSection(images=images))
    await backend.start()
    try:
        await backend.adopt(())
        with pytest.raises(SandboxFailure) as refused:
            await backend.create(replace(SPEC, image="odd"))
        await (await backend.create(SPEC)).destroy()
        assert await backend.sweep() == 0
    finally:
        await backend.close()
    return refused.value


@pytest.mark.parametrize("kind", IMPOSTORS)
async def test_an_odd_image_is_refused_and_stops_no_other(
    state_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_ANSWER_TIMEOUT_S", 1.0)
    program, message = IMPOSTORS[kind]
    files = {"usr/local/bin/python3": f"#!/usr/bin/python3\n{program}\n".encode()}
    with changed_image(IMAGE, f"executor-test/{kind}", (), files) as reference:
        refused = await refusal(state_dir, reference)
    assert isinstance(refused, ImageNotReady) and message in str(refused), refused


async def test_an_image_that_the_engine_itself_refuses_stops_no_other(state_dir: Path) -> None:
    with changed_image(IMAGE, "executor-test/root-volume", ('VOLUME ["/"]',)) as reference:
        assert "destination" in str(await refusal(state_dir, reference))


async def test_the_image_s_variables_for_python_and_the_loader_do_no_harm(state_dir: Path) -> None:
    nonsense = {
        "PYTHONPATH": "/evil",
        "PYTHONHOME": "/nowhere",
        "PYTHONSTARTUP": "/evil/sitecustomize.py",
        "PYTHONINSPECT": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONIOENCODING": "utf-16",
        "LD_PRELOAD": "/nowhere.so",
        "LC_ALL": "xx_YY.nothing",
    }
    changes = (*(f"ENV {name}={value}" for name, value in nonsense.items()), "WORKDIR /not/there", "USER no:body")
    files = {"evil/sitecustomize.py": b"raise SystemExit(9)"}
    with changed_image(IMAGE, "executor-test/nonsense", changes, files) as reference:
        backend = DockerBackend(state_dir, DockerSection(images={"base": DockerImage(reference=reference)}))
        await backend.start()
        try:
            await backend.adopt(())
            channel = GuestChannel((await backend.create(SPEC)).endpoint)
            assert (await channel.connect()).python_version.startswith("3.")
            channel.close()
        finally:
            await backend.close()


def test_kept_sandboxes_of_a_changed_or_removed_image_are_not_served(state_dir: Path) -> None:
    tag = "executor-test/renewed"
    config = state_dir / "config.toml"
    config.write_text(f'server.backend = "docker"\npool.size = 1\n[docker]\nimages.base = "{tag}"\n')

    program = tuned(DOCKER_IMAGE_REFRESH_S=0.1)

    def version() -> str:
        with client.create_session(authorized_imports=["os"]) as session:
            return str(session.execute("import os\nos.environ['VERSION']").output)

    with ExitStack() as images:  # last: the Engine keeps an image of which there are containers
        images.enter_context(changed_image(IMAGE, tag, ("ENV VERSION=1",)))
        with running_daemon(state_dir, "--config", str(config), program=program) as daemon, daemon.client() as client:
            assert version() == "1"
            images.enter_context(changed_image(IMAGE, tag, ("ENV VERSION=2",)))
            assert eventually(lambda: version() == "2", timeout_s=TIMEOUT_S)
            assert {version() for _ in range(3)} == {"2"}
            with engine_client() as by_hand:
                by_hand.remove_image(tag, force=True)
            with pytest.raises(UnavailableError, match="not on this host") as refused:
                for _ in range(3):
                    version()
            assert refused.value.reason == "IMAGE_NOT_READY"


# ---------------------------------------------------------------------------------------------------------------------
# Names

TRICKS = (
    "base; rm -rf /",
    "../x",
    "-v",
    "--privileged",
    "$(id)",
    "`id`",
    "a b",
    "a\nb",
    "a" * 10_000,
    "ünï",
    "A/B:c",
    "name@sha256:abc",
    "",
    "/abs",
    "http://x/y",
    "a//b",
    "a:tag:tag",
    "x/../y",
    "a-" * 120 + "!",
)


@pytest.mark.parametrize("reference", TRICKS)
def test_a_reference_with_tricks_is_no_configuration(directory: Path, reference: str) -> None:
    (directory / "c.toml").write_text(f"[docker.images]\nbase = {json.dumps(reference)}\n")
    with pytest.raises(ConfigError, match="must be an image reference like"):
        load(directory / "c.toml")


def test_a_client_can_name_configured_images_only(state_dir: Path) -> None:
    (state_dir / "c.toml").write_text(f'server.backend = "docker"\npool.size = 0\ndocker.images.base = "{IMAGE}"\n')
    with running_daemon(state_dir, "--config", str(state_dir / "c.toml")) as daemon, daemon.client() as client:
        for name in (IMAGE, f"{IMAGE}:latest", *filter(None, TRICKS)):
            with pytest.raises(InvalidRequest) as refused:
                client.create_session(image=name)
            # A text that can't be a name is refused before it is looked up.
            assert refused.value.reason == (
                "UNKNOWN_IMAGE" if len(name) <= 256 and name.isprintable() else "INVALID_FIELD"
            )
            assert str(refused.value).isprintable() and len(str(refused.value)) < 300


def test_a_client_waits_for_an_image_and_sees_its_progress(state_dir: Path) -> None:
    """The registry's image has no Python, which the daemon finds out after it was fetched."""
    policy = state_dir / "p.toml"
    policy.write_text('default = "any"\n[profiles.any.sandbox]\npull_images = true\n')
    waits: list[Wait] = []
    with running_registry() as (registry, reference):
        (state_dir / "c.toml").write_text(
            f'server.backend = "docker"\npool.size = 0\npolicy.file = "{policy}"\n'
            f'[docker.images]\nbase = "{IMAGE}"\nremote = "{reference}"\n'
        )

        def on_wait(wait: Wait) -> None:
            waits.append(wait)
            if wait.kind is WaitKind.IMAGE:
                registry.layer_may_go.set()

        with (
            running_daemon(state_dir, "--config", str(state_dir / "c.toml")) as daemon,
            daemon.client(on_wait=on_wait) as client,
            pytest.raises(UnavailableError, match="image 'remote' has no Python"),
        ):
            client.create_session(image="remote")
        with engine_client() as engine:
            engine.remove_image(reference, force=True)
    wait = next(wait for wait in waits if wait.kind is WaitKind.IMAGE)
    assert wait.reason.startswith("image 'remote' is being fetched") and wait.gives_up_after_s == 600


def test_a_missing_registry_costs_a_session_no_wait(state_dir: Path) -> None:
    """192.0.2.1 belongs to no host: an Engine waits for it, or gets an error at once; the session does not wait."""
    policy = state_dir / "p.toml"
    policy.write_text('default = "any"\n[profiles.any.sandbox]\npull_images = true\n')
    (state_dir / "c.toml").write_text(
        f'server.backend = "docker"\npool.size = 0\npolicy.file = "{policy}"\n'
        f'[docker.images]\nbase = "{IMAGE}"\nfar = "192.0.2.1:5000/far/away"\n'
    )
    command = ("--config", str(state_dir / "c.toml"))
    options = {"call_timeout_s": 10.0, "image_timeout_s": 0.0}
    with running_daemon(state_dir, *command) as daemon, daemon.client(**options) as client:
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"is being fetched|could not be fetched") as refused:
                client.create_session(image="far")
            assert refused.value.reason == "IMAGE_NOT_READY"
            assert "192.0.2" not in str(refused.value)
        with client.create_session(image="base") as session:
            assert session.execute("6 * 7").output == 42
