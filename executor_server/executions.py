"""An execution and its journal.

An execution belongs to its session, not to the call that started it. Its events are numbered and kept; any number of
readers, one after the other or at once, follow them from any number on. The journal is bounded: once it holds more
than its limit, or all journals together hold more than theirs, what every reader has is let go, and when nothing can be
let go the guest is asked to wait. One that is cancelled keeps nobody waiting: for its end to arrive, what finds no room
is discarded, and the cut is announced before the result.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from executor_server.errors import NotFound, OutOfRange, PreconditionFailed, Reason
from executor_server.guest.frames import Fields
from executor_server.journal_room import UNSHARED, TenantRoom
from executor_server.model import BlobChunk, Event, EventKind, Image, Log, OutputMode, Payload, Result, ToolCall
from executor_server.requested import RequestedLimits

_EVENT_OVERHEAD_BYTES = 256
_FILE_OVERHEAD_BYTES = 256  # of an artifact
# Of an execution, so that a second answer is told from one to no call; a program may make calls for hours.
_MAX_ANSWERED_CALLS = 4096
# At one time; an honest supervisor stops far below.
_MAX_OPEN_CALLS = 1024
_MAX_REASON_CHARS = 1024


@dataclass(frozen=True)
class ExecutionRequest:
    """An execution as a client asks for it. The same id again must come with the same of all else."""

    execution_id: str
    code: str
    mode: OutputMode
    limits: RequestedLimits


@dataclass(frozen=True)
class ToolFailure:
    """A tool that raised on the host."""

    type: str
    message: str


class ExecutionControl:
    """What an execution asks of its session."""

    def __init__(
        self,
        cancel: Callable[[str], None],
        answer: Callable[[str, str, Payload | ToolFailure], None],
        hold: Callable[[bool], None],
        room: TenantRoom | None = None,
    ) -> None:
        self.cancel = cancel
        self.answer = answer
        self.hold = hold
        self.room = room or UNSHARED


class _Reader:
    """How far one reader has come."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.wakeup: asyncio.Future[None] | None = None


