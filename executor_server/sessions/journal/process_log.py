"""A process: its numbered events, its readers, and the output that its guest may still send.

Flow control is by grants. The guest may send output up to the granted cost; beyond it, the process blocks in its own
write, while other processes and executions go on. The grant is the received output plus the room for events. Events
that all readers have are dropped to make room. Without readers, nothing is dropped for UNREAD_TIME_S, so that a client
that lost its connection finds everything. Then the oldest events are dropped, since a server that prints and has no
reader would block otherwise.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from executor_server.core import (
    ExecutorError,
    OutOfRange,
    ProcessEvent,
    ProcessEventKind,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    Reason,
)
from executor_server.guest.wire.frames import Fields, FrameError
from executor_server.guest.wire.process_messages import OUTPUT_OVERHEAD_BYTES, TAIL_BYTES
from executor_server.sessions.journal.event_log import EVENT_OVERHEAD_BYTES, EventLog
from executor_server.sessions.journal.memory import TenantMemory

PROCESS_JOURNAL_BYTES = 8 * 1024 * 1024
"""Bytes of events that are kept of one process."""
UNREAD_TIME_S = 30.0
"""Seconds without a reader after which the oldest events make room for newer ones."""

# The room that must be free before more is granted; otherwise each frame would cause a grant message.
_GRANT_STEP_BYTES = PROCESS_JOURNAL_BYTES // 4
# Bytes of a command that are kept: all processes of a session fit into one answer, and into one record.
_KEPT_ARGUMENTS_BYTES = 4096

assert EVENT_OVERHEAD_BYTES <= OUTPUT_OVERHEAD_BYTES, "an event costs more than its frame was granted for"


@dataclass(frozen=True)
class ProcessDescription:
    """The facts of a process that outlive the call that started it; without the values of environment variables."""

    process_id: str
    argv: tuple[str, ...]  # the beginning of a long one
    cwd: str
    env_names: tuple[str, ...]
    has_pty: bool
    has_stdin: bool
    timeout_s: float | None
    fingerprint: str
    start_time_s: float  # Unix time


def described(request: ProcessRequest) -> ProcessDescription:
    """Returns the description of a process that is about to start."""
    return ProcessDescription(
        process_id=request.process_id,
        argv=_beginning_of(request.argv),
        cwd=request.cwd,
        env_names=tuple(sorted(request.env)),
        has_pty=request.pty is not None,
        has_stdin=request.stdin or request.pty is not None,
        timeout_s=request.timeout_s,
        fingerprint=fingerprint_of(request),
        start_time_s=time.time(),
    )


def _beginning_of(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the arguments, or the first ones with a note about the rest."""
    kept: list[str] = []
    room_bytes = _KEPT_ARGUMENTS_BYTES
    for index, argument in enumerate(argv):
        data = argument.encode()
        if len(data) + 1 > room_bytes:
            omitted_bytes = sum(len(each.encode()) + 1 for each in argv[index:]) - room_bytes
            note = f"[{omitted_bytes} bytes left out]"
            return (*kept, data[:room_bytes].decode(errors="ignore"), note)
        kept.append(argument)
        room_bytes -= len(data) + 1
    return tuple(kept)


def fingerprint_of(request: ProcessRequest) -> str:
    """Returns a digest that distinguishes requests of one id.

    It covers the values of environment variables, which can't be recovered from it unless they are easy to guess. It
    does not cover the size of the terminal, which changes.
    """
    values = [
        request.process_id,
        list(request.argv),
        request.cwd,
        sorted(request.env.items()),
        request.pty is not None,
        request.stdin,
        request.timeout_s,
        request.prefers_bash,
        request.merge_stderr,
    ]
    return hashlib.sha256(json.dumps(values).encode("utf-8", "surrogatepass")).hexdigest()


class ProcessOwner(Protocol):
    """The journal of processes, as far as one process uses it."""

    def grant(self, process_id: str, granted_bytes: int) -> None:
        """Sets the cost of the output that the guest may send, counted from the start of the process."""
        ...


