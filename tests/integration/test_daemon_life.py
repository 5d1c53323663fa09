"""The daemon's life as a process: it says where it is, drains when asked to stop, and hurries when asked twice."""

from __future__ import annotations

import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor_client import ExecutionResult, LogEvent, Outcome, Session, UnavailableError
from executor_server.guest.wire.rlimits import OPEN_FILES
from tests.support.backends import require
from tests.support.daemon import STOP_TIMEOUT_S, Daemon, running_daemon
from tests.support.fork_server import SERVER
from tests.support.polling import eventually


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    require("local")
    with (
        tempfile.TemporaryDirectory(prefix="d-") as directory,
        running_daemon(Path(directory), program=SERVER) as running,
    ):
        yield running


def logged(daemon: Daemon, event: str) -> bool:
    return eventually(lambda: event in daemon.log.read_text())


def run_until_stopped(session: Session, code: str, then: Callable[[], None]) -> ExecutionResult:
    """Runs code in a thread, does something once it has printed, and returns its result."""
    printed = threading.Event()
    results: list[ExecutionResult] = []

    def execute() -> None:
        results.append(session.execute(code, on_event=lambda e: printed.set() if isinstance(e, LogEvent) else None))

    caller = threading.Thread(target=execute)
    caller.start()
    try:
        assert printed.wait(30)
        then()
    finally:
        caller.join(60)
    (result,) = results
    return result


def test_it_says_where_it_listens_and_keeps_its_secrets(daemon: Daemon) -> None:
    log = daemon.log.read_text()
    assert f"executor-server listens on {daemon.address}; the token is in {daemon.state_dir / 'token'}\n" in log
    assert daemon.token not in log
    modes = {name: (daemon.state_dir / name).stat().st_mode & 0o777 for name in ("executor.sock", "token", ".")}
    assert modes == {"executor.sock": 0o600, "token": 0o600, ".": 0o700}


def test_the_log_has_ids_and_no_code_or_values(daemon: Daemon) -> None:
    with daemon.client() as client, client.create_session(authorized_imports=["os"]) as session:
        session.set_variables({"purpose": "hushvalue"})
        session.execute("print('hushtext'); hushcode = 1; 1 / 0")
        log = daemon.log.read_text()
        assert session.session_id in log
    assert "hush" not in log


def test_asked_to_stop_it_lets_an_execution_finish_and_takes_no_new_session(daemon: Daemon) -> None:
    with daemon.client(reconnect_timeout_s=0.1) as client:
        session = client.create_session()

        def stop() -> None:
            daemon.process.send_signal(signal.SIGTERM)
            assert logged(daemon, "daemon_draining")
            with pytest.raises(UnavailableError, match="about to stop"):
                client.create_session()
            session.put_file("go", b"")

        code = "import time\nprint('here')\nwhile not open_go(): time.sleep(0.01)\n'finished'"
        session.execute(
            "def open_go():\n    try: open('go').close()\n    except OSError: return False\n    return True"
        )
        result = run_until_stopped(session, code, stop)
    assert (result.outcome, result.output) == (Outcome.SUCCEEDED, "finished")
    assert daemon.process.wait(STOP_TIMEOUT_S) == 0
    assert not (daemon.state_dir / "executor.sock").exists()


def test_asked_twice_it_hurries_and_tells_whose_execution_it_ended(daemon: Daemon) -> None:
    def stop_twice() -> None:
        for word in ("daemon_draining", "daemon_stopping"):
            daemon.process.send_signal(signal.SIGINT)
            assert logged(daemon, word)

    with daemon.client(reconnect_timeout_s=0.1) as client:
        session = client.create_session()
        result = run_until_stopped(session, "import time\nprint('here')\ntime.sleep(1e6)", stop_twice)
    assert result.outcome is Outcome.CANCELLED
    assert daemon.process.wait(STOP_TIMEOUT_S) == 0


_LIMITS = "import resource\nresource.getrlimit(resource.RLIMIT_NOFILE)"


def test_the_daemon_opens_as_many_files_as_it_may_and_its_sandboxes_as_many_as_before() -> None:
    """Its soft limit is lowered for the test, as most systems have it; sandboxes have a limit of their own."""
    require("local")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory(prefix="d-") as directory, ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        daemon = stack.enter_context(running_daemon(Path(directory), program=SERVER))
        pid = daemon.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, 2**20) > 256
        with daemon.client() as client, client.create_session(authorized_imports=["resource"]) as session:
            own = min(hard, OPEN_FILES)
            assert session.execute(_LIMITS).output == (own, own)
