"""An execution: its numbered events, its readers, and its open tool calls.

An execution belongs to its session, not to the call that started it. There is a bound on the events of one execution,
and one on those of all executions together (memory.py). Past a bound, events that all readers have are dropped; if
there are none, reading from the guest stops until a reader has caught up. A cancelled execution does not hold the guest
back, so that its end can arrive: events without room are discarded, and the missing bytes are announced before the
result.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from executor_server.core import (
    NO_NETWORK_USE,
    BlobChunk,
    BlobRef,
    Event,
    EventKind,
    Image,
    Log,
    NetworkUsage,
    NotFound,
    OutputMode,
    Payload,
    PreconditionFailed,
    Reason,
    Result,
    ToolCall,
)
from executor_server.guest.wire.frames import Fields
from executor_server.guest.wire.messages import Cancel, ToolResult
from executor_server.guest.wire.schema import Message
from executor_server.policy import RequestedLimits
from executor_server.sessions.journal.event_log import EventLog
from executor_server.sessions.journal.memory import TenantMemory

_FILE_OVERHEAD_BYTES = 256  # per artifact
# Answered calls that an execution remembers, to distinguish a second answer from an answer to an unknown call.
_MAX_ANSWERED_CALLS = 4096
# Open calls at one time; an honest supervisor has far fewer.
_MAX_OPEN_CALLS = 1024
_MAX_REASON_CHARS = 1024
_KEPT_CODE_BYTES = 64 * 1024  # of one execution, for viewers


@dataclass(frozen=True)
class ExecutionRequest:
    """An execution as a client requests it. A repeated id must come with the same values."""

    execution_id: str
    code: str
    mode: OutputMode
    limits: RequestedLimits
    savepoint: bool = False  # one is taken before it begins
    branch: bool = False  # it runs in a copy of the interpreter


@dataclass(frozen=True)
class ToolFailure:
    """A tool that raised on the host."""

    type: str
    message: str
    arguments: bytes = b""  # packed, and passed on unread


OnEvent = Callable[[str, Event, int], None]
"""Called with the id of an execution, an event and its bytes in memory. Must neither wait nor raise."""


class ExecutionOwner(Protocol):
    """A session, as far as its executions use it."""

    def send(self, message: Message, body: bytes) -> None:
        """Sends a message to the guest."""
        ...

    def hold(self, holder: object, held: bool) -> None:
        """Stops reading from the guest while any holder is full; resumes when none is."""
        ...

    def on_end(self, execution_id: str, result: Result) -> None:
        """Notified of each result, but not during a replay."""
        ...


class Execution(EventLog[Event]):
    """One run of code. Everything happens in the event loop."""

    def __init__(
        self,
        execution_id: str,
        fingerprint: bytes,
        policy_fingerprint: str,
        journal_bytes: int,
        owner: ExecutionOwner,
        memory: TenantMemory | None = None,
    ) -> None:
        super().__init__(memory)
        self.execution_id = execution_id
        self.fingerprint = fingerprint
        self.policy_fingerprint = policy_fingerprint
        self.stopped = ""  # the reason, when the daemon stopped it
        self.network = NO_NETWORK_USE  # so far
        self.discarded_bytes = 0  # of frames without room after it was cancelled
        self.number = 0  # its ordinal among the session's executions in this daemon
        self.start_time_s: float | None = None  # Unix time; None: an earlier daemon started it
        self.end_time_s: float | None = None  # Unix time; None also if it ended before the daemon restarted
        self.code = b""  # its beginning, if it is kept for viewers
        self.code_bytes = 0  # of all of it; 0: not known
        self._owner = owner
        self._on_event: OnEvent | None = None
        self._journal_limit = journal_bytes
        self._open_calls: dict[str, bool] = {}  # call id → answered
        self._answered: deque[str] = deque()
        self._call_begin_s: dict[str, float] = {}  # of open calls, monotonic
        # The last calls that were answered, with the seconds that the program waited, and the number of the last event
        # by then; none of an earlier daemon's.
        self._waits: deque[tuple[str, float, int]] = deque(maxlen=_MAX_ANSWERED_CALLS)
        self._waits_count = 0  # those no longer in `_waits` included
        self._held = False
        self._cancelled = False

    def keep_code(self, source: bytes) -> None:
        """Keeps the beginning of its code for viewers. It counts as memory, but never holds the guest back."""
        self.code = source[:_KEPT_CODE_BYTES]
        self._memory.charge(len(self.code))

    def _drop_code(self) -> None:
        self._memory.charge(-len(self.code))
        self.code = b""

    @property
    def result(self) -> Result | None:
        """The result; None if it has not ended."""
        kind = self._journal[-1].kind if self.done and self._journal else None
        return kind if isinstance(kind, Result) else None

    # -- writing -------------------------------------------------------------------------------------------------

    def publish(self, kind: EventKind, frame_bytes: int = 0) -> None:
        """Adds an event; events after the result are dropped.

        `frame_bytes`: the event's size in a segment. A hostile guest can make it far larger than the event's content,
        and a segment is kept as long as one of its events, so the larger size is charged.
        """
        if self.done:
            return
        event, size_bytes = Event(self.last_number + 1, kind), max(_content_bytes(kind), frame_bytes)
        self._append(event, size_bytes)
        if self._on_event is not None:
            self._on_event(self.execution_id, event, size_bytes)
        if isinstance(kind, ToolCall):
            self._open_calls[kind.call_id] = False
            if self.start_time_s is not None:
                self._call_begin_s[kind.call_id] = time.monotonic()
        elif isinstance(kind, Result):
            self._finish()
        self.trim()

    def report_to(self, on_event: OnEvent) -> None:
        """Calls `on_event` with each event: with those that are kept now, and with each new one."""
        for event, size_bytes in zip(self._journal, self._costs, strict=True):
            on_event(self.execution_id, event, size_bytes)
        self._on_event = on_event

    def trim(self) -> None:
        """Drops events down to the limit; stops the reading from the guest if that is not enough."""
        if self._is_full:
            taken = self._taken
            while self._journal and self._journal[0].number <= taken and self._is_full:
                self._drop_first()
        held = not self.done and not self._cancelled and self._is_full
        if held != self._held:
            self._held = held
            self._memory.set_waiting(self, held)
            self._owner.hold(self.execution_id, held)

    @property
    def _is_full(self) -> bool:
        return self.journal_size > self._journal_limit or self._memory.is_short_for(self.journal_size)

    def leave(self) -> None:
        """Stops counting, and no longer makes the guest wait for readers."""
        self._drop_code()
        super().leave()
        if self._held:
            self._held = False
            self._owner.hold(self.execution_id, False)

    def drop_read(self) -> None:
        """Drops all events but the last, unless a reader follows them, and the code."""
        super().drop_read()
        self._drop_code()

    def waits_after(self, count: int, number: int) -> tuple[int, list[tuple[str, float]]]:
        """Returns how many calls answered after the first `count` are forgotten, and the next ones with their waits.

        Omits those that were answered when the last event had a higher number than `number`.
        """
        first = self._waits_count - len(self._waits)
        start = max(count, first)
        new = islice(self._waits, start - first, None)
        return start - count, [(call_id, wait_s) for call_id, wait_s, last_number in new if last_number <= number]

    @property
    def waits_for_client(self) -> bool:
        """True when it can't go on until a client answers a tool call or reads its events."""
        return not self.done and (self._held or not all(self._open_calls.values()))

    # -- steering ------------------------------------------------------------------------------------------------

    def may_call(self, call_id: str) -> bool:
        """Returns True when the id of a tool call is new and not too many calls are open."""
        return call_id not in self._open_calls and len(self._open_calls) - len(self._answered) < _MAX_OPEN_CALLS

    def cancel(self) -> None:
        """Asks the guest to cancel it, once; no effect after its end."""
        if not self.done and not self._cancelled:
            self._owner.send(Cancel(id=self.execution_id), b"")
            self.note_cancelled()

    def note_cancelled(self) -> None:
        """Notes the cancellation. The guest must be able to report the end, so it is no longer held back."""
        self._cancelled = True
        self.trim()

    @property
    def has_room(self) -> bool:
        """True when one more event can be kept. False once one was discarded; a later event would leave a gap."""
        return not self.discarded_bytes and not (self._cancelled and self._is_full)

    def note_discarded(self, discarded_bytes: int) -> None:
        """Notes how many bytes were discarded so far."""
        self.discarded_bytes = discarded_bytes

    def note_stop(self, reason: str) -> None:
        """Notes why the daemon is about to cancel it; the result states the first reason."""
        self.stopped = self.stopped or reason[:_MAX_REASON_CHARS]

    def check_answer(self, call_id: str) -> None:
        """Raises NotFound, PreconditionFailed if no tool call waits for this answer."""
        answered = self._open_calls.get(call_id)
        if answered is None:
            raise NotFound(Reason.TOOL_CALL_NOT_FOUND, f"this execution has made no tool call {call_id!r}")
        if answered:
            raise PreconditionFailed(Reason.TOOL_CALL_ANSWERED, f"tool call {call_id!r} has been answered")
        if self.done:
            raise PreconditionFailed(Reason.EXECUTION_ENDED, "the execution has ended and needs no answer")

    def submit_tool_result(self, call_id: str, answer: Payload | ToolFailure) -> None:
        """Sends the answer to a tool call to the guest, once. Raises as `check_answer`."""
        self.check_answer(call_id)
        self.send_answer(call_id, answer)

    def send_answer(self, call_id: str, answer: Payload | ToolFailure) -> None:
        """Sends an answer to the guest, and notes it. Does not check that a call waits for it."""
        execution_id, size_bytes = self.execution_id, 0
        match answer:
            case ToolFailure():
                arguments = len(answer.arguments) or None
                failed = ToolResult(id=execution_id, call=call_id, ok=False, type=answer.type, arguments=arguments)
                self._owner.send(failed, answer.message.encode() + answer.arguments)
            case BlobRef():
                self._owner.send(ToolResult(id=execution_id, call=call_id, ok=True, blob=answer.blob_id), b"")
            case bytes():
                self._owner.send(ToolResult(id=execution_id, call=call_id, ok=True), answer)
                size_bytes = len(answer)
        self.note_answer(call_id, size_bytes)

    def note_answer(self, call_id: str, size_bytes: int = 0) -> None:
        """Notes that a call was answered, or never will be.

        In a segment the answer follows the last event and is kept as long, so its size is added to that event.
        """
        if self._costs:
            self._add_cost(size_bytes)
        self._open_calls[call_id] = True
        if (begin_s := self._call_begin_s.pop(call_id, None)) is not None:
            self._waits.append((call_id, time.monotonic() - begin_s, self.last_number))
            self._waits_count += 1
        self._answered.append(call_id)
        if len(self._answered) > _MAX_ANSWERED_CALLS:
            del self._open_calls[self._answered.popleft()]

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Returns its state without its events."""
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
            "network": None if self.network == NO_NETWORK_USE else vars(self.network),
        }

    def restore(self, snapshot: Fields) -> None:
        """Takes over a snapshot. Keeps those of its events that lead up to the snapshot without a gap."""
        self.stopped = snapshot.text("stopped", _MAX_REASON_CHARS)
        self._cancelled = snapshot.boolean("cancelled")
        self.discarded_bytes = snapshot.integer("discarded")
        used = snapshot.object("network")
        self.network = NO_NETWORK_USE if used is None else network_usage(used)
        last = snapshot.integer("last")
        first = snapshot.integer("first", 1, last + 1)
        if self.last_number != last:
            while self._journal:
                self._drop_first()
            self.last_number = last
        while self.first_number < first:
            self._drop_first()
        self._answered = deque(snapshot.texts("answered", _MAX_ANSWERED_CALLS))
        self._open_calls = {
            **dict.fromkeys(snapshot.texts("open", _MAX_OPEN_CALLS), False),
            **dict.fromkeys(self._answered, True),
        }
        if snapshot.boolean("done"):
            self._finish()
        self.trim()


def network_usage(fields: Fields) -> NetworkUsage:
    """Reads the use of the network from a record. Raises FrameError."""
    return NetworkUsage(**{name: fields.integer(name) for name in vars(NO_NETWORK_USE)})


def _content_bytes(kind: EventKind) -> int:
    """Returns the approximate memory of an event's content; a text may take four bytes per character."""
    match kind:
        case Log(text=text):
            return sys.getsizeof(text)
        case BlobChunk(data=data):
            return len(data)
        case Image(data=payload) | ToolCall(arguments=payload):
            return _payload_bytes(payload)
        case Result():
            if kind.error is None and not kind.artifacts:
                return _payload_bytes(kind.output)
            texts = [artifact.path for artifact in kind.artifacts]
            if kind.error is not None:
                texts += (kind.error.type, kind.error.message, kind.error.traceback, kind.error.statement)
            files_bytes = _FILE_OVERHEAD_BYTES * len(kind.artifacts)
            return _payload_bytes(kind.output) + sum(map(sys.getsizeof, texts)) + files_bytes
    return 0


def _payload_bytes(payload: Payload | None) -> int:
    return len(payload) if isinstance(payload, bytes) else 0
