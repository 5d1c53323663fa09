"""Owners of sessions, seen by clients of a real daemon: sessions end with the client, its process, its objects."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from executor_client import AsyncExecutorClient, ExecutorClient, NotFoundError
from executor_client.smolagents import CodeAgent, RemoteExecutor
from tests.support.agents import agent_on
from tests.support.daemon import Daemon
from tests.support.polling import eventually, eventually_awaited

WAIT_S = 60.0


@pytest.fixture
def watcher(daemon: Daemon) -> Iterator[ExecutorClient]:
    """A client without sessions of its own, that looks at others'. Before and after, there is none."""
    with daemon.client() as client:
        assert eventually(lambda: not client.list_sessions())
        yield client
        assert eventually(lambda: not client.list_sessions())


def ids(client: ExecutorClient) -> set[str]:
    return {info.session_id for info in client.list_sessions()}


# -- objects


def test_a_session_that_is_collected_ends(daemon: Daemon, watcher: ExecutorClient) -> None:
    with daemon.client() as client:
        kept, dropped = client.create_session(), client.create_session()
        assert len(ids(watcher)) == 2 and not kept.info.detached
        del dropped
        assert eventually(lambda: ids(watcher) == {kept.session_id})
        assert kept.execute("1 + 1").output == 2


def test_a_session_outlives_the_client_object_that_made_it(daemon: Daemon, watcher: ExecutorClient) -> None:
    """`ExecutorClient().create_session()` is how one writes it; no reference to the client is left then."""
    session = daemon.client().create_session()
    gc.collect()
    assert session.execute("1 + 1").output == 2
    files = session.files
    session_id = session.session_id
    del session
    gc.collect()
    files.write("a", b"b")
    assert ids(watcher) == {session_id}
    del files
    assert eventually(lambda: not watcher.list_sessions())


def test_a_session_that_was_found_is_not_ended_for_being_collected(daemon: Daemon, watcher: ExecutorClient) -> None:
    with daemon.client() as factory, daemon.client() as finder:
        made = factory.create_session()
        found = finder.get_session(made.session_id)
        again = factory.get_session(made.session_id)
        del found, made
        gc.collect()
        with factory.create_session() as later:  # by then what was collected has been seen to, in order
            assert ids(watcher) == {again.session_id, later.session_id}
        assert again.execute("1").output == 1


def test_a_closed_client_ends_its_sessions_and_detached_ones_go_on(daemon: Daemon, watcher: ExecutorClient) -> None:
    with daemon.client() as client:
        owned, detached = client.create_session(), client.create_session(detached=True)
        assert (owned.info.detached, detached.info.detached) == (False, True)
    assert ids(watcher) == {detached.session_id}
    found = watcher.get_session(detached.session_id)
    assert found.info.detached and found.execute("1").output == 1
    found.close()


def test_a_session_lives_while_any_client_holds_it(daemon: Daemon, watcher: ExecutorClient) -> None:
    with daemon.client() as finder:
        with daemon.client() as factory:
            session_id = factory.create_session().session_id  # collected, but for:
            made = factory.create_session()
            found = finder.get_session(made.session_id)
            assert eventually(lambda: session_id not in ids(watcher))
        assert found.execute("6 * 7").output == 42
    with pytest.raises(NotFoundError):
        watcher.get_session(made.session_id)


def test_an_executor_that_is_collected_ends_its_session(daemon: Daemon, watcher: ExecutorClient) -> None:
    executor = RemoteExecutor(**daemon.access)
    executor.send_tools({"final_answer": lambda answer: answer})
    executor.send_variables({"x": 1})
    executor("x + 1")
    assert executor.state["x"] == 1
    assert len(ids(watcher)) == 1
    gc.disable()  # by the count of its references alone: no cycle keeps it
    try:
        del executor
        assert eventually(lambda: not watcher.list_sessions())
    finally:
        gc.enable()


def test_an_executor_that_is_collected_leaves_a_session_that_was_passed_in(
    daemon: Daemon, watcher: ExecutorClient
) -> None:
    with daemon.client() as client:
        session = client.create_session()
        for passed, access in ((session, {}), (session.session_id, daemon.access)):
            executor = RemoteExecutor(session=passed, **access)
            executor.send_tools({"final_answer": lambda answer: answer})
            executor("x = 6 * 7")
            del executor
            gc.collect()
            with client.create_session() as later:  # by then what was collected has been seen to, in order
                assert ids(watcher) == {session.session_id, later.session_id}
        assert session.execute("x").output == 42


