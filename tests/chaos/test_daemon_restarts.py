"""The daemon is killed and comes back: sessions go on, and every execution returns once, with all that it said."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutionResult, Outcome, Session, UnavailableError
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S
from tests.chaos.test_daemon_deaths import leave_after_the_first_event
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon
from tests.support.fork_server import SERVER, popen, server
from tests.support.polling import eventually
from tests.support.rounds import ALL, rounds, usual

BACKENDS = ("local", "docker")
KILLS = rounds(20, 2)
LINES = 60

MID_PRINT = f"import time\nfor i in range({LINES}):\n    print('line', i, flush=True)\n    time.sleep(0.005)\n'printed'"
ALL_LINES = "".join(f"line {i}\n" for i in range(LINES))
IN_A_TOOL_CALL = "print('asking', flush=True)\nanswer = ask(len('four'))\nprint('answered')\nanswer"
LARGE = "import time\nprint('making', flush=True)\ntime.sleep(0.05)\nb'x' * 4_000_000"


@pytest.fixture(params=usual(BACKENDS, but=("docker",)))
def restart(request: pytest.FixtureRequest, start: StartDaemon) -> Callable[..., Daemon]:
    """Starts a daemon of the backend, the next time on what the last one left."""
    require(request.param)
    base = f'pool.size = 0\nserver.backend = "{request.param}"\ndocker.images.base = "{DOCKER_IMAGE}"\n'
    return lambda config="": start(base + config)


def left(daemon: Daemon, kinds: Sequence[str] = ("sandboxes", "docker")) -> set[str]:
    """The sandboxes that there are, as both backends keep book of them: by a directory for each."""
    state_dir = daemon.state_dir
    return {each.name for kind in kinds for each in state_dir.glob(f"{kind}/{'[0-9a-f]' * 16}")}


@pytest.fixture
def start_only(restart: Callable[..., Daemon], directory: Path) -> Callable[[], subprocess.Popen[bytes]]:
    """Starts a daemon as the last one was, and waits for nothing."""
    listen, config = f"unix:{directory / 's' / 'executor.sock'}", str(directory / "config.toml")
    command = [*SERVER, "serve", "--listen", listen, "--config", config]
    environment = {**os.environ, "EXECUTOR_STATE_DIR": str(directory / "s")}
    return lambda: popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def begin(
    threads: ThreadPoolExecutor, session: Session, code: str, *, events: int = 1, **options: Any
) -> Future[ExecutionResult]:
    """Runs code in a thread; goes on when it has said so much."""
    spoke = threading.Semaphore(0)
    result = threads.submit(session.execute, code, on_event=lambda _: spoke.release(), **options)
    for _ in range(events):
        assert spoke.acquire(timeout=WAIT_S)
    return result


def ended(result: Future[ExecutionResult]) -> ExecutionResult:
    found = result.result(WAIT_S)
    assert found.outcome is Outcome.SUCCEEDED, (found.outcome, found.error)
    return found


@pytest.mark.timeout(rounds(900, 240))
def test_eight_sessions_survive_any_number_of_kills(restart: Callable[..., Daemon]) -> None:
    """Some print, some wait for a tool, one makes ten megabytes, one has another execution waiting, some are idle."""
    daemon = restart()
    with daemon.client() as client, ThreadPoolExecutor(16) as threads:
        sessions = [client.create_session(authorized_imports=["time"]) for _ in range(8)]
        printing, asking, (large, busy, *idle) = sessions[:2], sessions[2:4], sessions[4:]
        back = threading.Event()

        def ask(size: int) -> int:
            assert back.wait(WAIT_S)
            return size * 10

        for session in asking:
            session.register_tools({"ask": ask})
        for number, session in enumerate(idle):
            session.execute(f"mine = [{number}]")
        for kill in range(KILLS):
            back.clear()
            prints = [begin(threads, session, MID_PRINT, events=1 + kill % 5) for session in (*printing, busy)]
            waits = threads.submit(busy.execute, "len('queued')")
            answers = [begin(threads, session, IN_A_TOOL_CALL) for session in asking]
            made = begin(threads, large, LARGE)
            daemon.kill()
            daemon = restart()
            back.set()
            for result in map(ended, prints):
                assert (result.logs, result.output) == (ALL_LINES, "printed")
            assert ended(waits).output == 6
            for result in map(ended, answers):
                assert (result.logs, result.output) == ("asking\nanswered\n", 40)
            assert ended(made).output == b"x" * 4_000_000
            for number, session in enumerate(idle):
                assert ended(threads.submit(session.execute, f"mine.append({kill})\nmine")).output == [
                    number,
                    *range(kill + 1),
                ]
        assert len(left(daemon)) == 8
        for session in sessions:
            assert session.generation == 1
            session.close()
        assert left(daemon) == set()


# -- at bad moments


@contextlib.contextmanager
def killed_soon(daemon: Daemon, after_s: float) -> Iterator[None]:
    """Kills the daemon a moment after what follows has begun."""
    timer = threading.Timer(after_s, daemon.process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        daemon.process.wait()


MOMENTS_S = [0.0, 0.005, 0.02, 0.05] if ALL else [0.005, 0.05]
"""In the middle of what takes some milliseconds, one time or another."""


def test_killed_while_sessions_are_made_there_is_one_for_each_request(restart: Callable[..., Daemon]) -> None:
    daemon = restart()
    with daemon.client() as client, ThreadPoolExecutor(4) as threads:
        client.list_sessions()
        for moment_s in MOMENTS_S:
            with killed_soon(daemon, moment_s):
                making = [threads.submit(client.create_session) for _ in range(2)]
            daemon = restart()
            sessions = [each.result(WAIT_S) for each in making]
            assert {each.session_id for each in client.list_sessions()} == {each.session_id for each in sessions}
            assert len(left(daemon)) == 2
            for session in sessions:
                assert session.execute("6 * 7").output == 42
                session.close()


def test_killed_while_sessions_are_deleted_they_are_gone(restart: Callable[..., Daemon]) -> None:
    daemon = restart()
    with daemon.client() as client, ThreadPoolExecutor(4) as threads:
        for moment_s in MOMENTS_S:
            sessions = [client.create_session() for _ in range(2)]
            with killed_soon(daemon, moment_s):
                closing = [threads.submit(session.close) for session in sessions]
            daemon = restart()
            for session, each in zip(sessions, closing, strict=True):
                # On a loaded machine, the daemon may be away for longer than closing waits.
                with contextlib.suppress(UnavailableError):
                    each.result(WAIT_S)
                session.close()
            assert client.list_sessions() == []
            assert left(daemon) == set()
            assert list((daemon.state_dir / "journals").iterdir()) == []


def test_killed_under_an_upload_the_variables_are_set_all_the_same(restart: Callable[..., Daemon]) -> None:
    daemon = restart()
    large = {"large": b"y" * 30_000_000, "small": 1}
    with daemon.client() as client, ThreadPoolExecutor(1) as threads, client.create_session() as session:
        for moment_s in MOMENTS_S:
            with killed_soon(daemon, moment_s):
                setting = threads.submit(session.set_variables, large)
            daemon = restart()
            setting.result(WAIT_S)
            assert session.execute("len(large) + small").output == 30_000_001
            session.execute("del large, small")


def test_large_answer_of_a_tool_arrives_whole_whenever_the_daemon_dies(restart: Callable[..., Daemon]) -> None:
    """It travels apart from the message that names it, and that message may be sent again by another daemon."""
    daemon = restart()
    called = threading.Semaphore(0)

    def fetch() -> bytes:
        called.release()
        return b"z" * 10_000_000

    with daemon.client() as client, ThreadPoolExecutor(1) as threads, client.create_session() as session:
        session.register_tools({"fetch": fetch})
        for moment_s in MOMENTS_S:
            result = threads.submit(session.execute, "print('got', flush=True)\nlen(fetch())")
            assert called.acquire(timeout=WAIT_S)
            with killed_soon(daemon, moment_s):
                pass
            daemon = restart()
            assert (ended(result).logs, ended(result).output) == ("got\n", 10_000_000)


def test_killed_again_while_it_recovers_nothing_is_lost(
    restart: Callable[..., Daemon], start_only: Callable[[], subprocess.Popen[bytes]]
) -> None:
    daemon = restart()
    with daemon.client() as client, ThreadPoolExecutor(8) as threads:
        sessions = [client.create_session(authorized_imports=["time"]) for _ in range(4)]
        results = [begin(threads, session, MID_PRINT) for session in sessions]
        waiting = [threads.submit(session.execute, "'next'") for session in sessions]
        daemon.kill()
        for count in (0, 1, 2, 4) if ALL else (0, 2):
            before = connections(daemon)
            process = start_only()
            assert eventually(lambda least=before + count: connections(daemon) >= least, timeout_s=WAIT_S)  # type: ignore[misc]
            process.kill()
            process.wait()
        restart()
        for result in map(ended, results):
            assert (result.logs, result.output) == (ALL_LINES, "printed")
        assert [ended(each).output for each in waiting] == ["next"] * 4
        for session in sessions:
            session.close()


def connections(daemon: Daemon) -> int:
    """Connections to guests in the registry: each is written down just before it is made."""
    database = sqlite3.connect(daemon.state_dir / "registry.db", timeout=WAIT_S)
    with contextlib.closing(database):
        (count,) = database.execute("SELECT sum(connections) FROM sessions").fetchone()
    return int(count)


def test_full_journal_that_nobody_reads_is_delivered_by_the_next_daemon(restart: Callable[..., Daemon]) -> None:
    config = "sessions.journal_bytes = 100_000"
    daemon = restart(config)
    code = "b'x' * 4_000_000"
    with daemon.client() as client, client.create_session() as session:
        leave_after_the_first_event(daemon, session, code)
        assert eventually(lambda: segment_bytes(daemon, session) > 100_000)
        for _ in range(rounds(3, 1)):
            daemon.kill()
            daemon = restart(config)
        assert session.execute(f"print(1)\n{code}", execution_id="full").output == b"x" * 4_000_000
        assert session.execute("1 + 1").output == 2
        assert segment_bytes(daemon, session) < 3 * 10**7


def segment_bytes(daemon: Daemon, session: Session) -> int:
    journal = daemon.state_dir / "journals" / session.session_id
    return sum(segment.stat().st_size for segment in journal.iterdir())


def test_time_without_a_daemon_is_not_the_program_s(restart: Callable[..., Daemon]) -> None:
    """It prints more than is kept for a daemon that is not there, and so is made to wait."""
    daemon = restart()
    wall_time_s = 3.0
    limits = {"wall_time_s": wall_time_s, "output_bytes": 16 * 2**20}
    code = "print('here', flush=True)\nfor i in range(14):\n    print('x' * 2**20, flush=True)"
    with daemon.client() as client, ThreadPoolExecutor(1) as threads, client.create_session(limits=limits) as session:
        result = begin(threads, session, code)
        daemon.kill()
        threading.Event().wait(wall_time_s * 1.2)
        restart()
        assert len(ended(result).logs) == len("here\n") + 14 * (2**20 + 1)


def test_daemon_that_can_not_start_leaves_the_sessions_to_the_next(
    restart: Callable[..., Daemon], directory: Path
) -> None:
    daemon = restart()
    with daemon.client() as client, client.create_session() as session, socket.socket() as taken:
        session.execute("x = 6")
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon.kill()
        port = taken.getsockname()[1]
        failed = serve_once(directory, daemon.state_dir, f"127.0.0.1:{port}")
        assert "Can't listen" in failed
        restart()
        assert session.execute("x * 7").output == 42


# -- what can't be brought back


def serve_once(directory: Path, state_dir: Path, listen: str) -> str:
    """Returns the stderr of a daemon that does not come to serve."""
    config = str(directory / "config.toml")
    served = server("serve", "--listen", listen, "--config", config, EXECUTOR_STATE_DIR=str(state_dir))
    assert served.returncode != 0
    return served.stderr
