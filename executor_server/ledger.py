"""The executions of a session: which run, which are kept, and the tape by which a later daemon knows them again.

Theory of operation. All that happens to the executions of a session is a record: a frame of ours that starts one,
answers or cancels it, or holds those that follow to other rules; a frame of the guest's about one; a finding of the
daemon's own. A record is written to the tape
before it takes effect, hence also before the guest is told that its frame has arrived. `replay` reads the records and
lets them take effect by the same methods, so the later daemon has the same events under the same numbers; what it has
not read, the guest has not been told the arrival of, and sends again.

What of ours the guest had not received when the daemon died is on the tape too, and is sent again, under new numbers:
those that follow the last one the guest has taken. RESUMED says which that was, so that one more daemon can tell the
numbers before from those after.

The tape is as long as what is held in memory, about: a segment of which no event is held any more, no frame is on its
way and no result waits for a verdict, is removed.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from executor_server.errors import InvalidRequest, Reason
from executor_server.executions import Execution, ExecutionControl, ExecutionRequest, ToolFailure
from executor_server.guest.frames import Fields, Frame, FrameError, Kind, encode_frame
from executor_server.guest_events import read_event, read_result
from executor_server.model import (
    BlobRef,
    ErrorDetail,
    EventKind,
    ExecutionLimits,
    Outcome,
    Payload,
    Queued,
    Result,
    ToolCall,
    VariablesState,
)
from executor_server.tape import SENT, TAKEN, Mark, Segment, Tape, TapeError

_MAX_EXECUTIONS = 2**20


@dataclass(frozen=True)
class LedgerControl:
    """What the ledger asks of its session."""

    send: Callable[[int, dict[str, Any], bytes], None]
    hold: Callable[[object, bool], None]
    judge: Callable[[str], None]  # find out what killed the interpreter, then call `judge`
    refuses: Callable[[str, ToolCall], str | None]  # why a client must not be told of a call
    on_event: Callable[[str, EventKind], None]  # an event that is not the last
    on_end: Callable[[str, Result], None]


@dataclass(frozen=True)
class LedgerLimits:
    """How much is kept: events of one execution and of all that have ended, and how many of these."""

    journal_bytes: int
    max_finished_executions: int


@dataclass(frozen=True)
class _OnItsWay:
    """A frame of ours that the guest may not have: its numbers, where it lies on the tape, itself while replaying."""

    ordinal: int  # among all that were ever written down
    seq: int  # by which the guest knows it
    segment: int
    kind: int = 0
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class _Suspect:
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


class Ledger:
    """Owns the executions of one session. `running` are those that have not ended, in order of arrival."""

    def __init__(self, tape: Tape, limits: LedgerLimits, control: LedgerControl, generation: int = 1) -> None:
        self._tape = tape
        self._limits = limits
        self._control = control
        self._executions: dict[str, Execution] = {}
        self.running: dict[str, Execution] = {}
        self._finished: dict[str, Execution] = {}  # the oldest first
        self._finished_bytes = 0
        self._suspects: dict[str, _Suspect] = {}
        self._verdicts: dict[str, int | None] = {}  # replaying: read, and the result that they are on is next
        self._on_their_way: deque[_OnItsWay] = deque()
        self._sent_count = 0
        self._spans: list[_Span] = []
        self._live = True  # and not replaying
        self.generation = generation
        self.oom_kills = 0
        self.taken_seq = 0
        """The number of the last frame of the guest's that is on the tape."""
        self.lost: str | None = None
        """Why the session is lost, when the tape says that it is."""

    def begin_tape(self) -> None:
        """Begins the tape of a new session."""
        self._tape.create()
        self._begin_segment()

    def close(self) -> None:
        """Lets go of the tape, which stays as it is, and of the executions: the last to be told may still read them.

        They know us and we know them, so the collector would come for all that they hold only when it is large.
        """
        self._tape.close()
        self._executions.clear()
        self._finished.clear()

    # -- what clients ask ----------------------------------------------------------------------------------------

    def known(self, execution_id: str) -> Execution | None:
        return self._executions.get(execution_id)

    def known_as(self, request: ExecutionRequest) -> Execution | None:
        """The execution that this id names already. Raises InvalidRequest when that one is of other code.

        What was asked for is compared, and not what was granted: that may be less by now.
        """
        known = self._executions.get(request.execution_id)
        if known is not None and known.fingerprint != _fingerprint(Fields(_asked(request)), request.code.encode()):
            raise InvalidRequest(
                Reason.EXECUTION_ID_REUSED,
                f"execution id {request.execution_id!r} names another execution of this session",
            )
        return known

    def execute(self, request: ExecutionRequest, limits: ExecutionLimits, policy: str) -> Execution:
        """Starts an execution, with these limits and under the policy of this fingerprint."""
        head, source = {**_asked(request), **vars(limits), "policy": policy}, request.code.encode()
        self._control.send(Kind.EXECUTE, head, source)
        return self._begin(Fields(head), source)

    def _begin(self, head: Fields, source: bytes) -> Execution:
        execution_id = head.text("id", 64)
        self._forget(execution_id)
        execution = self._add(execution_id, _fingerprint(head, source), head.text("policy", 64))
        self.running[execution_id] = execution
        if len(self.running) > 1:
            execution.publish(Queued(len(self.running) - 1))
        return execution

    def _add(self, execution_id: str, fingerprint: bytes, policy: str) -> Execution:
        control = ExecutionControl(
            cancel=lambda execution_id: self._control.send(Kind.CANCEL, {"id": execution_id}, b""),
            answer=self._answer,
            hold=lambda held: self._control.hold(execution_id, held),
        )
        execution = Execution(execution_id, fingerprint, policy, self._limits.journal_bytes, control)
        self._executions[execution_id] = execution
        return execution

    def stop(self, execution_id: str, reason: str) -> None:
        """Cancels what runs or waits; its result says why."""
        execution = self.running.get(execution_id)
        if execution is not None and not execution.stopped:
            self._write(encode_frame(Mark.STOPPED, {"id": execution_id}, reason.encode("utf-8", "replace")))
            execution.note_stop(reason)
            execution.cancel()

    def _answer(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        head: dict[str, Any] = {"id": execution_id, "call": call_id}
        match answer:
            case ToolFailure():
                self._control.send(
                    Kind.TOOL_RESULT, {**head, "ok": False, "type": answer.type}, answer.message.encode()
                )
            case BlobRef():
                self._control.send(Kind.TOOL_RESULT, {**head, "ok": True, "blob": answer.blob_id}, b"")
            case bytes():
                self._control.send(Kind.TOOL_RESULT, {**head, "ok": True}, answer)

    def note_sent(self, kind: int, seq: int, prefix: bytes, body: bytes) -> None:
        """A frame is about to leave."""
        if kind in SENT:
            self._write(prefix, body)
            self._on_their_way.append(_OnItsWay(self._sent_count, seq, self._tape.segment))
            self._sent_count += 1

    def note_delivered(self, seq: int) -> None:
        """The guest has taken what was sent, up to this number."""
        while self._on_their_way and self._on_their_way[0].seq <= seq:
            self._on_their_way.popleft()

    # -- what the guest says -------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """A frame about an execution. Raises FrameError, and has changed nothing then."""
        execution, event = self._read(frame)
        if isinstance(event, ToolCall) and (refusal := self._control.refuses(execution.execution_id, event)):
            self._withhold(frame, execution, event, refusal)
            return
        self._write(frame.raw)
        self._apply(frame, execution, event)
        if execution.execution_id in self._suspects:
            self._control.judge(execution.execution_id)
        elif not isinstance(event, Result):
            self._control.on_event(execution.execution_id, event)

    def _withhold(self, frame: Frame, execution: Execution, call: ToolCall, refusal: str) -> None:
        """Ends an execution, instead of telling a client of the call that it makes.

        What is written has the frame's number and takes its place. The program is not answered: it is cancelled while
        it waits, so that it can't go on without the answer.
        """
        head = {"id": execution.execution_id, "call": call.call_id}
        self._write(encode_frame(Mark.STOPPED, head, refusal.encode("utf-8", "replace"), frame.seq, frame.ack))
        self._apply_withheld(frame, execution, call.call_id, refusal)
        execution.cancel()

    def _apply_withheld(self, frame: Frame, execution: Execution, call_id: str, reason: str) -> None:
        self.taken_seq = frame.seq
        self.note_delivered(frame.ack)
        execution.note_answer(call_id)
        execution.note_stop(reason)

    def _read(self, frame: Frame) -> tuple[Execution, EventKind]:
        if frame.kind not in TAKEN:
            raise FrameError(f"frame kind {frame.kind} is not for a daemon")
        execution = self.running.get(frame.head.text("id", 64))
        if execution is None or execution.execution_id in self._suspects:
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

    def _apply(self, frame: Frame, execution: Execution, event: EventKind) -> None:
        self.taken_seq = frame.seq
        self.note_delivered(frame.ack)
        if not isinstance(event, Result):
            execution.publish(event, len(frame.raw))
            return
        self.generation = event.generation
        if frame.head.boolean("oom_suspect", default=False):
            # Only outside of the sandbox is it known who sent the kill.
            self._suspects[execution.execution_id] = _Suspect(event, bytes(frame.raw), self._tape.segment)
        else:
            self._end(execution, event, len(frame.raw))

    def judge(self, execution_id: str, oom_kills: int | None) -> None:
        """Ends an execution whose interpreter was killed, now that the kernel's kills for memory have been counted."""
        suspect = self._suspects.get(execution_id)
        if suspect is not None:
            counted = {} if oom_kills is None else {"oom_kills": oom_kills}
            # With the result once more: this is where it becomes an event, and its first segment may be removed.
            self._write(encode_frame(Mark.VERDICT, {"id": execution_id, **counted}), suspect.raw)
            self._judge(execution_id, suspect.result, oom_kills, len(suspect.raw))

    def _judge(self, execution_id: str, result: Result, oom_kills: int | None, frame_bytes: int) -> None:
        self._suspects.pop(execution_id, None)
        if oom_kills is not None and oom_kills > self.oom_kills:
            self.oom_kills = oom_kills
            detail = ErrorDetail("MemoryError", "the program used more memory than memory_bytes allows and was killed")
            result = replace(result, outcome=Outcome.OUT_OF_MEMORY, error=detail)
        self._end(self.running[execution_id], result, frame_bytes)

    # -- ends ----------------------------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """The session is lost: so is what runs."""
        if self.lost is None:
            self._write(encode_frame(Mark.LOST, {}, reason.encode("utf-8", "replace")))
            self._lose(reason)
            self._tape.close()  # nothing happens any more

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.end_all(Outcome.LOST, ErrorDetail("SandboxLost", reason))

    def end_all(self, outcome: Outcome, error: ErrorDetail) -> None:
        """Ends what runs. A result that only waits for its verdict is better than none."""
        for execution_id, execution in list(self.running.items()):
            suspect = self._suspects.pop(execution_id, None)
            lost = Result(outcome, VariablesState.LOST, self.generation, error=error)
            self._end(execution, suspect.result if suspect is not None else lost)

    def _end(self, execution: Execution, result: Result, frame_bytes: int = 0) -> None:
        result = replace(result, policy_fingerprint=execution.policy_fingerprint)
        if result.outcome is Outcome.CANCELLED and execution.stopped:
            result = replace(result, error=ErrorDetail("Cancelled", execution.stopped))
        execution.publish(result, frame_bytes)
        del self.running[execution.execution_id]
        self._finished[execution.execution_id] = execution
        self._finished_bytes += execution.journal_size
        if self._live:  # else there is more to read of what was kept
            self._forget_old()
            self._control.on_end(execution.execution_id, result)

    def _forget_old(self) -> None:
        """Lets go of the oldest finished journals, but for the last: so many there may be, so much they may hold."""
        for execution_id in list(self._finished)[:-1]:
            limits = self._limits
            few = len(self._finished) <= limits.max_finished_executions
            if few and self._finished_bytes <= limits.journal_bytes:
                return
            self._forget(execution_id)

    def _forget(self, execution_id: str) -> None:
        execution = self._executions.pop(execution_id, None)
        self.running.pop(execution_id, None)
        if execution is not None:
            execution.hold_nobody()
            if self._finished.pop(execution_id, None) is not None:
                self._finished_bytes -= execution.journal_size
        # Its id may come to name another one, whose events are counted from 1 again.
        for span in self._spans:
            span.start.pop(execution_id, None)
            span.end.pop(execution_id, None)

    # -- the tape ------------------------------------------------------------------------------------------------

    def _write(self, first: bytes | memoryview, second: bytes = b"") -> None:
        """One record. A new segment begins before it and not after, when what is known is what has taken effect."""
        if self._tape.full:
            self._begin_segment()
        self._tape.append(first, second)

    def _begin_segment(self) -> None:
        if self._tape.broken:
            return
        numbers = self._numbers()
        if self._spans:
            self._spans[-1].end = dict(numbers)
        self._tape.begin_segment(self._snapshot())
        self._drop_segments()
        self._spans.append(_Span(self._tape.segment, numbers, {}))

    def _numbers(self) -> dict[str, int]:
        return {execution_id: execution.last_number for execution_id, execution in self._executions.items()}

    def _drop_segments(self) -> None:
        """Removes all segments before this one that nothing needs."""
        pinned = {frame.segment for frame in self._on_their_way}
        pinned |= {suspect.segment for suspect in self._suspects.values()}
        needed = [span for span in self._spans if span.segment in pinned or self._holds_events_of(span)]
        self._tape.drop({span.segment for span in self._spans} - {span.segment for span in needed})
        self._spans = needed

    def _holds_events_of(self, span: _Span) -> bool:
        return any(
            last > span.start.get(execution_id, 0) and last >= self._executions[execution_id].first_number
            for execution_id, last in span.end.items()
        )

    def _snapshot(self) -> bytes:
        executions = (*self._finished.values(), *self.running.values())
        known = {
            "taken": self.taken_seq,
            "generation": self.generation,
            "oom_kills": self.oom_kills,
            "sent": self._sent_count,
            "on_their_way": {frame.ordinal: frame.seq for frame in self._on_their_way},
            "unjudged": self.unjudged(),
            "executions": [execution.snapshot() for execution in executions],
        }
        return json.dumps(known, separators=(",", ":")).encode()

    # -- reading the tape ----------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Lets all that is on the tape take effect, and goes on writing where it ends.

        Raises TapeError when it can't be read to its end: then what was read so far has taken effect, and nothing more
        will be written.
        """
        self._live = False
        try:
            for segment in self._tape.read():
                self._replay_segment(segment)
        except (ValueError, LookupError, RecursionError) as error:  # a FrameError is a ValueError
            self._tape.close()
            raise TapeError(f"its journal is damaged: {error}") from error
        except TapeError:
            self._tape.close()
            raise
        finally:
            self._live = True
            self._forget_old()
            if self.lost is not None:
                self._tape.close()

    def _replay_segment(self, segment: Segment) -> None:
        for record in segment.records:
            if record.kind == Mark.SNAPSHOT:
                self._restore(record.body)
                self._spans.append(_Span(segment.number, self._numbers(), {}))
            else:
                self._replay_record(record, segment.number)
        self._spans[-1].end = self._numbers()

    def _replay_record(self, record: Frame, segment: int) -> None:
        head = record.head
        if record.kind in SENT:
            frame = _OnItsWay(self._sent_count, record.seq, segment, record.kind, head.values, record.body)
            self._on_their_way.append(frame)
            self._sent_count += 1
            if record.kind == Kind.EXECUTE:
                self._verdicts.pop(head.text("id", 64), None)  # torn from its result, which was judged anew
                self._begin(head, record.body)
            elif record.kind == Kind.TOOL_RESULT and (execution := self.known(head.text("id", 64))) is not None:
                execution.note_answer(head.text("call", 64), len(record.body))
        elif record.kind == Mark.VERDICT:
            self._verdicts[head.text("id", 64)] = head.integer("oom_kills") if "oom_kills" in head else None
        elif record.kind == Mark.STOPPED:
            execution, reason = self.running[head.text("id", 64)], record.body.decode()
            if "call" in head:
                self._apply_withheld(record, execution, head.text("call", 64), reason)
            else:
                execution.note_stop(reason)
        elif record.kind == Mark.LOST:
            self._lose(record.body.decode())
        elif record.kind == Mark.RESUMED:
            self._renumber(head.integer("taken"))
        else:
            self._replay_event(record)

    def _replay_event(self, record: Frame) -> None:
        execution_id = record.head.text("id", 64)
        if record.kind != Kind.RESULT or execution_id not in self._verdicts:
            self._apply(record, *self._read(record))
        elif execution_id in self.running:
            self._judge(execution_id, read_result(record), self._verdicts.pop(execution_id), len(record.raw))
        else:
            raise FrameError("a verdict on what does not run")

    def _restore(self, snapshot: bytes) -> None:
        """Becomes as in a snapshot: of what was read before, what it does not mention had been settled by then."""
        values = json.loads(snapshot)
        if not isinstance(values, dict):
            raise FrameError("a snapshot that is not an object")
        known = Fields(values)
        self.taken_seq = known.integer("taken")
        self.generation = known.integer("generation", 1)
        self.oom_kills = known.integer("oom_kills")
        listed = {fields.text("id", 64): fields for fields in known.objects("executions", _MAX_EXECUTIONS)}
        for execution_id in [execution_id for execution_id in self._executions if execution_id not in listed]:
            self._forget(execution_id)
        self.running, self._finished, self._finished_bytes = {}, {}, 0
        for execution_id, fields in listed.items():
            execution = self._restored(execution_id, fields)
            if execution.done:
                self._finished[execution_id] = execution
                self._finished_bytes += execution.journal_size
            else:
                self.running[execution_id] = execution
        unjudged = known.texts("unjudged", _MAX_EXECUTIONS)
        self._suspects = {name: suspect for name, suspect in self._suspects.items() if name in unjudged}
        self._restore_sent(known)

    def _restore_sent(self, known: Fields) -> None:
        self._sent_count = known.integer("sent")
        seqs = known.object("on_their_way")
        if seqs is None:
            raise FrameError("a snapshot that does not say what was on its way")
        there = [frame for frame in self._on_their_way if str(frame.ordinal) in seqs]
        self._on_their_way = deque(replace(frame, seq=seqs.integer(str(frame.ordinal))) for frame in there)

    def _restored(self, execution_id: str, fields: Fields) -> Execution:
        fingerprint = bytes.fromhex(fields.text("fingerprint", 64))
        execution = self.known(execution_id)
        if execution is None or execution.fingerprint != fingerprint or execution.done > fields.boolean("done"):
            self._forget(execution_id)  # the id has come to name another one
            execution = self._add(execution_id, fingerprint, fields.text("policy", 64))
        execution.restore(fields)
        return execution

    def _renumber(self, taken: int) -> None:
        """What the guest had not taken was sent again under the numbers that follow."""
        self.note_delivered(taken)
        self._on_their_way = deque(
            replace(frame, seq=seq) for seq, frame in enumerate(self._on_their_way, start=taken + 1)
        )

    def resume(self, taken: int) -> list[tuple[int, dict[str, Any], bytes]]:
        """What is to be sent again, before all else, to a guest that has taken our frames up to this number."""
        self._write(encode_frame(Mark.RESUMED, {"taken": taken}))
        self._renumber(taken)
        # Killed at that moment, the earlier daemon may not have cancelled what it had stopped. Twice does no harm.
        stopped = [execution_id for execution_id, execution in self.running.items() if execution.stopped]
        return [
            *((frame.kind, frame.head, frame.body) for frame in self._on_their_way),
            *((int(Kind.CANCEL), {"id": execution_id}, b"") for execution_id in stopped),
        ]

    def unjudged(self) -> list[str]:
        """Executions whose result still waits for its verdict."""
        return list(self._suspects)


def _asked(request: ExecutionRequest) -> dict[str, Any]:
    """What a client asks for, as the head of the frame says it beside what is granted."""
    limits = {name: value for name, value in vars(request.limits).items() if value is not None}
    return {"id": request.execution_id, "mode": request.mode.value, "asked": limits}


def _fingerprint(head: Fields, source: bytes) -> bytes:
    """What tells an execution from another of the same id. JSON gives back each of these as it was."""
    asked = head.object("asked")
    if asked is None:
        raise FrameError("an execution that does not say what was asked for")
    said = (head.text("id", 64), head.text("mode"), sorted(asked.values.items()))
    return hashlib.sha256(source + repr(said).encode()).digest()
