"""Several backends in one daemon: new sessions go to the next one while the first is away, and those that run stay."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClient, ResourceExhaustedError, SessionState, UnavailableError
from tests.chaos.proxy import CuttingProxy
from tests.support.audit import records
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon, running_daemon
from tests.support.e2b import ThreadedDouble
from tests.support.engine import SOCKET, engine_client
from tests.support.polling import eventually
from tests.support.tuned_daemon import tuned

WAIT_S = 60.0
POLICY = """\
default = "p"
[profiles.p]
sandbox.backends = {order}
"""
CONFIG = """\
server.backend = "docker"
server.other_backends = ["local"]
docker.host = "unix://{line}"
docker.images.base = "{image}"
policy.file = "{policy}"
pool.size = 0
"""


def _quick(**constants: float) -> tuple[str, ...]:
    return tuned(DOCKER_REQUEST_TIMEOUT_S=5.0, E2B_REQUEST_TIMEOUT_S=5.0, HOST_SWEEP_INTERVAL_S=0.2, **constants)


class Line:
    """The way to the Engine, which may be away."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._up = contextlib.ExitStack()

    def up(self) -> None:
        self._up.enter_context(CuttingProxy(self.path, SOCKET))

    def down(self) -> None:
        self._up.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="d-", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture
def line(directory: Path) -> Iterator[Line]:
    require("local")
    require("docker")
    line = Line(directory / "engine.sock")
    line.up()
    yield line
    line.down()


@pytest.fixture
def start(directory: Path, line: Line) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon; the next one, after it was killed, on what it left."""
    policy = directory / "policy.toml"
    policy.write_text(POLICY.format(order='["docker", "local"]'))
    with contextlib.ExitStack() as stack:

        def start(more: str = "", **constants: float) -> Daemon:
            config = directory / "config.toml"
            config.write_text(CONFIG.format(line=line.path, image=DOCKER_IMAGE, policy=policy) + more)
            return stack.enter_context(running_daemon(directory, "--config", str(config), program=_quick(**constants)))

        yield start


def place_of_a_new_one(client: ExecutorClient) -> str:
    with client.create_session() as session:
        assert session.execute("6 * 7").output == 42
        return str(session.info.backend)


def containers(daemon: Daemon) -> list[dict[str, Any]]:
    """Those of this daemon: their bind mounts are in its state directory."""
    with engine_client() as client:
        mounted = [(each, [mount["Source"] for mount in each["Mounts"]]) for each in client.containers(all=True)]
    return [each for each, sources in mounted if any(source.startswith(str(daemon.state_dir)) for source in sources)]


def audited(daemon: Daemon) -> list[str]:
    written = records(daemon.state_dir / "audit")
    return [record["backend"] for record in written if record["kind"] == "session_created"]


def test_new_sessions_go_to_the_next_while_the_first_is_away_and_none_that_runs_is_moved(
    start: Callable[..., Daemon], line: Line
) -> None:
    daemon = start()
    with daemon.client() as client, client.create_session() as first:
        first.execute("x = 'kept'")
        assert first.info.backend == "docker"
        line.down()
        with client.create_session() as second:
            assert second.info.backend == "local"
            assert second.execute("6 * 7").output == 42
            assert first.execute("x").output == "kept", "who runs needs no Engine"
            assert {info.session_id: info.backend for info in client.list_sessions()} == {
                first.session_id: "docker",
                second.session_id: "local",
            }
            line.up()
            assert eventually(lambda: place_of_a_new_one(client) == "docker")
            assert second.execute("6 * 7").output == 42
            assert second.info.backend == "local"
        assert client.get_policy().backends == ("docker", "local")
    assert audited(daemon)[:2] == ["docker", "local"]


def test_who_names_a_backend_gets_that_one_or_a_refusal(start: Callable[..., Daemon], line: Line) -> None:
    with start().client() as client:
        with client.create_session(backend="local") as session:
            assert session.info.backend == "local"
        line.down()
        with pytest.raises(UnavailableError) as refused:
            client.create_session(backend="docker")
        assert refused.value.reason == "BACKEND_UNAVAILABLE"
        assert client.list_sessions() == []
        line.up()


def test_sessions_on_both_outlive_a_daemon_that_was_killed(start: Callable[..., Daemon]) -> None:
    killed = start()
    with killed.client() as client:
        sessions = [client.create_session(backend=backend) for backend in ("docker", "local")]
        for session in sessions:
            session.execute("x = 'kept'")
        killed.kill()
    with start().client() as client:
        for session in sessions:
            assert client.get_session(session.session_id).execute("x").output == "kept"


def test_sessions_of_a_backend_that_does_not_come_back_are_lost_and_their_sandboxes_end_when_it_does(
    start: Callable[..., Daemon], line: Line
) -> None:
    killed = start()
    with killed.client() as client:
        lost, kept = (client.create_session(backend=backend) for backend in ("docker", "local"))
        killed.kill()
    assert len(containers(killed)) == 1
    line.down()
    daemon = start(RECOVERY_S=0.1)
    with daemon.client() as client:
        found = {info.session_id: info for info in client.list_sessions()}
        assert found[lost.session_id].state is SessionState.LOST
        assert found[lost.session_id].lost_reason == "its backend docker could not be used when the daemon came back"
        assert found[kept.session_id].state is SessionState.IDLE
        line.up()
        assert eventually(lambda: containers(daemon) == [])
        assert eventually(lambda: place_of_a_new_one(client) == "docker")


# -- with a cloud


E2B_CONFIG = """\
server.backend = "e2b"
server.other_backends = ["local"]
e2b.api_url = "{double.url}"
e2b.sandbox_url = "{double.url}"
e2b.api_key_file = "{double.api_key_file}"
e2b.max_sandboxes = 1
policy.file = "{policy}"
pool.size = 0
"""


@pytest.fixture(scope="module")
def double() -> Iterator[ThreadedDouble]:
    require("e2b")
    with ThreadedDouble() as double:
        yield double


@pytest.fixture
def rented(directory: Path, double: ThreadedDouble) -> Iterator[Daemon]:
    """A daemon that rents one sandbox, and makes the others here."""
    policy, config = directory / "policy.toml", directory / "config.toml"
    policy.write_text(POLICY.format(order='["e2b", "local"]'))
    config.write_text(E2B_CONFIG.format(double=double, policy=policy))
    with running_daemon(directory, "--config", str(config), program=_quick()) as daemon:
        yield daemon
    assert not double.sandboxes


def test_who_finds_the_account_full_goes_to_the_next_unless_it_wants_no_other(rented: Daemon) -> None:
    with rented.client(busy_timeout_s=0.0) as client, client.create_session() as first:
        assert (first.info.backend, first.execute("6 * 7").output) == ("e2b", 42)
        assert place_of_a_new_one(client) == "local"
        with pytest.raises(ResourceExhaustedError) as refused:
            client.create_session(backend="e2b")
        assert refused.value.reason == "BACKEND_FULL"
        assert refused.value.retry_after_s


def test_a_cloud_that_is_away_costs_no_session_and_is_used_again(rented: Daemon, double: ThreadedDouble) -> None:
    with rented.client() as client:
        double.go_down()
        assert place_of_a_new_one(client) == "local"
        double.come_up()
        assert eventually(lambda: place_of_a_new_one(client) == "e2b", timeout_s=WAIT_S)
