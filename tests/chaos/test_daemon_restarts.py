"""The daemon is killed and comes back: sessions go on, and every execution returns once, with all that it said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from executor_client import ExecutionResult, Outcome, Session
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S, sandbox_directories
from tests.support.backends import require
from tests.support.daemon import Daemon

BACKENDS = ("local",)
KILLS = 20
LINES = 60

MID_PRINT = f"import time\nfor i in range({LINES}):\n    print('line', i, flush=True)\n    time.sleep(0.005)\n'printed'"
ALL_LINES = "".join(f"line {i}\n" for i in range(LINES))
IN_A_TOOL_CALL = "print('asking', flush=True)\nanswer = ask(len('four'))\nprint('answered')\nanswer"
LARGE = "import time\nprint('making', flush=True)\ntime.sleep(0.05)\nb'x' * 10**7"


@pytest.fixture(params=BACKENDS)
def restart(request: pytest.FixtureRequest, start: StartDaemon) -> Callable[..., Daemon]:
    """Starts a daemon of the backend, the next time on what the last one left."""
    require(request.param)
    return lambda config="": start(f'pool.size = 0\nserver.backend = "{request.param}"\n{config}')


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


@pytest.mark.timeout(240)
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
            assert ended(made).output == b"x" * 10**7
            for number, session in enumerate(idle):
                assert ended(threads.submit(session.execute, f"mine.append({kill})\nmine")).output == [
                    number,
                    *range(kill + 1),
                ]
        assert len(sandbox_directories(daemon)) == 8
        for session in sessions:
            assert session.generation == 1
            session.close()
        assert sandbox_directories(daemon) == set()
