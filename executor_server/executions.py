"""An execution and its journal.

An execution belongs to its session, not to the call that started it. Its events are numbered and kept; any number of
readers, one after the other or at once, follow them from any number on. The journal is bounded: once it holds more
than its limit, what every reader has is let go, and when nothing can be let go the guest is asked to wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from executor_server.errors import NotFound, OutOfRange, PreconditionFailed, Reason
from executor_server.model import BlobChunk, Event, EventKind, Image, Log, Payload, Result, ToolCall

_EVENT_OVERHEAD_BYTES = 256
# Of an execution, so that a second answer is told from one to no call; a program may make calls for hours.
_MAX_ANSWERED_CALLS = 4096


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
    ) -> None:
        self.cancel = cancel
        self.answer = answer
        self.hold = hold


class _Reader:
    """How far one reader has come."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.wakeup: asyncio.Future[None] | None = None


class Execution:
    """One run of code: its identity, its journal, its open tool calls."""

    def __init__(self, execution_id: str, fingerprint: bytes, journal_bytes: int, control: ExecutionControl) -> None:
        self.execution_id = execution_id
        self.fingerprint = fingerprint
        self.done = False
        self._control = control
        self._journal: deque[Event] = deque()
        self._journal_limit = journal_bytes
        self.journal_size = 0
        self._last_number = 0
        self._readers: set[_Reader] = set()
        self._open_calls: dict[str, bool] = {}  # call id → answered
        self._answered: deque[str] = deque()
        self._held = False
        self._finished = asyncio.Event()

    # -- writing -------------------------------------------------------------------------------------------------

    def publish(self, kind: EventKind) -> None:
        """Adds an event. After the result nothing is added any more: what comes late is dropped."""
        if self.done:
            return
        self._last_number += 1
        self._journal.append(Event(self._last_number, kind))
        self.journal_size += _cost(kind)
        if isinstance(kind, ToolCall):
            self._open_calls[kind.call_id] = False
        elif isinstance(kind, Result):
            self.done = True
            self._finished.set()
        for reader in self._readers:
            if reader.wakeup is not None and not reader.wakeup.done():
                reader.wakeup.set_result(None)
        self._trim()

    def _trim(self) -> None:
        """Keeps the journal within its limit; holds the guest back while it can't be."""
        if self.journal_size > self._journal_limit:
            taken = min((reader.position for reader in self._readers), default=0)
            while self._journal and self._journal[0].number <= taken and self.journal_size > self._journal_limit:
                self.journal_size -= _cost(self._journal.popleft().kind)
        held = self.journal_size > self._journal_limit and not self.done
        if held != self._held:
            self._held = held
            self._control.hold(held)

    # -- reading -------------------------------------------------------------------------------------------------

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """The events after a number, to the result. Raises OutOfRange when they are not there, any more or at all."""
        if after > self._last_number or (after < self._last_number and after + 1 < self._first_number):
            raise OutOfRange(
                Reason.EVENT_OUT_OF_RANGE,
                f"the journal of this execution holds events {self._first_number} to {self._last_number}",
            )
        reader = _Reader(after)
        self._readers.add(reader)
        try:
            while not (self.done and reader.position == self._last_number):
                if reader.position == self._last_number:
                    reader.wakeup = asyncio.get_running_loop().create_future()
                    await reader.wakeup
                event = self._journal[reader.position + 1 - self._first_number]
                yield event
                reader.position = event.number
                self._trim()
        finally:
            self._readers.discard(reader)

    @property
    def _first_number(self) -> int:
        return self._journal[0].number if self._journal else self._last_number + 1

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

    def cancel(self) -> None:
        """Asks for its end; nothing when it has ended."""
        if not self.done:
            self._control.cancel(self.execution_id)

    async def submit_tool_result(self, call_id: str, answer: Payload | ToolFailure) -> None:
        """Passes the answer of a tool call on. Raises NotFound, PreconditionFailed; an answer counts once."""
        answered = self._open_calls.get(call_id)
        if answered is None:
            raise NotFound(Reason.TOOL_CALL_NOT_FOUND, f"this execution has made no tool call {call_id!r}")
        if answered:
            raise PreconditionFailed(Reason.TOOL_CALL_ANSWERED, f"tool call {call_id!r} has been answered")
        if self.done:
            raise PreconditionFailed(Reason.EXECUTION_ENDED, "the execution has ended; nobody waits for this answer")
        self._control.answer(self.execution_id, call_id, answer)
        self._open_calls[call_id] = True
        self._answered.append(call_id)
        if len(self._answered) > _MAX_ANSWERED_CALLS:
            del self._open_calls[self._answered.popleft()]


def _cost(kind: EventKind) -> int:
    """About how many bytes an event holds."""
    match kind:
        case Log(text=text):
            return _EVENT_OVERHEAD_BYTES + len(text)
        case BlobChunk(data=data):
            return _EVENT_OVERHEAD_BYTES + len(data)
        case Image(data=payload) | ToolCall(arguments=payload) | Result(output=payload) if isinstance(payload, bytes):
            return _EVENT_OVERHEAD_BYTES + len(payload)
    return _EVENT_OVERHEAD_BYTES
