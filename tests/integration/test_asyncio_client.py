"""The asyncio client as its users use it, on a real daemon: cancellation, timeouts, many sessions, closing while busy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from executor_client import AsyncExecutorClient, NotFoundError, Outcome
from tests.support.daemon import Daemon

ENDLESS = "import time\nprint('running', flush=True)\nwhile True: time.sleep(0.01)"


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncExecutorClient]:
    async with AsyncExecutorClient(**daemon.access) as connected:
        yield connected


async def test_cancelled_execution_ends_in_the_sandbox_and_leaves_the_session(client: AsyncExecutorClient) -> None:
    async with await client.create_session(authorized_imports=["time"]) as session:
        await session.execute("kept = 1")
        running = asyncio.Event()
        task = asyncio.create_task(session.execute(ENDLESS, on_event=lambda event: running.set()))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await session.execute("kept")).output == 1


async def test_timeout_ends_an_execution_with_its_coroutine_tool(client: AsyncExecutorClient) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def wait_for_ever() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with await client.create_session() as session:
        await session.register_tools({"wait_for_ever": wait_for_ever})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                task = asyncio.create_task(running.wait())
                task.add_done_callback(lambda _: limit.reschedule(0))
                await session.execute("wait_for_ever()")
        assert ended.is_set()
        assert (await session.execute("1")).output == 1


async def test_session_that_is_closed_while_busy_ends_what_runs_and_what_waits(client: AsyncExecutorClient) -> None:
    session = await client.create_session(authorized_imports=["time"])
    running, tasks = asyncio.Event(), asyncio.all_tasks()
    waiting = [
        asyncio.create_task(session.execute(ENDLESS, on_event=lambda event: running.set())),
        asyncio.create_task(session.execute("1")),
    ]
    await running.wait()
    await session.close()
    assert [each.outcome for each in await asyncio.gather(*waiting)] == [Outcome.CANCELLED, Outcome.CANCELLED]
    with pytest.raises(NotFoundError):
        await session.execute("1")
    assert asyncio.all_tasks() == tasks


async def test_many_sessions_with_coroutine_tools_run_side_by_side(client: AsyncExecutorClient) -> None:
    """Each tool answers only when all sessions have called theirs."""
    count = 4
    barrier = asyncio.Barrier(count)

    async def use(number: int) -> object:
        async def meet(given: int) -> int:
            await barrier.wait()
            return given * 10

        async with await client.create_session() as session:
            await session.register_tools({"meet": meet})
            await session.set_variables({"number": number})
            return (await session.execute("meet(number)")).output

    async with asyncio.timeout(60):
        assert await asyncio.gather(*map(use, range(count))) == [0, 10, 20, 30]
