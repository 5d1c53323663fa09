"""Clients that are killed or stopped, and daemons that are: sessions end with their owners, in time, and no sooner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_client import ExecutorClient
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import sandboxes
from tests.chaos.proxy import CuttingProxy
from tests.support.daemon import Daemon
from tests.support.polling import eventually
from tests.support.rounds import rounds, usual

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
RUNS = int(os.environ.get("EXECUTOR_TEST_RUNS", rounds(20, 3)))
QUICK = "pool.size = 0"

CLIENT = """
import os, sys
from executor_client import ExecutorClient
client = ExecutorClient(sys.argv[1], token=sys.argv[2])
session = client.create_session(limits={"owner_grace_s": float(sys.argv[3])})
session.execute("x = 7")
print(session.session_id, flush=True)
for line in sys.stdin:
    print(session.execute("x").output, flush=True)
"""


class Client:
    """A process with one session."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self._in, self._out = process.stdin, process.stdout
        self.session_id = self._out.readline().strip()

    def ask(self) -> str:
        """Has it use its session, and returns the answer."""
        self._in.write("\n")
        self._in.flush()
        return self._out.readline().strip()


@contextmanager
def client_process(daemon: Daemon, grace_s: float, *, address: str | None = None) -> Iterator[Client]:
    command = [sys.executable, "-c", CLIENT, address or daemon.address, daemon.token, str(grace_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield Client(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


def ids(client: ExecutorClient) -> set[str]:
    return {info.session_id for info in client.list_sessions()}


def let_a_grace_pass(daemon: Daemon, client: ExecutorClient) -> None:
    """Returns when the session of a client that was killed has come to its end, of the shortest grace."""
    with client_process(daemon, 0.5) as killed:
        killed.process.kill()
        assert eventually(lambda: killed.session_id not in ids(client), timeout_s=WAIT_S)


# -- clients


def test_a_killed_clients_session_ends_after_its_grace_and_it_is_written_down_why(start: StartDaemon) -> None:
    daemon = start(QUICK)
    with daemon.client() as watcher, client_process(daemon, 1.0) as client:
        assert client.ask() == "7"
        client.process.kill()
        assert client.session_id in ids(watcher), "it has its grace"
        assert eventually(lambda: not watcher.list_sessions(), timeout_s=WAIT_S)
        assert eventually(lambda: not sandboxes(daemon))
    assert eventually(lambda: "its client was silent for too long" in daemon.log.read_text())


def test_a_connection_that_breaks_again_and_again_loses_nothing(start: StartDaemon) -> None:
    daemon = start(QUICK)
    proxying = CuttingProxy(daemon.state_dir.parent / "p", daemon.state_dir / "executor.sock")
    with (
        proxying as proxy,
        daemon.client() as watcher,
        client_process(daemon, 3.0, address=proxy.address) as client,
    ):
        for _ in range(2):
            proxy.cut()
            let_a_grace_pass(daemon, watcher)
        assert client.ask() == "7"


# -- daemons


@pytest.mark.parametrize("how", ["gone", "stopped"])
def test_a_process_exits_though_its_daemon_does_not_answer(start: StartDaemon, how: str) -> None:
    daemon = start(QUICK)
    with client_process(daemon, 600.0) as client:
        if how == "gone":
            daemon.kill()
        else:
            daemon.process.send_signal(signal.SIGSTOP)
        try:
            assert client.process.stdin is not None
            client.process.stdin.close()
            assert client.process.wait(WAIT_S) == 0
        finally:
            if how == "stopped":
                daemon.process.send_signal(signal.SIGCONT)


# -- the guided tour

TOUR = """
import os, signal, sys
from executor_client.smolagents import CodeAgent
from examples.scripted import Reply, ScriptedModel
from smolagents import LogLevel

address, token, runs, grace_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
code = "a, b = 0, 1\\nfor _ in range(117):\\n    a, b = b, a + b\\nfinal_answer(b)"

def tour():
    kwargs = {"address": address, "token": token, "limits": {"owner_grace_s": float(grace_s)} if grace_s else {}}
    model = ScriptedModel([Reply("", code)])
    agent = CodeAgent(tools=[], model=model, executor_type="remote", executor_kwargs=kwargs, verbosity_level=LogLevel.OFF)
    return agent.run("Could you give me the 118th number in the Fibonacci sequence?")

# Each run is a process. They are forked from one that has imported what they need, and has not used it.
ends = [lambda: sys.exit(), lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)]
for number in range(runs):
    child = os.fork()
    if child == 0:
        answer = tour()
        print(answer, flush=True)
        ends[number % len(ends) if grace_s else 0]()
    os.waitpid(child, 0)
"""


@pytest.mark.timeout(120 + 6 * RUNS)
@pytest.mark.parametrize("grace_s", usual(["1", ""], but=("1",)), ids={"1": "some are killed", "": "all exit"}.get)
def test_runs_without_with_are_never_refused_and_leave_no_session(start: StartDaemon, grace_s: str) -> None:
    """The guided tour's first example from so many processes: some exit, some by os._exit, some by SIGKILL.

    With the grace of an ordinary daemon, those that exit leave nothing at all. $EXECUTOR_TEST_RUNS says how many.
    """
    daemon = start("")
    command = [sys.executable, "-c", TOUR, daemon.address, daemon.token, str(RUNS), grace_s]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60 + 5 * RUNS, check=False)
    assert Counter(done.stdout.split()) == {"2046711111473984623691759": RUNS}, done.stderr
    with daemon.client() as client:
        if not grace_s:
            assert client.list_sessions() == []
        assert eventually(lambda: not client.list_sessions(), timeout_s=WAIT_S)
    assert "TOO_MANY_SESSIONS" not in daemon.log.read_text()
