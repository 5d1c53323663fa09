"""A user's program, which pyright must accept in strict mode (`make types-for-users`). It is never run."""

import asyncio

import executor_client
from executor_client import (
    AsyncExecutorClient,
    EnvironmentFailed,
    ExecutionEvent,
    ExecutionResult,
    ExecutorClient,
    ExecutorClientError,
    LogEvent,
    Outcome,
    ProcessResult,
    Savepoint,
    Wait,
)


def double(number: int) -> int:
    return 2 * number


def show(event: ExecutionEvent) -> None:
    if isinstance(event, LogEvent):
        assert event.text


def wait(waiting: Wait) -> None:
    assert waiting.waited_s > 0


def run() -> ExecutionResult:
    with ExecutorClient(on_wait=wait) as client, client.create_session(limits={"memory_bytes": "1GB"}) as session:
        session.register_tools({"double": double})
        savepoint: Savepoint = session.savepoint()
        result = session.execute("double(2)", on_event=show).raise_for_outcome()
        session.rollback(savepoint)
        tried = session.try_(["x = 1", "x = 2"])
        assert tried[0].branch is not None
        listing: str = session.processes.run(["ls"], overflow="error").check().stdout
        for piece in session.processes.stream("ls"):
            assert piece.succeeded if isinstance(piece, ProcessResult) else piece.number
        assert listing and not session.files.list().truncated
        with session.ports.forward(8000) as forward:
            assert forward.url.startswith("http")
    assert result.outcome is Outcome.SUCCEEDED and result.usage.wall_time_s > 0
    return result


async def run_async() -> None:
    async with AsyncExecutorClient() as client, await client.session("analysis") as session:
        async for event in await session.processes.start("ls"):
            assert event.number
        data: bytes = await session.get_file("a.csv")
        assert data


def main() -> str:
    try:
        run()
        asyncio.run(run_async())
    except EnvironmentFailed as error:
        return error.message
    except ExecutorClientError as error:
        return error.reason
    return executor_client.__version__
