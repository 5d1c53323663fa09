"""The asyncio client as its users use it, on a real daemon: cancellation, timeouts, many sessions, closing while busy."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import anyio
import pytest

from executor_client import AsyncExecutorClient, NotFoundError, Outcome
from tests.support.daemon import Daemon

ENDLESS = "import time\nprint('running', flush=True)\nwhile True: time.sleep(0.01)"
SOON_S = 5.0


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncExecutorClient]:
    async with AsyncExecutorClient(**daemon.access) as connected:
        yield connected


Work = Callable[[asyncio.Event], Coroutine[Any, Any, object]]


async def by_anyio(work: Work) -> None:
    """The scope cancels its task again at every await until it is left."""
    started = asyncio.Event()
    with anyio.CancelScope() as scope:
        waiting = asyncio.create_task(started.wait())
        waiting.add_done_callback(lambda _: scope.cancel())
        await work(started)
    assert scope.cancelled_caught


async def by_timeout(work: Work) -> None:
    started = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            waiting = asyncio.create_task(started.wait())
            waiting.add_done_callback(lambda _: limit.reschedule(0))
            await work(started)


async def by_cancel(work: Work, *, repeatedly: bool = False) -> None:
    started = asyncio.Event()
    task = asyncio.ensure_future(work(started))
    await started.wait()
    task.cancel()
    while repeatedly and not task.done():
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


WAYS = {
    "anyio": by_anyio,
    "timeout": by_timeout,
    "cancel": by_cancel,
    "repeated cancel": partial(by_cancel, repeatedly=True),
}


@pytest.mark.parametrize("cancelled", WAYS.values(), ids=WAYS.keys())
async def test_a_cancelled_call_ends_what_it_started_and_leaves_the_session_usable(
    daemon: Daemon, cancelled: Callable[[Work], Coroutine[Any, Any, None]]
) -> None:
    tasks = asyncio.all_tasks()

    async def execute(started: asyncio.Event) -> None:
        await session.execute(ENDLESS, on_event=lambda event: started.set())

    async def call_tool(started: asyncio.Event) -> None:
        async def tool() -> None:
            started.set()
            await asyncio.Event().wait()

        await session.register_tools({"tool": tool})
        await session.execute("tool()")

    async def run(started: asyncio.Event) -> None:
        await session.processes.run("echo; sleep 1000", on_output=lambda *_: started.set())

    async def live(started: asyncio.Event) -> None:
        async with (
            AsyncExecutorClient(**daemon.access) as other,
            await other.create_session() as session,
            await session.ports.forward(80),
        ):
            started.set()
            await session.execute(ENDLESS)

    async with AsyncExecutorClient(**daemon.access) as client:
        async with await client.create_session(authorized_imports=["time"]) as session:
            await session.execute("kept = 1")
            for work in (execute, call_tool, run):
                await cancelled(work)
                async with asyncio.timeout(SOON_S):
                    assert (await session.execute("kept")).output == 1
            (info,) = await session.processes.list()
            process = await session.processes.attach(info.process_id)
            assert (await process.wait(SOON_S)).signal == signal.SIGKILL
        await cancelled(live)
        assert await client.list_sessions() == []
    assert asyncio.all_tasks() == tasks


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


INTERRUPTED = """
import asyncio, signal, sys
from executor_client import AsyncExecutorClient

async def main(access):
    session = await AsyncExecutorClient(**access).create_session(detached=True)
    ready = asyncio.Barrier(3)
    execution = session.execute("print(1)\\nwhile True: pass", on_event=lambda event: ready.wait())
    command = session.processes.run("echo; sleep 1000", on_output=lambda *_: ready.wait())
    background = [asyncio.create_task(execution), asyncio.create_task(command)]
    await ready.wait()
    print(session.session_id, flush=True)
    signal.raise_signal(signal.SIGINT)
    await asyncio.Event().wait()

asyncio.run(main({"address": sys.argv[1], "token": sys.argv[2]}), debug=True)
"""


def test_ctrl_c_in_asyncio_run_ends_what_runs(daemon: Daemon) -> None:
    """It cancels the main task, and then the others, whose clean-ups are tasks that begin after that."""
    program = [sys.executable, "-c", INTERRUPTED, daemon.access["address"], daemon.access["token"]]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGINT and done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "destroyed" not in done.stderr and "never" not in done.stderr, done.stderr
    with daemon.client() as client, client.get_session(done.stdout.strip()) as session:
        assert session.execute("1").output == 1
        (info,) = session.processes.list()
        assert session.processes.attach(info.process_id).wait(SOON_S).signal == signal.SIGKILL


async def test_more_calls_than_one_connection_holds_do_not_wait(client: AsyncExecutorClient) -> None:
    """Each stream is a call for as long as it is open, and a daemon serves 256 calls on one connection."""
    async with await client.create_session() as session, asyncio.timeout(SOON_S * 6), asyncio.TaskGroup() as group:
        process = await session.processes.start("echo ready; read line", stdin=True)
        open_ = asyncio.Barrier(301)

        async def follow() -> None:
            async for _ in await session.processes.attach(process.process_id):
                await open_.wait()

        for _ in range(300):
            group.create_task(follow())
        await open_.wait()
        await process.write("it\n")