class ProcessLog(EventLog[ProcessEvent]):
    """One process of a session."""

    def __init__(
        self,
        description: ProcessDescription,
        owner: ProcessOwner,
        memory: TenantMemory | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(memory)
        self.description = description
        self.process_id = description.process_id
        self.pid = 0  # 0 until the guest has started it
        self.result: ProcessResult | None = None
        self.written_bytes = 0  # by clients of this daemon
        self.granted_bytes = PROCESS_JOURNAL_BYTES
        self.refusal: ExecutorError | None = None  # the reason why it was never started
        self._owner = owner
        self._now_s = now_s
        self.received_bytes = 0  # cost of the output so far
        self.output_bytes = 0  # bytes in all events, dropped ones included
        self._dropped_bytes = 0
        self._read_number = 0  # the last event that any reader got; `read_bytes` is the output up to it
        self.read_bytes = 0
        self.end_was_read = False  # a reader has read past the last event
        self._unread_since_s = now_s()
        self._was_killed = False
        self._short = False

    # -- writing -------------------------------------------------------------------------------------------------

    def check(self, kind: ProcessEventKind) -> None:
        """Raises FrameError for an event that a correct guest would not send."""
        if self.done:
            raise FrameError("an event of a process that has ended")
        if isinstance(kind, ProcessStarted) == bool(self.pid):
            raise FrameError("a process that was started twice, or printed before its start")
        cost_bytes = self.received_bytes + _cost_of(kind)
        if isinstance(kind, ProcessOutput) and cost_bytes > self.granted_bytes + TAIL_BYTES:
            raise FrameError("more output of a process than was granted")

    def publish(self, kind: ProcessEventKind, frame_bytes: int = 0) -> None:
        """Adds an event; see `Execution.publish` for `frame_bytes`."""
        event = ProcessEvent(self.last_number + 1, kind)
        self._append(event, max(_size_of(kind), frame_bytes - OUTPUT_OVERHEAD_BYTES + EVENT_OVERHEAD_BYTES, 0))
        match kind:
            case ProcessStarted():
                self.pid = kind.pid
            case ProcessOutput():
                self.received_bytes += _cost_of(kind)
                self.output_bytes += len(kind.data)
            case ProcessOutputCut():
                self.output_bytes += kind.omitted_bytes
            case ProcessResult():
                self.result = kind
                self._finish()
        self.trim()

    def refuse(self, error: ExecutorError) -> None:
        """Ends it without events, since the guest could not start it."""
        self.refusal = error
        self._finish()

    def note_kill(self) -> None:
        """Notes that it is being killed. Its last output makes room for its end without waiting for a reader.

        Otherwise a killed process whose caller has left would count as running for UNREAD_TIME_S.
        """
        self._was_killed = True
        self.trim()

    def trim(self) -> None:
        """Drops events to make room, and grants the guest the room."""
        droppable = self.last_number if self._is_unread else self._taken
        while self._journal and self._journal[0].number <= droppable and self._is_full and not self._holds_result_only:
            self._drop_first()
        if not self.done:
            self._grant()

    def _grant(self) -> None:
        pinned_bytes = 0 if self._is_unread else self._pinned_bytes
        short = self._memory.is_short_for(self.journal_size) and pinned_bytes > 0
        if short != self._short:
            self._short = short
            self._memory.set_waiting(self, short)
        room_bytes = 0 if short else max(0, PROCESS_JOURNAL_BYTES - pinned_bytes)
        granted_bytes = self.received_bytes + room_bytes
        if granted_bytes >= self.granted_bytes + _GRANT_STEP_BYTES:
            self.granted_bytes = granted_bytes
            self._owner.grant(self.process_id, granted_bytes)

    def _drop_first(self) -> None:
        self._dropped_bytes += _output_of(self._journal[0].kind)
        super()._drop_first()

    @property
    def _is_full(self) -> bool:
        return self.journal_size > PROCESS_JOURNAL_BYTES or self._memory.is_short_for(self.journal_size)

    @property
    def _holds_result_only(self) -> bool:
        return self.done and len(self._journal) == 1

    @property
    def _is_unread(self) -> bool:
        is_old = self._now_s() >= self._unread_since_s + UNREAD_TIME_S
        return not self._readers and (is_old or self._was_killed)

    @property
    def _pinned_bytes(self) -> int:
        """Bytes of the events that some reader lacks; of all events without readers."""
        if not self._readers:
            return self.journal_size
        return self._total_bytes - min(reader.taken_bytes for reader in self._readers)

    # -- reading -------------------------------------------------------------------------------------------------

    async def events_with_gap(self, after: int) -> AsyncGenerator[ProcessEvent, None]:
        """Yields the events after a number; dropped ones are replaced by one event with the number of missing bytes.

        Raises OutOfRange for a number after the last event.
        """
        if after > self.last_number:
            raise OutOfRange(Reason.EVENT_OUT_OF_RANGE, f"the last event of this process is {self.last_number}")
        first, gap = self.first_number, None
        if after + 1 < first:
            missing_bytes = self._dropped_bytes - (min(self.read_bytes, self._dropped_bytes) if after else 0)
            after = first - 1
            gap = ProcessEvent(after, ProcessOutputCut(missing_bytes))
        async for event in self.events(after, gap):
            if event is not gap and event.number > self._read_number:
                self._read_number = event.number
                self.read_bytes += _output_of(event.kind)
            yield event
        self.end_was_read = True

    def _on_reader_left(self) -> None:
        if not self._readers:
            self._unread_since_s = self._now_s()
            if self._was_killed:
                self.trim()

    # -- after another daemon ------------------------------------------------------------------------------------

    def expect_granted(self) -> None:
        """Assumes the largest grant that an earlier daemon can have given, since grants are not recorded."""
        self.granted_bytes = max(self.granted_bytes, self.received_bytes + PROCESS_JOURNAL_BYTES)

    def grant_again(self) -> None:
        """Repeats the grant: an earlier daemon's last message may have been lost."""
        if not self.done:
            self._owner.grant(self.process_id, self.granted_bytes)

    def snapshot(self) -> dict[str, Any]:
        """Returns its state without its events."""
        return {
            "what": vars(self.description),
            "pid": self.pid,
            "first": self.first_number,
            "last": self.last_number,
            "done": self.done,
            "received": self.received_bytes,
            "granted": self.granted_bytes,
            "output": self.output_bytes,
            "read": self.read_bytes,
        }

    def restore(self, snapshot: Fields) -> None:
        """Takes over the numbers of a snapshot; keeps the events that lead up to it without a gap.

        Reading after the snapshot is not recorded, so a gap may count read bytes as missing. Raises FrameError.
        """
        self.pid = snapshot.integer("pid")
        self.received_bytes = snapshot.integer("received")
        self.granted_bytes = max(snapshot.integer("granted"), self.granted_bytes)
        first = snapshot.integer("first", 1)
        last = snapshot.integer("last", first - 1)
        if self.last_number != last:
            while self._journal:
                self._drop_first()
            self.last_number = last
        while self._journal and self.first_number < first:
            self._drop_first()
        self.output_bytes = snapshot.integer("output")
        self._dropped_bytes = max(0, self.output_bytes - sum(_output_of(event.kind) for event in self._journal))
        self.read_bytes = min(snapshot.integer("read"), self.output_bytes)
        if snapshot.boolean("done") and not self.done:
            raise FrameError("the end of a process is missing")


def _cost_of(kind: ProcessEventKind) -> int:
    return len(kind.data) + OUTPUT_OVERHEAD_BYTES if isinstance(kind, ProcessOutput) else 0


def _size_of(kind: ProcessEventKind) -> int:
    return len(kind.data) if isinstance(kind, ProcessOutput) else 0


def _output_of(kind: ProcessEventKind) -> int:
    match kind:
        case ProcessOutput():
            return len(kind.data)
        case ProcessOutputCut():
            return kind.omitted_bytes
    return 0
