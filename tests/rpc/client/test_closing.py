"""A client that is closed while it is used, or used where it can't be; and asyncio's own ways to end a wait."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from executor_api.v1 import types_pb2 as types
from executor_client import (
    AsyncExecutorClient,
    AsyncSession,
    ConfigurationError,
    ExecutorClient,
    Outcome,
    UnavailableError,
)
from tests.support.fake_daemon import TOKEN, Answered, Cancelled, FakeDaemon, log, result, tool_call
from tests.support.polling import eventually, eventually_async

CANCELLED = result(outcome=types.OUTCOME_CANCELLED)
CLOSED = "this client was closed"


@pytest.fixture
async def asyncio_client(daemon: FakeDaemon) -> AsyncIterator[AsyncExecutorClient]:
    async with AsyncExecutorClient(daemon.address, token=TOKEN) as client:
        yield client


@pytest.fixture
async def session(asyncio_client: AsyncExecutorClient, daemon: FakeDaemon) -> AsyncIterator[AsyncSession]:
    async with await asyncio_client.create_session() as session:
        daemon.requests.clear()
        yield session


# ---------------------------------------------------------------------------------------------------------------------
# Closed


USES: list[Callable[[Any, Any], Any]] = [
    lambda client, session: client.get_policy(),
    lambda client, session: client.create_session(),
    lambda client, session: session.execute("1"),
    lambda client, session: session.set_variables({"x": b"y" * 300_000}),
    lambda client, session: session.get_variables(),
    lambda client, session: session.files.write("a", b"b"),
    lambda client, session: session.files.read("a"),
    lambda client, session: session.close(),
]


@pytest.mark.parametrize("use", USES)
def test_closed_client_says_so(client: Any, use: Callable[[Any, Any], Any]) -> None:
    session = client.create_session()
    client.close()
    with pytest.raises(UnavailableError, match=CLOSED) as refused:
        use(client, session)
    assert refused.value.reason == "CLIENT_CLOSED"
    client.close()


def test_close_ends_a_wait_for_an_execution_and_for_an_answer(daemon: FakeDaemon) -> None:
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    client = ExecutorClient(daemon.address, token=TOKEN)
    session = client.create_session()
    closer = threading.Thread(target=client.close)
    with pytest.raises(UnavailableError, match=CLOSED):
        session.execute("code", on_event=lambda event: closer.start())
    closer.join()

    daemon.barriers["GetPolicy"] = threading.Event()
    client = ExecutorClient(daemon.address, token=TOKEN)

    def close_in_the_middle() -> None:
        eventually(lambda: "GetPolicy" in daemon.names())
        client.close()

    closer = threading.Thread(target=close_in_the_middle)
    closer.start()
    with pytest.raises(UnavailableError, match=CLOSED):
        client.get_policy()
    closer.join()


async def test_close_ends_what_waits_on_the_loop_with_an_error_and_no_cancellation(daemon: FakeDaemon) -> None:
    """A task that ends as cancelled, without a cancellation, would end in silence."""
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    daemon.barriers["GetPolicy"] = threading.Event()
    client = AsyncExecutorClient(daemon.address, token=TOKEN)
    session = await client.create_session()
    started = asyncio.Event()
    waiting = [
        asyncio.create_task(session.execute("code", on_event=lambda event: started.set())),
        asyncio.create_task(client.get_policy()),
    ]
    await started.wait()
    assert await eventually_async(lambda: "GetPolicy" in daemon.names())
    await client.close()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(each) for each in ended] == [CLOSED, CLOSED]
    assert all(isinstance(each, UnavailableError) for each in ended)


# ---------------------------------------------------------------------------------------------------------------------
# Loops


def test_asyncio_client_is_made_anywhere_and_belongs_to_the_loop_of_its_first_call(daemon: FakeDaemon) -> None:
    client, unused = (AsyncExecutorClient(daemon.address, token=TOKEN) for _ in range(2))
    with pytest.raises(ConfigurationError, match="needs a running event loop"):
        client.get_policy().send(None)

    async def use() -> object:
        async with client, await client.create_session() as session:
            return (await session.execute("1")).outcome

    assert asyncio.run(use()) is Outcome.SUCCEEDED
    asyncio.run(unused.close())


FORKING = """
import asyncio, os, signal, sys
from executor_client import AsyncExecutorClient, ConfigurationError, ExecutorClient

async def main(access):
    used, unused = AsyncExecutorClient(**access), AsyncExecutorClient(**access)
    await used.get_policy()
    for client in (used, unused, None):
        if os.fork() == 0:
            signal.alarm(10)
            try:
                await (client or AsyncExecutorClient(**access)).get_policy()
            except ConfigurationError as error:
                print(error)
                with ExecutorClient(**access) as blocking:
                    print(blocking.get_policy() is not None)
                sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0
    print((await used.get_policy()) is not None)
    await used.close()

