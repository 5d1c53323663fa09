"""The Engine dies, hangs and comes back under a daemon; containers are hurt by hand: clients get the reason, all ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_client import Outcome, PreconditionError, SessionState, UnavailableError
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S, executing, works
from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.engine import OwnEngine, engine_client, own_engine
from tests.support.fork_server import server
from tests.support.polling import eventually
from tests.support.rounds import usual
from tests.support.tuned_daemon import tuned

IMAGE = "remote-executor/base"
FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(1e6)"
TICKS = "import time\nfor i in range(30):\n    print(i, flush=True)\n    time.sleep(0.05)\n'ticked'"
CONFIG = f"""\
server.backend = "docker"
docker.images.base = "{IMAGE}"
pool.size = 0
sessions.silence_s = 2.0
"""
# An Engine takes two seconds to start and to end, which is longer than most of these tests.
ALL_HAVE_ONE = pytest.mark.usefixtures("shared")


@pytest.fixture(scope="module")
def loaded() -> Iterator[OwnEngine]:
    """An Engine that has the image, and runs until a test ends it."""
    require("docker")
    if os.geteuid() != 0 or not all(map(shutil.which, ("dockerd", "unshare"))):
        pytest.skip("only root, with dockerd at hand, can start an Engine of its own")
    with own_engine(IMAGE) as ready:
        yield ready


@pytest.fixture(scope="module")
def shared(loaded: OwnEngine) -> None:
    """Asked for by tests that do not end the Engine."""


@pytest.fixture
def engine(request: pytest.FixtureRequest, loaded: OwnEngine) -> Iterator[OwnEngine]:
    if "shared" in request.fixturenames:
        if not loaded.answers():  # another test has failed
            loaded.end(signal.SIGKILL)
            loaded.start()
        yield loaded
        return
    loaded.end(signal.SIGTERM)
    loaded.start()
    yield loaded
    loaded.end(signal.SIGTERM)


@pytest.fixture
def restart(start: StartDaemon, engine: OwnEngine) -> Callable[..., Daemon]:
    """Starts a daemon on the Engine, the next time on what the last one left."""

    def restart(**constants: float) -> Daemon:
        program = tuned(DOCKER_REQUEST_TIMEOUT_S=2.0, HOST_SWEEP_INTERVAL_S=0.2, **constants)
        return start(f'{CONFIG}docker.host = "{engine.host}"\n', program=program)

    return restart


@pytest.fixture
def daemon(restart: Callable[..., Daemon]) -> Daemon:
    return restart()


def containers(engine: OwnEngine) -> list[dict[str, Any]]:
    with engine_client(engine.socket) as client:
        return list(client.containers(all=True))


def only_container(engine: OwnEngine) -> str:
    (found,) = containers(engine)
    return str(found["Id"])


def nothing_is_left(engine: OwnEngine, daemon: Daemon) -> bool:
    names = {entry.name for entry in (daemon.state_dir / "docker").iterdir()}
    return containers(engine) == [] and names == {".lock"}


@contextmanager
def paused(engine: OwnEngine) -> Iterator[None]:
    """The Engine takes requests and answers none."""
    engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.signal(signal.SIGCONT)


@contextmanager
def gone(engine: OwnEngine, how: signal.Signals) -> Iterator[None]:
    engine.end(how)
    try:
        yield
    finally:
        engine.start()


@contextmanager
def full_disk(engine: OwnEngine) -> Iterator[None]:
    """The Engine has no room to write a container down."""
    place = str(engine.data / "containers")
    inside = ["nsenter", f"--target={engine.pid}", "--mount"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=4k", "none", place], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", place], check=True)


# ---------------------------------------------------------------------------------------------------------------------
# The Engine


@ALL_HAVE_ONE
def test_sessions_outlive_an_engine_that_hangs(engine: OwnEngine, daemon: Daemon) -> None:
    """The daemon has its own line to each guest; only what the Engine must do waits, for so long at most."""
    with daemon.client() as client, client.create_session(authorized_imports=["time"]) as session:
        with paused(engine):
            with pytest.raises(UnavailableError, match="could not create a sandbox"):
                client.create_session()
            result = session.execute(TICKS)
            assert (result.outcome, result.output) == (Outcome.SUCCEEDED, "ticked")
        assert works(daemon)
        assert eventually(lambda: len(containers(engine)) == 1)  # the Engine made it after the end of the wait
    assert eventually(lambda: nothing_is_left(engine, daemon))


@ALL_HAVE_ONE
def test_sessions_deleted_while_the_engine_hangs_are_gone_afterwards(engine: OwnEngine, daemon: Daemon) -> None:
    with daemon.client() as client:
        sessions = [client.create_session() for _ in range(3)]
        with paused(engine):
            for session in sessions:
                session.close()
            assert client.list_sessions() == []
        assert eventually(lambda: nothing_is_left(engine, daemon))
        assert works(daemon)


@ALL_HAVE_ONE
@pytest.mark.parametrize("image_refresh_s", usual([0.001, 60.0], but=(60.0,)))
def test_a_crowd_of_creations_fails_together_on_an_engine_that_hangs(
    engine: OwnEngine, restart: Callable[..., Daemon], image_refresh_s: float
) -> None:
    """And not one after the other, each after its own time limit, be it for the image or for the container."""
    daemon = restart(DOCKER_IMAGE_REFRESH_S=image_refresh_s)

    def refused(_: int) -> str:
        with pytest.raises(UnavailableError) as error:
            client.create_session()
        return str(error.value.reason)

    with daemon.client(call_timeout_s=40.0) as client:
        with paused(engine), ThreadPoolExecutor(24) as threads:
            assert set(threads.map(refused, range(24))) == {"BACKEND_UNAVAILABLE"}
        assert works(daemon)
        assert eventually(lambda: nothing_is_left(engine, daemon))


@ALL_HAVE_ONE
def test_a_full_disk_is_an_honest_refusal_and_leaves_nothing(engine: OwnEngine, daemon: Daemon) -> None:
    with daemon.client() as client:
        with full_disk(engine), pytest.raises(UnavailableError, match="could not create a sandbox"):
            client.create_session()
        assert works(daemon)
    assert eventually(lambda: nothing_is_left(engine, daemon))


# ---------------------------------------------------------------------------------------------------------------------
# Containers, by hand


def remove(client: Any, container: str) -> None:
    client.remove_container(container, force=True, v=True)


def kill(client: Any, container: str) -> None:
    client.kill(container)


def pause(client: Any, container: str) -> None:
    client.pause(container)


HURTS = [
    (remove, "its container was removed"),
    (kill, "its container was killed (exit code 137)"),
    (pause, "the guest has not answered for 2 s"),
]


@ALL_HAVE_ONE
@pytest.mark.parametrize(("hurt", "message"), usual(HURTS, but=HURTS[:1]))
def test_a_container_that_is_hurt_in_mid_execution_is_told_as_what_it_is(
    engine: OwnEngine, daemon: Daemon, hurt: Callable[[Any, str], None], message: str
) -> None:
    with daemon.client() as client, client.create_session(authorized_imports=["time"]) as session:
        with executing(session, FOREVER) as result, engine_client(engine.socket) as by_hand:
            hurt(by_hand, only_container(engine))
        ended = result.result(WAIT_S)
        assert (ended.outcome, ended.stdout) == (Outcome.LOST, "here\n")
        assert ended.error is not None and ended.error.message == message
        with pytest.raises(PreconditionError):
            session.execute("1")
        assert client.list_sessions()[0].lost_reason == message
        assert eventually(lambda: nothing_is_left(engine, daemon))
        assert works(daemon)


@ALL_HAVE_ONE
def test_what_does_not_hurt_a_sandbox_ends_no_execution(engine: OwnEngine, daemon: Daemon) -> None:
    """Its container renamed, paused for a moment; the file of its socket removed under a connection."""
    with daemon.client() as client, client.create_session(authorized_imports=["time"]) as session:
        with executing(session, TICKS) as result, engine_client(engine.socket) as by_hand:
            container = only_container(engine)
            by_hand.rename(container, "somebody-elses")
            by_hand.pause(container)
            by_hand.unpause(container)
            for directory in (daemon.state_dir / "docker").glob("*/"):
                shutil.rmtree(directory)
        assert (result.result().outcome, result.result().output) == (Outcome.SUCCEEDED, "ticked")
        assert session.execute("6 * 7").output == 42
    assert eventually(lambda: nothing_is_left(engine, daemon))


# ---------------------------------------------------------------------------------------------------------------------
# Engines that end. From here on each test has one of its own: what was started once for all ends with the first of them.


def test_executions_under_an_engine_that_is_restarted_are_lost_with_a_reason(engine: OwnEngine, daemon: Daemon) -> None:
    with daemon.client() as client:
        session, idle = client.create_session(authorized_imports=["time"]), client.create_session()
        with executing(session, FOREVER) as result, gone(engine, signal.SIGTERM):
            pass
        ended = result.result(WAIT_S)
        assert (ended.outcome, ended.stdout) == (Outcome.LOST, "here\n")
        assert ended.error is not None
        assert re.search(r"container was killed|Engine does not answer", ended.error.message), ended.error
        assert eventually(lambda: {info.state for info in client.list_sessions()} == {SessionState.LOST})
        assert works(daemon)
        session.close()
        idle.close()
    assert eventually(lambda: nothing_is_left(engine, daemon))


# ---------------------------------------------------------------------------------------------------------------------
# The daemon dies as well


def test_sessions_whose_engine_was_restarted_while_the_daemon_was_dead_are_lost(
    engine: OwnEngine, restart: Callable[..., Daemon]
) -> None:
    daemon = restart()
    with daemon.client() as client, ThreadPoolExecutor(1) as threads:
        session = client.create_session(authorized_imports=["time"])
        session.execute("'finished'", execution_id="before")
        running = threading.Event()
        result = threads.submit(session.execute, FOREVER, on_event=lambda _: running.set())
        assert running.wait(WAIT_S)
        daemon.kill()
        with gone(engine, signal.SIGKILL):
            pass
        daemon = restart()
        ended = result.result(WAIT_S)
        assert (ended.outcome, ended.stdout) == (Outcome.LOST, "here\n")
        assert ended.error is not None
        assert session.execute("'finished'", execution_id="before").output == "finished"
        assert nothing_is_left(engine, daemon)
        session.close()
        assert works(daemon)


def test_a_daemon_that_comes_back_before_its_engine_says_so_and_later_finds_its_sessions(
    engine: OwnEngine, restart: Callable[..., Daemon], directory: Path
) -> None:
    engine.end(signal.SIGTERM)
    engine.start("--live-restore")
    daemon = restart()
    with daemon.client() as client:
        session = client.create_session()
        session.execute("x = 42")
        daemon.kill()
        engine.end(signal.SIGKILL)
        place = ["--state-dir", str(daemon.state_dir), "--listen", f"unix:{directory / 'other.sock'}"]
        early = server("serve", "--config", str(directory / "config.toml"), *place)
        assert early.returncode == 1 and "No Engine listens" in early.stderr, early
        engine.start("--live-restore")
        daemon = restart()
        assert session.execute("x").output == 42
        session.close()
    assert eventually(lambda: nothing_is_left(engine, daemon))


@pytest.mark.parametrize("how", usual([signal.SIGKILL, signal.SIGSTOP], but=(signal.SIGSTOP,)))
def test_a_daemon_that_is_told_to_stop_without_its_engine_stops_and_the_next_one_sweeps(
    engine: OwnEngine, restart: Callable[..., Daemon], how: signal.Signals
) -> None:
    """So it goes when a host shuts down: the Engine may be the first to end."""
    daemon = restart()
    with daemon.client() as client:
        client.create_session(detached=True)
        client.create_session(detached=True)
        assert eventually(lambda: len(containers(engine)) == 2)
        with gone(engine, how) if how == signal.SIGKILL else paused(engine):
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(WAIT_S) == 1
        said = daemon.log.read_text()
        assert "2 sandboxes are left over" in said
        assert "Traceback" not in said
    assert nothing_is_left(engine, restart())
