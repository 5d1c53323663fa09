"""What the records of a tape have made of the executions of a session.

Theory of operation. What happens to executions happens here, by one method for each kind of record: `ledger.py` calls
it when it has written the record, `ledger_replay.py` when it has read it, and so both come to the same. Nothing here
writes, or knows where a record comes from, but for one thing: while records are read, nobody is told of an end, and an
old execution is not let go of when one ends, as there is more to read of what was kept.

A snapshot says what there was at the head of a segment but for the events, which are in the segments before it. Those
of them that nothing here needs any more are told by `unneeded_segments`.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from executor_server.executions import Execution, ExecutionControl
from executor_server.guest.frames import Fields, Frame, FrameError, Kind
from executor_server.guest_events import read_event, read_result
from executor_server.journal_room import UNSHARED, TenantRoom
from executor_server.model import (
    BlobRef,
    ErrorDetail,
    EventKind,
    Outcome,
    OutputCut,
    Queued,
    Result,
    ToolCall,
    VariablesState,
)
from executor_server.tape import TAKEN

Outgoing = tuple[int, dict[str, Any], bytes]
"""A frame of ours: its kind, head and body."""

_MAX_EXECUTIONS = 2**20


@dataclass(frozen=True)
class _OnItsWay:
    """A frame of ours that the guest may not have: its numbers, where it lies on the tape, itself if it was read."""

    ordinal: int  # among all that were ever written down
    seq: int  # by which the guest knows it
    segment: int
    frame: Outgoing | None


@dataclass(frozen=True)
class Suspect:
    """A result that waits for its verdict: what it says, its frame, and the segment that this lies in."""

    result: Result
    raw: bytes
    segment: int


@dataclass
class _Span:
    """A segment, and how many events each execution had at its start and at its end."""

    segment: int
    start: dict[str, int]
    end: dict[str, int]


class LedgerState:
    """Owns the executions of one session. `running` are those that have not ended, in order of arrival."""

    def __init__(
        self,
        control_of: Callable[[str], ExecutionControl],
        on_end: Callable[[str, Result], None],
        journal_bytes: int,
        max_finished_executions: int,
        generation: int,
    ) -> None:
        self._control_of = control_of
        self._on_end = on_end
        self._journal_bytes = journal_bytes
        self._max_finished_executions = max_finished_executions
        self.executions: dict[str, Execution] = {}
        self.running: dict[str, Execution] = {}
        self.finished: dict[str, Execution] = {}  # the oldest first
        self.finished_bytes = 0
        self.suspects: dict[str, Suspect] = {}
        self._on_their_way: deque[_OnItsWay] = deque()
        self._sent_count = 0
        self._spans: list[_Span] = []
        self.replaying = False
        self.generation = generation
        self.oom_kills = 0
        self.taken_seq = 0
        self.lost: str | None = None
        self._room: TenantRoom = UNSHARED

    def share_room(self, room: TenantRoom) -> None:
        """From here on the journals share room with those of other sessions."""
        self._room = room
        for execution in self.executions.values():
            execution.enter(room)

    def clear(self) -> None:
        """Lets go of the executions."""
        for execution in self.executions.values():
            execution.leave()
        self.executions.clear()
        self.finished.clear()

    # -- frames of ours ------------------------------------------------------------------------------------------

    def note_sent(self, seq: int, segment: int, frame: Outgoing | None = None) -> None:
        """A frame that is written down is on its way; itself, where it may be needed again."""
        self._on_their_way.append(_OnItsWay(self._sent_count, seq, segment, frame))
        self._sent_count += 1

    def note_delivered(self, seq: int) -> None:
        """The guest has taken what was sent, up to this number."""
        while self._on_their_way and self._on_their_way[0].seq <= seq:
            self._on_their_way.popleft()

    def renumber(self, taken: int) -> None:
        """What the guest had not taken is sent again under the numbers that follow."""
        self.note_delivered(taken)
        self._on_their_way = deque(
            replace(frame, seq=seq) for seq, frame in enumerate(self._on_their_way, start=taken + 1)
        )

    def to_send_again(self) -> list[Outgoing]:
        """What was read and is still on its way."""
        return [each.frame for each in self._on_their_way if each.frame is not None]

    def begin(self, head: Fields, source: bytes) -> Execution:
        """EXECUTE: an execution waits, or runs."""
        execution_id = head.text("id", 64)
        self._forget(execution_id)
        execution = self._add(execution_id, fingerprint(head, source), head.text("policy", 64))
        self.running[execution_id] = execution
        if len(self.running) > 1:
            execution.publish(Queued(len(self.running) - 1))
        return execution

    def _add(self, execution_id: str, its_fingerprint: bytes, policy: str) -> Execution:
        control = self._control_of(execution_id)
        control.room = self._room
        execution = Execution(execution_id, its_fingerprint, policy, self._journal_bytes, control)
        self.executions[execution_id] = execution
        return execution

    # -- frames of the guest's -----------------------------------------------------------------------------------

    def read(self, frame: Frame) -> tuple[Execution, EventKind]:
        """What a frame says, and of which execution. Raises FrameError, and has changed nothing in any case."""
        if frame.kind not in TAKEN:
            raise FrameError(f"frame kind {frame.kind} is not for a daemon")
        execution = self.running.get(frame.head.text("id", 64))
        if execution is None or execution.execution_id in self.suspects:
            raise FrameError("an event of an execution that does not run")
        if frame.kind != Kind.RESULT:
            event = read_event(frame)
            if isinstance(event, ToolCall) and not execution.may_call(event.call_id):
                raise FrameError(f"tool call {event.call_id} was made before, or one too many is open")
            return execution, event
        result = read_result(frame)
        frame.head.boolean("oom_suspect", default=False)
        if result.generation < self.generation:
            raise FrameError(f"generation {result.generation} after {self.generation}")
        return execution, result

    def take(self, frame: Frame, execution: Execution, event: EventKind, segment: int) -> None:
        """A frame as it was read: its event is published, or its result waits for a verdict."""
        self._arrived(frame)
        if not isinstance(event, Result):
            execution.publish(event, len(frame.raw))
            return
        self.generation = event.generation
        if frame.head.boolean("oom_suspect", default=False):
            # Only outside of the sandbox is it known who sent the kill.
            self.suspects[execution.execution_id] = Suspect(event, bytes(frame.raw), segment)
        else:
            self._end(execution, event, len(frame.raw))

    def withhold(self, frame: Frame, execution: Execution, call_id: str, reason: str) -> None:
        """A tool call that no client is told of: what stands in its place ends the execution."""
        self._arrived(frame)
        execution.note_answer(call_id)
        execution.note_stop(reason)

    def discard(self, frame: Frame, execution: Execution, discarded_bytes: int) -> None:
        """A frame of a cancelled execution that was not kept; so much was not, by now."""
        self._arrived(frame)
        execution.note_discarded(discarded_bytes)

    def _arrived(self, frame: Frame) -> None:
        self.taken_seq = frame.seq
        self.note_delivered(frame.ack)

    # -- ends ----------------------------------------------------------------------------------------------------

    def judge(self, execution_id: str, result: Result, oom_kills: int | None, frame_bytes: int) -> None:
        """VERDICT: a result is what it says, unless the kernel has killed for memory once more."""
        self.suspects.pop(execution_id, None)
        if oom_kills is not None and oom_kills > self.oom_kills:
            self.oom_kills = oom_kills
            detail = ErrorDetail("MemoryError", "the program used more memory than memory_bytes allows and was killed")
            result = replace(result, outcome=Outcome.OUT_OF_MEMORY, error=detail)
        self._end(self.running[execution_id], result, frame_bytes)

    def lose(self, reason: str) -> None:
        """LOST: the session is, and what runs with it."""
        self.lost = reason
        self.end_all(Outcome.LOST, ErrorDetail("SandboxLost", reason))

    def end_all(self, outcome: Outcome, error: ErrorDetail) -> None:
        """Ends what runs. A result that only waits for its verdict is better than none."""
        for execution_id, execution in list(self.running.items()):
            suspect = self.suspects.pop(execution_id, None)
            lost = Result(outcome, VariablesState.LOST, self.generation, error=error)
            self._end(execution, suspect.result if suspect is not None else lost)

    def _end(self, execution: Execution, result: Result, frame_bytes: int = 0) -> None:
        result = replace(result, policy_fingerprint=execution.policy_fingerprint)
        if result.outcome is Outcome.CANCELLED and execution.stopped:
            result = replace(result, error=ErrorDetail("Cancelled", execution.stopped))
        if execution.discarded_bytes:
            execution.publish(OutputCut(execution.discarded_bytes))
            result = _without_discarded_output(result)
        execution.publish(result, frame_bytes)
        del self.running[execution.execution_id]
        self._finish(execution)
        if not self.replaying:
            self.forget_old()
            self._on_end(execution.execution_id, result)

    def _finish(self, execution: Execution) -> None:
        self.finished[execution.execution_id] = execution
        self.finished_bytes += execution.journal_size

    def forget_old(self) -> None:
        """Lets go of the oldest finished journals, but for the last: so many there may be, so much they may hold."""
        if not self._must_forget():
            return
        if len(self.finished) <= self._max_finished_executions:
            # Readers have taken parts of them since they were counted, and those were let go.
            self.finished_bytes = sum(execution.journal_size for execution in self.finished.values())
        for execution_id in list(self.finished)[:-1]:
            if not self._must_forget():
                return
            self._forget(execution_id)

    def _must_forget(self) -> bool:
        many = len(self.finished) > self._max_finished_executions
        return many or self.finished_bytes > self._journal_bytes or self._room.is_short

    def _forget(self, execution_id: str) -> None:
        execution = self.executions.pop(execution_id, None)
        self.running.pop(execution_id, None)
        if execution is not None:
            if self.finished.pop(execution_id, None) is not None:
                self.finished_bytes -= execution.journal_size
            execution.leave()
        # Its id may come to name another one, whose events are counted from 1 again.
        for span in self._spans:
            span.start.pop(execution_id, None)
            span.end.pop(execution_id, None)

    # -- segments of the tape ------------------------------------------------------------------------------------

    def begin_segment(self, segment: int) -> None:
        """What happens from here on lies in this segment."""
        self._spans.append(_Span(segment, self._numbers(), {}))

    def end_segment(self) -> None:
        """Nothing more lies in the last one, if there is one."""
        if self._spans:
            self._spans[-1].end = self._numbers()

    def unneeded_segments(self) -> set[int]:
        """Those that ended, and of which no event is held, no frame on its way and no result unjudged; told once."""
        pinned = {frame.segment for frame in self._on_their_way}
        pinned |= {suspect.segment for suspect in self.suspects.values()}
        needed = [span for span in self._spans if span.segment in pinned or self._holds_events_of(span)]
        unneeded = {span.segment for span in self._spans} - {span.segment for span in needed}
        self._spans = needed
        return unneeded

    def _numbers(self) -> dict[str, int]:
        return {execution_id: execution.last_number for execution_id, execution in self.executions.items()}

    def _holds_events_of(self, span: _Span) -> bool:
        return any(
            last > span.start.get(execution_id, 0) and last >= self.executions[execution_id].first_number
            for execution_id, last in span.end.items()
        )

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """All that is known, but for the events."""
        executions = (*self.finished.values(), *self.running.values())
        known = {
            "taken": self.taken_seq,
            "generation": self.generation,
            "oom_kills": self.oom_kills,
            "sent": self._sent_count,
            "on_their_way": {frame.ordinal: frame.seq for frame in self._on_their_way},
            "unjudged": list(self.suspects),
            "executions": [execution.snapshot() for execution in executions],
        }
        return json.dumps(known, separators=(",", ":")).encode()

    def restore(self, snapshot: bytes) -> None:
        """Becomes as in a snapshot: of what was read before, what it does not mention had been settled by then."""
        values = json.loads(snapshot)
        if not isinstance(values, dict):
            raise FrameError("a snapshot that is not an object")
        known = Fields(values)
        self.taken_seq = known.integer("taken")
        self.generation = known.integer("generation", 1)
        self.oom_kills = known.integer("oom_kills")
        listed = {fields.text("id", 64): fields for fields in known.objects("executions", _MAX_EXECUTIONS)}
        for execution_id in [execution_id for execution_id in self.executions if execution_id not in listed]:
            self._forget(execution_id)
        self.running, self.finished, self.finished_bytes = {}, {}, 0
        for execution_id, fields in listed.items():
            execution = self._restored(execution_id, fields)
            if execution.done:
                self._finish(execution)
            else:
                self.running[execution_id] = execution
        unjudged = known.texts("unjudged", _MAX_EXECUTIONS)
        self.suspects = {name: suspect for name, suspect in self.suspects.items() if name in unjudged}
        self._restore_sent(known)

    def _restored(self, execution_id: str, fields: Fields) -> Execution:
        its_fingerprint = bytes.fromhex(fields.text("fingerprint", 64))
        execution = self.executions.get(execution_id)
        if execution is None or execution.fingerprint != its_fingerprint or execution.done > fields.boolean("done"):
            self._forget(execution_id)  # the id has come to name another one
            execution = self._add(execution_id, its_fingerprint, fields.text("policy", 64))
        execution.restore(fields)
        return execution

    def _restore_sent(self, known: Fields) -> None:
        self._sent_count = known.integer("sent")
        seqs = known.object("on_their_way")
        if seqs is None:
            raise FrameError("a snapshot that does not say what was on its way")
        there = [frame for frame in self._on_their_way if str(frame.ordinal) in seqs]
        self._on_their_way = deque(replace(frame, seq=seqs.integer(str(frame.ordinal))) for frame in there)


def _without_discarded_output(result: Result) -> Result:
    """An output that came in pieces, some of which were discarded, is none."""
    if not isinstance(result.output, BlobRef):
        return result
    error = ErrorDetail("Cancelled", "it was cancelled while its output was on its way, for which there was no room")
    return replace(result, outcome=Outcome.CANCELLED, output=None, error=error)


def fingerprint(head: Fields, source: bytes) -> bytes:
    """What tells an execution from another of the same id. JSON gives back each of these as it was."""
    asked = head.object("asked")
    if asked is None:
        raise FrameError("an execution that does not say what was asked for")
    said = (head.text("id", 64), head.text("mode"), sorted(asked.values.items()))
    return hashlib.sha256(source + repr(said).encode()).digest()
