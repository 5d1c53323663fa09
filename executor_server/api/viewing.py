"""What operators see of executions: the kept ones of a session, and their events as they happen.

A viewer is no client. It is no reader of the journal, so no event is kept or held back for it, and it doesn't prolong
the session. It looks at the journal five times a second, however fast events come, and each time takes a bounded part:
a viewer of a session that runs more than twenty executions a second falls behind. While a message is sent to a viewer,
only its position is kept, so one that doesn't read costs no memory.

The profile decides whether contents are seen (`audit.view`). Each call that may show contents is recorded first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
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
MAX_EVENTS = 128
"""Events of an execution in one message: about a millisecond of the event loop."""
MAX_BYTES = 256 * 1024
"""Bytes of kept events, and of code, after which nothing more goes into a message."""
MAX_EXECUTIONS = 4
"""Executions in one message."""


def list_executions(session: Session) -> admin_pb.ListExecutionsResponse:
    """Returns the executions that are kept. Raises Forbidden."""
    _view_of(session)
    executions = session.executions.journal.state.executions.values()
    return admin_pb.ListExecutionsResponse(
        executions=[_execution_to(session, each, result=_result_to(each)) for each in executions]
    )


async def follow_execution(
    session: Session, execution_id: str, after: int
) -> AsyncGenerator[admin_pb.FollowExecutionResponse]:
    """Yields the events of an execution after a number, until its result.

    Raises Forbidden, NotFound (also when the execution is dropped meanwhile), OutOfRange, and admission's refusals.
    """
    view = _view_of(session)
    number = _known(session, execution_id).number  # checked before the viewing is recorded
    if view == "content":
        await session.executions.admit_view(current_principal.get(), execution_id)
    place = _Place(number, after)
    execution = _known(session, execution_id)
    while True:
        part = _part_to(session, execution, place, has_content=view == "content")
        del execution  # it may be dropped while this waits for a slow viewer
        if part is not None:
            yield part
        if place.has_result:
            return
        # Kept until the next round: if the session ends meanwhile, its end is still shown.
        execution = _known(session, execution_id)
        await asyncio.sleep(LOOK_INTERVAL_S)
        _require_view(session, view)


async def follow_session(
    session: Session, lives: Callable[[], bool], after_execution_id: str
) -> AsyncGenerator[admin_pb.FollowSessionResponse]:
    """Yields executions with their events, one after the other, until the session has ended.

    `lives` returns False when it has. Raises Forbidden, and admission's refusals.
    """
    view, executions = _view_of(session), session.executions.journal.state.executions
    if view == "content":
        await session.executions.admit_view(current_principal.get(), "")
    after = executions.get(after_execution_id)
    if after is not None:
        number = after.number
    else:  # executions that were dropped before the call don't count as missed
        number = min((each.number for each in executions.values()), default=1) - 1
    place = _Place(number, has_result=True)
    unfinished: Execution | None = None
    is_complete = False
    while True:
        lived, kept = lives(), list(executions.values())
        if unfinished is not None and unfinished not in kept:
            kept = [unfinished, *kept]  # the session has ended, and the execution with it
        unfinished = None
        message, is_all = _parts_to(session, kept, place, has_content=view == "content")
        del kept  # as in `follow_execution`
        was_complete, is_complete = is_complete, is_complete or is_all
        message.complete = is_complete
        if message.parts or not was_complete:
            yield message
        if not lived and is_all:
            return
        if is_complete:
            if not place.has_result:
                unfinished = next((each for each in executions.values() if each.number == place.number), None)
            await asyncio.sleep(LOOK_INTERVAL_S)
            _require_view(session, view)


@dataclass
class _Place:
    """How far a viewer has got: the number of an execution, that of its last event, and whether that was its result."""

    number: int
    event: int = 0
    has_result: bool = False
    is_begun: bool = False  # the execution itself was sent
    answers: int = 0  # answered calls of it that were sent
    state: str = ""  # that was sent

    def begin(self, number: int) -> None:
        """Moves to the beginning of an execution."""
        self.number, self.event, self.answers = number, 0, 0
        self.has_result = self.is_begun = False


def _parts_to(
    session: Session, kept: Iterable[Execution], place: _Place, *, has_content: bool
) -> tuple[admin_pb.FollowSessionResponse, bool]:
    """Returns what follows after a place, and True if that is everything so far; moves the place."""
    message, size_bytes = admin_pb.FollowSessionResponse(), 0
    for execution in kept:
        if execution.number < place.number or (execution.number == place.number and place.has_result):
            continue
        if len(message.parts) == MAX_EXECUTIONS or size_bytes >= MAX_BYTES:
            return message, False
        if execution.number > place.number:
            message.missed_executions += execution.number - place.number - 1
            place.begin(execution.number)
        part = _part_to(session, execution, place, has_content=has_content)
        if part is not None:
            message.parts.append(part)
            size_bytes += part.ByteSize()
        if not place.has_result:
            return message, place.event == execution.last_number
    return message, True


def _part_to(
    session: Session, execution: Execution, place: _Place, *, has_content: bool
) -> admin_pb.FollowExecutionResponse | None:
    """Returns what follows after a place in an execution; None if that is nothing. Moves the place."""
    missed, events = execution.part_after(place.event, MAX_EVENTS, MAX_BYTES)
    last_event = place.event + missed + len(events)
    # An answer must not overtake its call, which may be beyond the bounds of this message.
    unknown, answers = execution.waits_after(place.answers, last_event)
    state = session.executions.state_of(execution)
    if place.is_begun and state == place.state and not (missed or events or answers):
        return None
    part = admin_pb.FollowExecutionResponse(
        missed_events=missed,
        events=[_event_to(each, has_content=has_content) for each in events],
        answers=[admin_pb.AnsweredCall(call_id=call_id, wait_s=wait_s) for call_id, wait_s in answers],
        state=f"EXECUTION_STATE_{state.upper()}",
    )
    if not place.is_begun:
        code = execution.code.decode(errors="replace") if has_content else ""
        part.execution.CopyFrom(_execution_to(session, execution, code))
        part.has_content = has_content
        place.is_begun = True
    place.event, place.state = last_event, state
    place.answers += unknown + len(answers)
    place.has_result = execution.done and last_event == execution.last_number
    return part


def _view_of(session: Session) -> Literal["metadata", "content"]:
    """Returns what may be seen. Raises Forbidden if that is nothing."""
    view = session.spec.audit.view
    if view == "none":
        profile = session.spec.policy.profile
        text = f'the executions of this session can\'t be seen: its profile {profile!r} has audit.view = "none"'
        raise Forbidden(Reason.POLICY_VIOLATION, text)
    return view


def _require_view(session: Session, view: str) -> None:
    """Raises Forbidden if the policy now allows less or more: the call was recorded with the earlier view."""
    if _view_of(session) != view:
        raise Forbidden(Reason.POLICY_VIOLATION, "the policy has changed what may be seen here; follow it again")


def _known(session: Session, execution_id: str) -> Execution:
    found = session.executions.journal.state.executions.get(execution_id)
    if found is None:
        text = f"there is no execution {execution_id!r} in this session, or it is no longer kept"
        raise NotFound(Reason.EXECUTION_NOT_FOUND, text)
    return found


def _execution_to(
    session: Session, execution: Execution, code: str = "", result: pb.ExecutionResult | None = None
) -> admin_pb.ExecutionView:
    state = session.executions.state_of(execution)
    return write(admin_pb.ExecutionView, execution, state=state, code=code, result=result)


def _result_to(execution: Execution) -> pb.ExecutionResult | None:
    """Returns the result for a list."""
    if execution.result is None:
        return None
    event = to_wire.event_to(Event(execution.last_number, execution.result))
    _clear_contents(event)
    event.result.ClearField("artifacts")
    event.result.ClearField("branch")
    return event.result


def _event_to(event: Event, *, has_content: bool) -> admin_pb.FollowedEvent:
    message = to_wire.event_to(event)
    withheld_bytes = 0 if has_content else _clear_contents(message)
    return admin_pb.FollowedEvent(event=message, withheld_bytes=withheld_bytes)


def _clear_contents(event: pb.Event) -> int:
    """Clears everything that a program printed, passed or returned; returns the bytes that it took."""
    before = event.ByteSize()
    kind = event.WhichOneof("kind")
    assert kind is not None
    for name in _CONTENTS[kind]:
        getattr(event, kind).ClearField(name)
    if event.result.HasField("error"):
        for name in _ERROR_CONTENTS:
            event.result.error.ClearField(name)
    return before - event.ByteSize()


# The fields with contents of each kind of event. A kind that is not here can't be shown.
_CONTENTS = {
    "queued": (),
    "log": ("text",),
    "output_cut": (),
    "image": ("data",),
    "tool_call": ("arguments",),
    "blob_chunk": ("data",),
    "result": ("output",),
    "limit_warning": (),
    "display": ("data",),
}
_ERROR_CONTENTS = ("message", "traceback", "statement")