class Execution:
    """One run of code: its identity, its journal, its open tool calls."""

    def __init__(
        self,
        execution_id: str,
        fingerprint: bytes,
        policy_fingerprint: str,
        journal_bytes: int,
        control: ExecutionControl,
    ) -> None:
        self.execution_id = execution_id
        self.fingerprint = fingerprint
        self.policy_fingerprint = policy_fingerprint
        self.stopped = ""  # why the daemon stopped it, when it did
        self.done = False
        self.last_number = 0
        self.journal_size = 0
        self.discarded_bytes = 0  # frames for which there was no room after it was cancelled
        self._control = control
        self._journal: deque[Event] = deque()
        self._costs: deque[int] = deque()  # of the events in the journal
        self._journal_limit = journal_bytes
        self._readers: set[_Reader] = set()
        self._open_calls: dict[str, bool] = {}  # call id → answered
        self._answered: deque[str] = deque()
        self._held = False
        self._cancelled = False
        self._finished = asyncio.Event()

    # -- writing -------------------------------------------------------------------------------------------------

    def publish(self, kind: EventKind, frame_bytes: int = 0) -> None:
        """Adds an event. After the result nothing is added any more: what comes late is dropped.

        `frame_bytes`: what it takes on the tape, where a guest can make it far more than what is in it.
        """
        if self.done:
            return
        self.last_number += 1
        self._journal.append(Event(self.last_number, kind))
        self._costs.append(0)
        self._add_cost(_EVENT_OVERHEAD_BYTES + max(_content_bytes(kind), frame_bytes))
        if isinstance(kind, ToolCall):
            self._open_calls[kind.call_id] = False
        elif isinstance(kind, Result):
            self.done = True
            self._finished.set()
        for reader in self._readers:
            if reader.wakeup is not None and not reader.wakeup.done():
                reader.wakeup.set_result(None)
        self.trim()

    def trim(self) -> None:
        """Keeps the journal within its limit; holds the guest back while it can't be."""
        if self._is_full:
            taken = min((reader.position for reader in self._readers), default=0)
            while self._journal and self._journal[0].number <= taken and self._is_full:
                self._let_go()
        held = not self.done and not self._cancelled and self._is_full
        if held != self._held:
            self._held = held
            self._control.room.set_waiting(self, held)
            self._control.hold(held)

    @property
    def _is_full(self) -> bool:
        return self.journal_size > self._journal_limit or self._control.room.is_short_for(self.journal_size)

    def enter(self, room: TenantRoom) -> None:
        """From here on it shares room with others."""
        self._control.room = room
        room.charge(self.journal_size)
        self.trim()

    def leave(self) -> None:
        """It is forgotten: it takes no room, and the guest need not wait for its readers."""
        self._control.room.leave(self, self.journal_size)
        self._control.room = UNSHARED  # whoever still reads it does so on his own
        if self._held:
            self._held = False
            self._control.hold(False)

    def let_go_of_read(self) -> None:
        """Keeps nothing but its result."""
        while len(self._journal) > 1 and not self._readers:
            self._let_go()

    def _let_go(self) -> None:
        self._journal.popleft()
        cost = self._costs.popleft()
        self.journal_size -= cost
        self._control.room.charge(-cost)

    def _add_cost(self, size_bytes: int) -> None:
        """To the last event."""
        self._costs[-1] += size_bytes
        self.journal_size += size_bytes
        self._control.room.charge(size_bytes)

    # -- reading -------------------------------------------------------------------------------------------------

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """The events after a number, to the result. Raises OutOfRange when they are not there, any more or at all."""
        if after > self.last_number or (after < self.last_number and after + 1 < self.first_number):
            raise OutOfRange(
                Reason.EVENT_OUT_OF_RANGE,
                f"the journal of this execution holds events {self.first_number} to {self.last_number}",
            )
        reader = _Reader(after)
        self._readers.add(reader)
        self.trim()  # what it says it has may be all that fills the journal
        try:
            while not (self.done and reader.position == self.last_number):
                if reader.position == self.last_number:
                    reader.wakeup = asyncio.get_running_loop().create_future()
                    await reader.wakeup
                event = self._journal[reader.position + 1 - self.first_number]
                yield event
                reader.position = event.number
                self.trim()
            self._control.room.note_read(self)
        finally:
            self._readers.discard(reader)

    @property
    def first_number(self) -> int:
        """Of the first event that is still held; of the next one when none is."""
        return self._journal[0].number if self._journal else self.last_number + 1

    async def wait(self) -> None:
        """Until the result is there."""
        await self._finished.wait()

    @property
    def followed(self) -> bool:
        """Whether somebody reads its events now."""
        return bool(self._readers)

    @property
    def waits_for_client(self) -> bool:
        """Whether it can't go on until a client answers a tool call, or reads what the journal holds."""
        return not self.done and (self._held or not all(self._open_calls.values()))

    # -- steering ------------------------------------------------------------------------------------------------

    def may_call(self, call_id: str) -> bool:
        """Whether a tool call of this id can be made now: it is a new one, and not too many are open."""
        return call_id not in self._open_calls and len(self._open_calls) - len(self._answered) < _MAX_OPEN_CALLS

    def cancel(self) -> None:
        """Asks for its end, once; nothing when it has ended."""
        if not self.done and not self._cancelled:
            self._control.cancel(self.execution_id)
            self.note_cancelled()

    def note_cancelled(self) -> None:
        """Its end has been asked for: the guest, which has to say so, is held back no more."""
        self._cancelled = True
        self.trim()

    @property
    def has_room(self) -> bool:
        """True when one more event can be kept, or waited with. After one was discarded, what comes lacks its start."""
        return not self.discarded_bytes and not (self._cancelled and self._is_full)

    def note_discarded(self, discarded_bytes: int) -> None:
        """So much has been discarded by now."""
        self.discarded_bytes = discarded_bytes

    def note_stop(self, reason: str) -> None:
        """The daemon is about to cancel it, and says why in its result."""
        self.stopped = self.stopped or reason[:_MAX_REASON_CHARS]

    def check_answer(self, call_id: str) -> None:
        """Raises NotFound, PreconditionFailed when nobody waits for the answer of this tool call."""
        answered = self._open_calls.get(call_id)
        if answered is None:
            raise NotFound(Reason.TOOL_CALL_NOT_FOUND, f"this execution has made no tool call {call_id!r}")
        if answered:
            raise PreconditionFailed(Reason.TOOL_CALL_ANSWERED, f"tool call {call_id!r} has been answered")
        if self.done:
            raise PreconditionFailed(Reason.EXECUTION_ENDED, "the execution has ended; nobody waits for this answer")

    def submit_tool_result(self, call_id: str, answer: Payload | ToolFailure) -> None:
        """Passes the answer of a tool call on. Raises as `check_answer`: an answer counts once."""
        self.check_answer(call_id)
        self._control.answer(self.execution_id, call_id, answer)
        self.note_answer(call_id, len(answer) if isinstance(answer, bytes) else 0)

    def note_answer(self, call_id: str, size_bytes: int = 0) -> None:
        """A call has been answered, or never will be. On the tape an answer lies as long as the event before it, and is
        in its cost."""
        if self._costs:
            self._add_cost(size_bytes)
        self._open_calls[call_id] = True
        self._answered.append(call_id)
        if len(self._answered) > _MAX_ANSWERED_CALLS:
            del self._open_calls[self._answered.popleft()]

    # -- remembering ---------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All that is known of it but its events."""
        return {
            "id": self.execution_id,
            "fingerprint": self.fingerprint.hex(),
            "policy": self.policy_fingerprint,
            "stopped": self.stopped,
            "cancelled": self._cancelled,
            "discarded": self.discarded_bytes,
            "first": self.first_number,
            "last": self.last_number,
            "done": self.done,
            "open": [call_id for call_id, answered in self._open_calls.items() if not answered],
            "answered": list(self._answered),
        }

    def restore(self, snapshot: Fields) -> None:
        """Becomes as in a snapshot: what it holds of the events is kept as far as they lead up to it without a gap."""
        self.stopped = snapshot.text("stopped", _MAX_REASON_CHARS)
        self._cancelled = snapshot.boolean("cancelled")
        self.discarded_bytes = snapshot.integer("discarded")
        last = snapshot.integer("last")
        first = snapshot.integer("first", 1, last + 1)
        if self.last_number != last:
            while self._journal:
                self._let_go()
            self.last_number = last
        while self.first_number < first:
            self._let_go()
        self._answered = deque(snapshot.texts("answered", _MAX_ANSWERED_CALLS))
        self._open_calls = {
            **dict.fromkeys(snapshot.texts("open", _MAX_OPEN_CALLS), False),
            **dict.fromkeys(self._answered, True),
        }
        if snapshot.boolean("done"):
            self.done = True
            self._finished.set()
        self.trim()


def _content_bytes(kind: EventKind) -> int:
    """About how many bytes of memory what is in an event takes; a text may take four for a character."""
    match kind:
        case Log(text=text):
            return sys.getsizeof(text)
        case BlobChunk(data=data):
            return len(data)
        case Image(data=payload) | ToolCall(arguments=payload):
            return _payload_bytes(payload)
        case Result():
            texts = [artifact.path for artifact in kind.artifacts]
            if kind.error is not None:
                texts += (kind.error.type, kind.error.message, kind.error.traceback, kind.error.statement)
            files_bytes = _FILE_OVERHEAD_BYTES * len(kind.artifacts)
            return _payload_bytes(kind.output) + sum(map(sys.getsizeof, texts)) + files_bytes
    return 0


def _payload_bytes(payload: Payload | None) -> int:
    return len(payload) if isinstance(payload, bytes) else 0