asyncio.run(main({"address": sys.argv[1], "token": sys.argv[2]}))
"""


def test_forked_child_of_an_asyncio_client_is_told_what_to_do(daemon: FakeDaemon) -> None:
    """gRPC's asyncio hangs there; a blocking client works, and the parent's goes on."""
    program = [sys.executable, "-c", FORKING, daemon.address, TOKEN]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 7, done.stderr
    assert all("forked" in line and "spawn" in line for line in lines[0:6:2])
    assert [lines[1], lines[3], lines[5], lines[6]] == ["True"] * 4


def test_asyncio_client_serves_one_loop_and_says_so(daemon: FakeDaemon) -> None:
    async def make() -> tuple[AsyncExecutorClient, AsyncSession]:
        client = AsyncExecutorClient(daemon.address, token=TOKEN)
        return client, await client.create_session()

    with asyncio.Runner() as first, asyncio.Runner() as second:
        client, session = first.run(make())
        for use in USES:
            with pytest.raises(ConfigurationError, match="another event loop"):
                second.run(use(client, session))
        with pytest.raises(ConfigurationError, match="another event loop"):
            second.run(client.close())
        assert first.run(session.execute("1")).output is None
        first.run(client.close())


# ---------------------------------------------------------------------------------------------------------------------
# Ends of waits


async def test_timeout_of_asyncio_cancels_the_execution(session: AsyncSession, daemon: FakeDaemon) -> None:
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await session.execute("code")
    assert daemon.names() == ["Execute", "CancelExecution"]
    daemon.journal = [result(1)]
    assert (await session.execute("1")).output == 1


@pytest.mark.parametrize(
    ("rpc", "use"),
    [
        ("GetPolicy", lambda client, session: client.get_policy()),
        ("CreateSession", lambda client, session: client.create_session()),
        ("UploadBlob", lambda client, session: session.set_variables({"x": b"y" * 300_000})),
        ("GetVariables", lambda client, session: session.get_variables()),
        ("PutFile", lambda client, session: session.files.write("a", b"b")),
        ("GetFile", lambda client, session: session.files.read("a")),
        ("Execute", lambda client, session: session.execute("1")),
        ("DeleteSession", lambda client, session: session.close()),
    ],
)
async def test_a_scope_of_anyio_ends_each_call(
    asyncio_client: AsyncExecutorClient, session: AsyncSession, daemon: FakeDaemon, rpc: str, use: Any
) -> None:
    """It recognizes its own cancellation by a message, which gRPC drops. Only clean-ups go on, to their end."""
    daemon.barriers[rpc] = threading.Event()
    tasks = asyncio.all_tasks()
    with anyio.CancelScope() as scope:

        async def cancel() -> None:
            assert await eventually_async(lambda: rpc in daemon.names())
            scope.cancel()
            if rpc == "DeleteSession":
                daemon.barriers[rpc].set()

        canceller = asyncio.create_task(cancel())
        await use(asyncio_client, session)
    daemon.barriers[rpc].set()
    await canceller
    assert scope.cancelled_caught
    assert await eventually_async(lambda: asyncio.all_tasks() == tasks)


async def test_failure_of_a_sibling_cancels_the_execution(session: AsyncSession, daemon: FakeDaemon) -> None:
    daemon.journal = [log("started"), Cancelled(), CANCELLED]
    started = asyncio.Event()

    async def fail() -> None:
        await started.wait()
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.execute("code", on_event=lambda event: started.set()))
            tasks.create_task(fail())
    assert raised.group_contains(ZeroDivisionError, depth=1) and len(raised.value.exceptions) == 1
    assert daemon.names() == ["Execute", "CancelExecution"]


async def test_cancellation_reaches_a_coroutine_tool(session: AsyncSession, daemon: FakeDaemon) -> None:
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def tool() -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    await session.register_tools({"tool": tool})
    daemon.journal = [tool_call("tool"), Answered(), result()]
    task = asyncio.create_task(session.execute("code"))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set() and daemon.names()[-1] == "CancelExecution"


async def test_cancelled_wait_for_a_daemon_that_is_away_ends_at_once(daemon: FakeDaemon) -> None:
    async with AsyncExecutorClient("unix:/does/not/exist.sock", token=TOKEN, connect_timeout_s=60) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.get_policy()


async def test_many_sessions_run_on_one_loop(asyncio_client: AsyncExecutorClient, daemon: FakeDaemon) -> None:
    daemon.journal = [log("x"), result(1)]

    async def use(number: int) -> object:
        async with await asyncio_client.create_session(labels={"n": str(number)}) as session:
            await session.set_variables({"n": number})
            return (await session.execute("code")).output

    assert await asyncio.gather(*map(use, range(20))) == [1] * 20
    assert daemon.names().count("DeleteSession") == 20
