"""What operators see of executions: the kept ones of a session, and the events of one as they happen.

A viewer is no client. It is no reader of the journal, so no event is kept or held back for it, and it doesn't prolong
the session. It looks at the journal five times a second, however fast events come, and each time takes a bounded part.
All viewers look at the same moments, so that an execution is disturbed at most five times a second, however many there
are. Between two looks a viewer holds a number and no events: one that doesn't read costs no memory.

The profile decides whether contents are seen (`audit.view`). Each call that may show contents is recorded first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api import to_wire
from executor_server.api.auth import current_principal
from executor_server.core import Event, Forbidden, NotFound, Reason
from executor_server.sessions import Session
from executor_server.sessions.journal import Execution

LOOK_INTERVAL_S = 0.2
MAX_EVENTS = 1024
"""Events in one message."""
MAX_BYTES = 512 * 1024
"""Bytes of kept events after which no further one goes into a message."""


def list_executions(session: Session) -> admin_pb.ListExecutionsResponse:
    """Returns the executions that are kept. Raises Forbidden."""
    _view_of(session)
    journal = session.executions.journal
    return admin_pb.ListExecutionsResponse(executions=[_execution_to(session, each) for each in journal.executions])


async def follow_execution(
    session: Session, execution_id: str, after: int
) -> AsyncGenerator[admin_pb.FollowExecutionResponse]:
    """Yields the events of an execution after a number, until its result.

    Raises Forbidden, NotFound, also when the execution is dropped meanwhile, OutOfRange, and what admission refuses
    with.
    """
    view = _view_of(session)
    has_content = view == "content"
    _known(session, execution_id)  # no record of an execution that there isn't
    if has_content:
        await session.executions.admit_view(current_principal.get(), execution_id)
    execution: Execution | None = _known(session, execution_id)
    is_first, answered = True, 0
    while execution is not None:
        missed, events = execution.part_after(after, MAX_EVENTS, MAX_BYTES)
        waits, answered = execution.waits_after(answered), execution.waits_count
        message = admin_pb.FollowExecutionResponse(
            missed_events=missed,
            events=[_event_to(each, has_content=has_content) for each in events],
            answers=[admin_pb.AnsweredCall(call_id=call_id, wait_s=wait_s) for call_id, wait_s in waits],
        )
        if is_first:
            code = execution.code.decode(errors="replace") if has_content else ""
            message.execution.CopyFrom(_execution_to(session, execution, code))
            message.has_content = has_content
        after += missed + len(events)
        is_done = execution.done and after == execution.last_number
        del execution, events  # they may be dropped from memory while this waits
        if is_first or message.events or message.answers:
            yield message
        is_first = False
        if is_done:
            return
        await asyncio.sleep(LOOK_INTERVAL_S - asyncio.get_running_loop().time() % LOOK_INTERVAL_S)
        if _view_of(session) != view:
            raise Forbidden(Reason.POLICY_VIOLATION, "the policy has changed what may be seen here; follow it again")
        execution = _known(session, execution_id)


def _view_of(session: Session) -> Literal["metadata", "content"]:
    """Returns what may be seen. Raises Forbidden if that is nothing."""
    view = session.spec.audit.view
    if view == "none":
        profile = session.spec.policy.profile
        text = f'the executions of this session can\'t be seen: its profile {profile!r} has audit.view = "none"'
        raise Forbidden(Reason.POLICY_VIOLATION, text)
    return view


def _known(session: Session, execution_id: str) -> Execution:
    found = session.executions.journal.known(execution_id)
    if found is None:
        text = f"there is no execution {execution_id!r} in this session, or it is no longer kept"
        raise NotFound(Reason.EXECUTION_NOT_FOUND, text)
    return found


def _execution_to(session: Session, execution: Execution, code: str = "") -> admin_pb.ExecutionView:
    result = None
    if execution.result is not None:
        event = to_wire.event_to(Event(execution.last_number, execution.result))
        _clear_contents(event)
        result = event.result
        result.ClearField("artifacts")
        result.ClearField("branch")
    state = session.executions.state_of(execution)
    return write(admin_pb.ExecutionView, execution, state=state, code=code, result=result)


def _event_to(event: Event, *, has_content: bool) -> admin_pb.FollowedEvent:
    message = to_wire.event_to(event)
    withheld_bytes = 0 if has_content else _clear_contents(message)
    return admin_pb.FollowedEvent(event=message, withheld_bytes=withheld_bytes)


def _clear_contents(event: pb.Event) -> int:
    """Clears everything that a program printed, passed or returned; returns the bytes that it took."""
    before = event.ByteSize()
    match event.WhichOneof("kind"):
        case "log":
            event.log.ClearField("text")
        case "image":
            event.image.ClearField("data")
        case "display":
            event.display.ClearField("data")
        case "tool_call":
            event.tool_call.ClearField("arguments")
        case "blob_chunk":
            event.blob_chunk.ClearField("data")
        case "result":
            event.result.ClearField("output")
            for name in ("message", "traceback", "statement"):
                event.result.error.ClearField(name)
    return before - event.ByteSize()
