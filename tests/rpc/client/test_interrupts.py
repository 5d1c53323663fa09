"""Leaving `execute` early: Ctrl-C in the sync client, cancellation of the task in the other; and asyncio's own ways."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from executor_api.v1 import types_pb2 as types
from executor_client import AsyncExecutorClient, AsyncSession, ExecutorClient, Outcome
from tests.support.fake_daemon import TOKEN, Answered, Cancelled, Cut, FakeDaemon, log, result, tool_call
from tests.support.polling import eventually

CANCELLED = result(outcome=types.OUTCOME_CANCELLED)


def interrupt(event: object) -> None:
    """As the user would: while the client waits for the next event."""
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()


def test_interrupt_cancels_the_execution_and_waits_for_its_end(daemon: FakeDaemon) -> None:
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    with ExecutorClient(daemon.address, token=TOKEN) as client:
        session = client.create_session()
        with pytest.raises(KeyboardInterrupt):
            session.execute("code", on_event=interrupt)
        assert daemon.names()[1:] == ["Execute", "CancelExecution", "AttachExecution"]
        daemon.journal = [result(1)]
        assert session.execute("1").output == 1


def test_cancel_from_another_thread_ends_the_running_execution(daemon: FakeDaemon) -> None:
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    with ExecutorClient(daemon.address, token=TOKEN) as client:
        session = client.create_session()
        canceller = threading.Thread(target=session.cancel)
        got = session.execute("code", on_event=lambda event: canceller.start())
        canceller.join()
        assert got.outcome is Outcome.CANCELLED
        session.cancel()
        assert daemon.names().count("CancelExecution") == 1


def tool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "executor-tool" in thread.name]


def test_the_thread_of_a_tool_ends_soon_after_it_and_keeps_no_process_from_its_end(daemon: FakeDaemon) -> None:
    with ExecutorClient(daemon.address, token=TOKEN) as client, client.create_session() as session:
        session.execute("1")
        assert not tool_threads()
        seen: list[bool] = []
        session.register_tools({"tool": lambda: seen.extend(thread.daemon for thread in tool_threads())})
        daemon.journal = [tool_call("tool"), Answered(), result()]
        session.execute("1")
        assert seen == [True]
        assert eventually(lambda: not tool_threads())


# ---------------------------------------------------------------------------------------------------------------------
# asyncio


@pytest.fixture
async def session(daemon: FakeDaemon) -> AsyncIterator[AsyncSession]:
    async with AsyncExecutorClient(daemon.address, token=TOKEN) as client, await client.create_session() as session:
        daemon.requests.clear()
        yield session


async def test_cancelled_task_cancels_its_execution(session: AsyncSession, daemon: FakeDaemon) -> None:
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    started = asyncio.Event()
    task = asyncio.create_task(session.execute("code", on_event=lambda event: started.set()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert daemon.names() == ["Execute", "CancelExecution"]


async def test_coroutine_tools_and_callbacks_are_awaited(session: AsyncSession, daemon: FakeDaemon) -> None:
    seen: list[Any] = []

    async def tool(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    async def on_event(event: Any) -> None:
        await asyncio.sleep(0)
        seen.append(event)

    await session.register_tools({"tool": tool})
    daemon.journal = [tool_call("tool", 1), Answered(), result()]
    daemon.cuts = deque([Cut(1)])
    await session.execute("code", on_event=on_event)
    assert [event.name for event in seen] == ["tool"]
    assert daemon.answers["call-1"][0].WhichOneof("answer") == "value"


async def test_coroutine_tool_that_would_wait_for_itself_is_told_so(session: AsyncSession, daemon: FakeDaemon) -> None:
    async def tool() -> None:
        await session.execute("1")

    await session.register_tools({"tool": tool})
    daemon.journal = [tool_call("tool"), Answered(), result()]
    await session.execute("code")
    assert daemon.answers["call-1"][0].error.type.endswith(".ReentrantExecution")


async def test_coroutine_tool_does_not_outlive_its_execution(session: AsyncSession, daemon: FakeDaemon) -> None:
    ended = asyncio.Event()
    waiting = asyncio.Event()

    async def tool() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    await session.register_tools({"tool": tool})
    daemon.journal = [tool_call("tool"), Cancelled(), CANCELLED]
    execution = asyncio.create_task(session.execute("code"))
    await waiting.wait()
    await session.cancel()
    assert (await execution).outcome is Outcome.CANCELLED
    assert ended.is_set()


async def test_a_tool_that_is_no_coroutine_runs_in_a_thread_which_keeps_no_process_from_its_end(
    session: AsyncSession, daemon: FakeDaemon
) -> None:
    seen: list[bool] = []

    def tool() -> None:
        seen.extend(thread.daemon for thread in tool_threads())
        raise LookupError("why")

    await session.register_tools({"tool": tool})
    daemon.journal = [tool_call("tool"), Answered(), result()]
    await session.execute("code")
    (answer,) = daemon.answers["call-1"]
    assert (seen, answer.error.type, answer.error.message) == ([True], "LookupError", "why")
    assert eventually(lambda: not tool_threads())


async def test_executions_of_two_sessions_run_side_by_side(session: AsyncSession, daemon: FakeDaemon) -> None:
    daemon.journal = [log("x"), result(1)]
    results = await asyncio.gather(*[session.execute("code") for _ in range(6)])
    assert [each.output for each in results] == [1] * 6
