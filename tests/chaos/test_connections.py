"""The connection between client and daemon breaks, or the client dies: an execution is neither lost nor repeated."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_client import ExecutorClient, LogEvent, Outcome, Session
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import open_files
from tests.chaos.proxy import CuttingProxy
from tests.support.daemon import Daemon
from tests.support.polling import eventually
from tests.support.rounds import rounds, usual

WAIT_S = 60.0
LINES = 400

# Prints numbered lines, in many events; calls a tool after every hundredth; counts its own runs.
PROGRAM = f"""
import time
runs = globals().get("runs", 0) + 1
answers = []
for i in range({LINES}):
    print(i, "." * 200)
    if i % 5 == 0:
        time.sleep(0.005)
    if i % 100 == 99:
        answers.append(ask(i))
(runs, answers)
"""


@pytest.fixture
def daemon(start: StartDaemon) -> Daemon:
    return start("pool.size = 1")


@contextmanager
def through_proxy(daemon: Daemon) -> Iterator[tuple[CuttingProxy, ExecutorClient]]:
    proxy = CuttingProxy(daemon.state_dir.parent / "p", daemon.state_dir / "executor.sock")
    with proxy, ExecutorClient(proxy.address, token=daemon.token, reconnect_timeout_s=WAIT_S) as client:
        yield proxy, client


class Received:
    """The record of what the client of one execution of PROGRAM received."""

    def __init__(self, session: Session) -> None:
        self.asked: list[int] = []
        self.numbers: list[int] = []
        session.register_tools({"ask": self._ask})
        self._session = session

    def _ask(self, i: int) -> int:
        self.asked.append(i)
        return -i

    def check(self, code: str, execution_id: str) -> None:
        result = self._session.execute(
            code, execution_id=execution_id, on_event=lambda event: self.numbers.append(event.number)
        )
        asked = list(range(99, LINES, 100))
        assert (result.outcome, result.output) == (Outcome.SUCCEEDED, (1, [-i for i in asked])), result.error
        assert result.stdout.splitlines() == [f"{i} {'.' * 200}" for i in range(LINES)]
        assert self.asked == asked
        assert self.numbers == list(range(1, self.numbers[-1] + 1))


def test_connection_that_breaks_after_every_few_bytes_loses_and_repeats_nothing(daemon: Daemon) -> None:
    """Wherever a connection is cut, in the middle of a frame or a message, the next goes on where it was."""
    with through_proxy(daemon) as (proxy, client), client.create_session() as session:
        received = Received(session)
        # A fixed seed: an execution that fails can be run again.
        sizes = random.Random(7)
        proxy.cut_each_after([sizes.randrange(1, 5_000) for _ in range(rounds(25, 10))])
        proxy.cut()
        received.check(PROGRAM, "once")
        assert proxy.cuts >= 5


def test_the_same_execution_id_from_another_client_attaches_and_runs_nothing_twice(daemon: Daemon) -> None:
    code = "runs = globals().get('runs', 0) + 1\nprint('here')\nwhile not ready(): pass\nruns"
    setup = "import os\ndef ready(): return os.path.exists('go')"
    with daemon.client() as one, daemon.client() as other:
        session = one.create_session(authorized_imports=["os.*"])
        session.execute(setup)
        again = other.get_session(session.session_id)
        results = []
        printed = threading.Event()

        def follow(of: Session) -> None:
            on_event = lambda event: printed.set() if isinstance(event, LogEvent) else None  # noqa: E731
            results.append(of.execute(code, execution_id="same", on_event=on_event))

        followers = [threading.Thread(target=follow, args=(each,)) for each in (session, again)]
        followers[0].start()
        assert printed.wait(WAIT_S)
        followers[1].start()
        session.put_file("go", b"")
        for follower in followers:
            follower.join(WAIT_S)
        session.close()
    assert [(r.output, r.stdout, r.usage) for r in results] == [(1, "here\n", results[0].usage)] * 2


# ---------------------------------------------------------------------------------------------------------------------
# The client dies

CLIENT = """
import sys, time
from executor_client import ExecutorClient
from executor_api.v1 import executor_service_pb2 as pb
client = ExecutorClient(sys.argv[1], token=sys.argv[2])
session = client.create_session(authorized_imports=["time"], limits={"idle_time_s": 1, "wall_time_s": 2})
print(session.session_id, flush=True)
def reached(*_): print("reached", flush=True)
def hang(*_): reached(); time.sleep(1000)
"""

LIVES = {
    "between two calls": "hang()",
    "in an execution": "session.execute('print(1)\\nwhile True: pass', on_event=reached)",
    "in a tool call": "session.register_tools({'hang': hang}); session.execute('hang()')",
    "in an upload": """
def pieces():
    yield pb.PutFileRequest(header=pb.PutFileHeader(session_id=session.session_id, path="f", size_bytes=10**6))
    yield pb.PutFileRequest(data=bytes(200_000))
    hang()
client._transport.upload(client._transport.channel.stub.PutFile, pieces())
""",
    "in a download larger than the journal": """
from executor_client._core import execution
execution.Execution.feed = hang
session.execute('b"x" * 4_000_000')
""",
}


@pytest.mark.parametrize(
    "life",
    usual(LIVES, but=("between two calls", "in a tool call", "in a download larger than the journal")),
)
def test_session_of_a_killed_client_ends_by_its_idle_time(start: StartDaemon, life: str) -> None:
    """Nothing that a client was in the middle of keeps its session, a tool call without an answer included."""
    daemon = start("pool.size = 0\nsessions.journal_bytes = 2_000_000")
    with daemon.client() as client:
        client.create_session().close()  # the files that the daemon opens once are open by now
        files_before = open_files(daemon)
        kill_client(daemon, LIVES[life])
        assert eventually(lambda: not client.list_sessions(), timeout_s=WAIT_S)
        assert eventually(lambda: open_files(daemon) <= files_before)
        assert "incident" not in daemon.log.read_text()
        with client.create_session() as session:
            assert session.execute("1 + 1").output == 2


def kill_client(daemon: Daemon, program: str) -> None:
    """Runs a client until it is where it should die."""
    command = [sys.executable, "-c", CLIENT + program, daemon.address, daemon.token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        assert process.stdout.readline() == "reached\n"
        process.kill()
