"""Parts of a sandbox are killed or stopped from outside: the client gets the reason, and the daemon goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from executor_client import Outcome, SessionGone
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import executing, only_sandbox, sandboxes, works
from tests.support.blocking import client_of
from tests.support.daemon import Daemon
from tests.support.polling import eventually

FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(1e6)"


@pytest.fixture
def daemon(start: StartDaemon) -> Daemon:
    return start("pool.size = 0")


def test_killed_checker_costs_nothing(daemon: Daemon) -> None:
    with daemon.client() as client, client.create_session(authorized_imports=["os"]) as session:
        for _ in range(3):
            interpreter = only_sandbox(daemon).process(session.execute("import os\nx = 1\nos.getpid()").output)
            for process in set(only_sandbox(daemon).child_processes) - {interpreter}:
                process.kill()
            result = session.execute("x + 1")
            assert (result.outcome, result.output, result.generation) == (Outcome.SUCCEEDED, 2, 1), result.error


def test_children_killed_between_two_executions_are_replaced(daemon: Daemon) -> None:
    """The checker and the interpreter: variables are gone, and the next execution's generation says so."""
    with daemon.client() as client, client.create_session() as session:
        session.execute("x = 1")
        killed = only_sandbox(daemon).child_processes
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor ends one when the other has gone
                process.kill()
        assert eventually(lambda: len(set(only_sandbox(daemon).child_processes) - set(killed)) == 2)
        after = session.execute("1 + 1")
        assert (after.outcome, after.output, after.generation) == (Outcome.SUCCEEDED, 2, 2)
        assert session.execute("'x' in globals()").output is False


def test_killed_monitor_costs_nothing(daemon: Daemon) -> None:
    """Bubblewrap's own process only waits: the sandbox goes on without it, and is destroyed all the same."""
    with daemon.client() as client, client.create_session() as session:
        sandbox = only_sandbox(daemon)
        assert sandbox.monitor is not None
        session.register_tools({"kill": sandbox.monitor.kill})
        assert session.execute("kill()").outcome is Outcome.SUCCEEDED
        assert session.execute("1 + 1").output == 2
    assert sandbox.is_gone()


@pytest.mark.parametrize("use", ["get_variables", "put_file"])
def test_what_waits_for_a_sandbox_that_is_killed_learns_so(daemon: Daemon, use: str) -> None:
    """Stopped first, so that it is in the middle of it."""
    calls = {
        "get_variables": lambda session: session.get_variables(["x"]),
        "put_file": lambda session: session.put_file("f", bytes(10**6)),
    }
    with daemon.client() as client, client.create_session() as session:
        sandbox = only_sandbox(daemon)
        sandbox.supervisor.suspend()
        killer = threading.Timer(0.2, sandbox.supervisor.kill)
        killer.start()
        with pytest.raises(SessionGone, match="sandbox is gone"):
            calls[use](session)
        killer.join()


def test_sandbox_that_does_not_answer_any_more_is_given_up(start: StartDaemon) -> None:
    """Its processes are stopped, its channel is open: only its silence shows it."""
    daemon = start("pool.size = 0\n[sessions]\nsilence_s = 0.5\norphan_time_s = 60.0")
    with daemon.client() as client, client.create_session() as session:
        sandbox = only_sandbox(daemon)
        with executing(session, FOREVER) as result:
            sandbox.supervisor.suspend()
        ended = result.result()
        assert ended.outcome is Outcome.LOST
        assert ended.error is not None and "has not answered" in ended.error.message
        assert eventually(sandbox.is_gone)


def test_pool_whose_sandboxes_were_stopped_gives_working_ones(start: StartDaemon) -> None:
    daemon = start("pool.size = 1\n[sessions]\nsilence_s = 0.5\norphan_time_s = 60.0")
    assert eventually(lambda: [len(sandbox.child_processes) for sandbox in sandboxes(daemon)] == [1])  # the interpreter
    only_sandbox(daemon).supervisor.suspend()
    assert works(daemon)


CALLS: list[Callable[[Any], Any]] = [
    lambda s: s.authorize_imports(["os"]),
    lambda s: s.execute("1"),
    lambda s: s.evaluate("1"),
    lambda s: s.register_tools({"search": len}),
    lambda s: s.set_variables({"x": b"1" * 300_000}),
    lambda s: s.get_variables(),
    lambda s: s.export_state(),
    lambda s: s.savepoint(),
    lambda s: s.savepoints(),
    lambda s: s.rollback(),
    lambda s: s.try_("1"),
    lambda s: s.files.write("a", b""),
    lambda s: s.files.read("a"),
    lambda s: s.files.list(),
    lambda s: s.files.watch(),
    lambda s: s.processes.run("true"),
    lambda s: s.processes.start("true"),
    lambda s: s.ports.connect(80),
]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_call_on_a_session_that_is_gone_says_so(daemon: Daemon, kind: str) -> None:
    with client_of(kind, daemon) as client, daemon.client() as other:
        lost = client.create_session()
        only_sandbox(daemon).supervisor.kill()
        ended = client.create_session()
        other.get_session(ended.session_id).close()
        for session in (lost, ended):
            for number, call in enumerate(CALLS):
                with pytest.raises(SessionGone):
                    pytest.fail(f"call {number} on {session.session_id} returned {call(session)}")
        lost.close()
        for describe in (ended.refresh, ended.keep_alive, lost.refresh, lambda: client.get_session(lost.session_id)):
            with pytest.raises(SessionGone):
                describe()
