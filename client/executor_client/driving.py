# Made of aio_driving.py by tools/unasync.py: change that, and run `make unasync`.
"""Follows an execution of the blocking client to its result across broken streams, or cancels it."""

from __future__ import annotations

import contextlib
import time

from executor_client._core.assembler import EventGap, ToolRequest
from executor_client._core.execution import Execution
from executor_client._core.limits import CANCEL_GRACE_S
from executor_client._core.quiet_grpc import grpc
from executor_client._core.session_base import SessionBase
from executor_client._sync import OnEvent, ToolCalls, Transport, notify, sleep
from executor_client.errors import ExecutorClientError, PreconditionError
from executor_client.results import ExecutionResult


def drive(
    session: SessionBase[Transport], execution: Execution, calls: ToolCalls, on_event: OnEvent | None
) -> ExecutionResult:
    """Reads streams of the execution's events, one after the other, until one brings the result."""
    transport = session._transport
    while True:
        stream = transport.channel.events(execution.opening(), execution.trace)
        calls.watch(stream)
        cause: grpc.RpcError | EventGap | None = None
        try:
            for message in stream:
                transport.answered = True
                fed = execution.feed(message)
                if execution.assembler.result is not None:
                    stream.finish()
                    return execution.assembler.result
                if isinstance(fed, ToolRequest):
                    calls.start(fed)
                    fed = fed.event
                if fed is not None and on_event is not None:
                    notify(on_event, fed)
        except (grpc.RpcError, EventGap) as error:
            cause = error
        finally:
            stream.cancel()
        if calls.failure is not None:
            raise calls.failure
        lost = _await_next(session, execution, cause)
        if lost is not None:
            return lost


def _await_next(
    session: SessionBase[Transport], execution: Execution, cause: grpc.RpcError | EventGap | None
) -> ExecutionResult | None:
    """Waits before the next stream. If the execution was lost with its node, returns a result instead."""
    try:
        sleep(execution.interrupted(cause, time.monotonic()))
    except PreconditionError as error:
        if not (session._is_lost(error) and execution.may_have_begun):
            raise
        return execution.assembler.lost(error.message, session.generation)
    return None


def abandon(session: SessionBase[Transport], execution: Execution, *, wait: bool) -> None:
    """Cancels an execution that its caller no longer waits for; with `wait`, gives it a moment to end.

    Suppresses its own errors: the caller gets the error that led here.
    """
    with contextlib.suppress(ExecutorClientError, grpc.RpcError):
        session._transport.once(execution.cancellation(), CANCEL_GRACE_S)
        if wait:
            session._transport.channel.events(execution.attachment(), execution.trace, CANCEL_GRACE_S).read_to_end()
