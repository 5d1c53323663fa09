"""Follows an execution of the asyncio client to its result, however often its stream breaks; or gives it up."""

from __future__ import annotations

import contextlib
import time

from executor_client._aio import AsyncSessionTransport, AsyncToolCalls, OnEvent, notify, sleep
from executor_client._core.assembler import EventGap, ToolRequest
from executor_client._core.execution import Execution
from executor_client._core.limits import CANCEL_GRACE_S
from executor_client._core.quiet_grpc import grpc
from executor_client.errors import ExecutorClientError, PreconditionError
from executor_client.results import ExecutionResult


async def drive(
    transport: AsyncSessionTransport,
    execution: Execution,
    calls: AsyncToolCalls,
    on_event: OnEvent | None,
    generation: int,
) -> ExecutionResult:
    """Reads streams of the execution's events, one after the other, until one brings the result.

    `generation` is that of the session's interpreter, for a result that says that it is lost.
    """
    while True:
        stream = transport.open(execution.opening(), execution.trace)
        calls.watch(stream)
        cause: grpc.RpcError | EventGap | None = None
        try:
            async for message in stream:
                transport.daemon.answered = True
                fed = execution.feed(message)
                if execution.assembler.result is not None:
                    await stream.finish()
                    return execution.assembler.result
                if isinstance(fed, ToolRequest):
                    calls.start(fed)
                    fed = fed.event
                if fed is not None and on_event is not None:
                    await notify(on_event, fed)
        except (grpc.RpcError, EventGap) as error:
            cause = error
        finally:
            stream.cancel()
        if calls.failure is not None:
            raise calls.failure
        lost = await _await_next(transport, execution, cause, generation)
        if lost is not None:
            return lost


async def _await_next(
    transport: AsyncSessionTransport, execution: Execution, cause: grpc.RpcError | EventGap | None, generation: int
) -> ExecutionResult | None:
    """Waits before the next stream. Returns the result instead when the execution was lost with its node."""
    try:
        await sleep(execution.interrupted(cause, time.monotonic()))
    except PreconditionError as error:
        if not (transport.is_lost(error) and execution.may_have_begun):
            raise
        return execution.assembler.lost(error.message, generation)
    return None


async def abandon(transport: AsyncSessionTransport, execution: Execution, *, wait: bool) -> None:
    """Cancels an execution whose caller has stopped waiting; with `wait`, gives it a moment to end.

    Drops its own failures: the caller is about to get the error that led here.
    """
    with contextlib.suppress(ExecutorClientError, grpc.RpcError):
        await transport.once(transport.stub.CancelExecution, execution.cancellation(), CANCEL_GRACE_S)
        if wait:
            await transport.open(execution.attachment(), execution.trace, CANCEL_GRACE_S).read_to_end()