def test_an_agent_that_is_run_without_with_and_collected_ends_its_session(
    daemon: Daemon, watcher: ExecutorClient
) -> None:
    def run() -> object:
        agent: CodeAgent = agent_on(daemon, "final_answer(6 * 7)")
        return agent.run("go")

    assert run() == 42
    gc.collect()
    assert eventually(lambda: not watcher.list_sessions())


def test_a_client_that_is_given_to_an_executor_stays(daemon: Daemon, watcher: ExecutorClient) -> None:
    with daemon.client() as client:
        executor = RemoteExecutor(client=client)
        executor("1")
        del executor
        gc.collect()
        assert eventually(lambda: not watcher.list_sessions())
        with client.create_session() as session:
            assert session.execute("1").output == 1


# -- processes

PROGRAM = """
import os, sys, threading
from executor_client import ExecutorClient
client = ExecutorClient(sys.argv[1], token=sys.argv[2])
session = client.create_session()
print(session.session_id, flush=True)
"""

EXITS = {
    "its end": "",
    "an exit": "sys.exit(3)",
    "an error": "1 / 0",
    "an exit of another thread's making": "threading.Thread(target=sys.stdin.read).start()",
    "an interrupt": "import signal; signal.raise_signal(signal.SIGINT)",
    "collecting while it exits": "class Late:\n def __del__(self): self.session.close()\nlate = Late(); late.session = session",
}


@contextmanager
def program(daemon: Daemon, text: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM + text, daemon.address, daemon.token]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process


@pytest.mark.parametrize("ending", EXITS)
def test_the_end_of_the_interpreter_ends_its_sessions(daemon: Daemon, watcher: ExecutorClient, ending: str) -> None:
    with program(daemon, EXITS[ending]) as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert out.strip()
    assert ids(watcher) == set(), "it was not there any more when the process had ended"


def test_a_forked_child_ends_nothing_of_its_parents(daemon: Daemon, watcher: ExecutorClient) -> None:
    """Not by its exit, nor by collecting what it inherited, nor by leaving the blocks that its parent is in."""
    text = """
import gc
with client, session:
    for way in range(3):
        child = os.fork()
        if child == 0:
            if way == 0:
                sys.exit()  # through the blocks, and with all that is done at exit
            if way == 1:
                del session
                gc.collect()
                client.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(session.execute("1 + 1").output, flush=True)
    print("here", flush=True)
    sys.stdin.read()
"""
    with program(daemon, text) as process:
        assert process.stdout is not None
        session_id = process.stdout.readline().strip()
        assert [process.stdout.readline() for _ in range(4)] == ["2\n", "2\n", "2\n", "here\n"]
        assert ids(watcher) == {session_id}
        _, errors = process.communicate("", timeout=WAIT_S)
        assert process.returncode == 0, errors


# -- what is interrupted while it is made


async def test_tasks_that_are_cancelled_while_they_make_sessions_leave_none(
    daemon: Daemon, watcher: ExecutorClient
) -> None:
    """Wherever the request is on its way, and the answer."""
    async with AsyncExecutorClient(**daemon.access) as client:

        async def none_left() -> bool:
            return await client.list_sessions() == []

        await (await client.create_session()).close()
        for turns in range(40):
            task = asyncio.create_task(client.create_session())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                await task.result().close()
            # At once on a daemon; a front answers before the node has ended what it was making.
            assert await eventually_awaited(none_left), f"after {turns} turns of the loop"


def test_an_interrupt_while_a_session_is_made_leaves_none(daemon: Daemon, watcher: ExecutorClient) -> None:
    made = 0
    with daemon.client() as client:
        client.create_session().close()
        for thousandths in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + thousandths / 2000)
                session = client.create_session()
                signal.setitimer(signal.ITIMER_REAL, 0)
                session.close()
                made += 1
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            session = None  # type: ignore[assignment]
            assert eventually(lambda: not watcher.list_sessions())
    assert made < 30, "none was interrupted"


@pytest.fixture(autouse=True)
def _alarm_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)
