"""The state of a session's executions, which the records of its journal determine.

Theory of operation. There is one method for each kind of record. `journal.py` calls it after it has written the record,
`replay.py` after it has read the record. Nothing here writes or depends on the origin of a record, with one exception:
during a replay (`replaying`), the owner is not notified of ends, and old executions are not dropped, because later
records may refer to them.

Invariants for recovery:

1. Written before effective. A record is in the segments before its method runs, and the method runs before the guest's
   frame is acknowledged. So whenever the daemon is killed, the segments are never behind what anyone saw: all that a
   client has read is written, and the guest repeats what is not written.
2. Same records, same state. The methods are deterministic functions of the state and the record. Whether a frame is
   discarded for lack of memory, or withheld by the policy, does not follow from these, so `journal.py` decides it and
   replaces the frame by a record of its own kind (DISCARDED, STOPPED). Drops from memory alone (of finished executions,
   of events that were read) are not recorded; a later daemon may keep more of these, up to its limits.
3. Checked before changed. `read` raises before any change, so a refused frame of a hostile guest leaves no trace.

The guest is hostile. `read` accepts frames of a running execution only, so a guest can neither append to a finished
result nor invent an execution. A result must have the current or a later generation. A second result is refused, and
so is an event after a result that waits for its verdict. A tool call needs an id that is new to the execution;
otherwise an answer could go to another call than the one the client saw.

Held calls. The policy may require an approval for a tool call. Such a call is not an event yet: it stays in `held`
until it is released to clients, or answered with a failure. A restarted daemon asks again for the calls still held.

Verdicts. Some results wait in `undecided`, since a part of them is determined outside the sandbox. The guest can't
tell whether the kernel killed an interpreter for lack of memory or code faked such a crash. So the result waits until
the daemon has read the kernel's counter of out-of-memory kills. The VERDICT record has that number, since the counter
changes. In a sandbox with a network (`has_network`, fixed for its life) each result waits until the egress proxy has
reported all it did; NETWORK records have an execution's usage so far.

Segments and snapshots. The snapshot at the start of each segment has the whole state except the events, which stay in
earlier segments. spans.py notes how many events each execution had at the start and the end of each segment. From that,
`unneeded_segments` finds those that may be removed: they hold no kept event, no undelivered frame, no held call, and no
result that waits for a verdict. After a replay it must return the same as in the daemon that wrote the segments, so
spans are rebuilt by the same calls (`begin_segment`, `end_segment`).

Race: an execution id may be reused after the old execution was dropped. Its events start at 1 again, and the old spans
would pin or free the wrong segments. So `_forget` removes the id from all spans.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from executor_server.backends.channel import read_event, read_result
from executor_server.core import (
    BlobRef,
    ErrorDetail,
    EventKind,
    Log,
    NetworkUsage,
    Outcome,
    OutputCut,
    Queued,
    Result,
    ToolCall,
    VariablesState,
)
from executor_server.guest.wire.frames import Fields, Frame, FrameError
from executor_server.guest.wire.messages import Execute
from executor_server.guest.wire.messages import Result as ResultMessage
from executor_server.guest.wire.schema import message_of
from executor_server.sessions.journal.execution import Execution, ExecutionOwner
from executor_server.sessions.journal.memory import TenantMemory, unlimited
from executor_server.sessions.journal.segments import TAKEN
from executor_server.sessions.journal.sent_frames import SentFrames
from executor_server.sessions.journal.spans import SegmentSpans

_MAX_EXECUTIONS = 2**20

CallKey = tuple[str, str]
"""The ids of an execution and of a tool call of it."""


@dataclass(frozen=True)
class Held:
    """A tool call that waits for an approval, with its frame and the frame's segment."""

    call: ToolCall
    raw: bytes
    segment: int


@dataclass(frozen=True)
class Undecided:
    """A result that waits for its verdict, with its frame and the frame's segment."""

    result: Result
    raw: bytes
    segment: int
    is_suspect: bool  # the kernel may have killed the interpreter for its memory


class JournalState:
    """Owns the executions of one session. `running` has those that have not ended, in order of arrival."""

    def __init__(
        self,
        owner: ExecutionOwner,
        journal_bytes: int,
        max_finished_executions: int,
        generation: int,
        *,
        has_network: bool = False,
        memory: TenantMemory | None = None,
    ) -> None:
        self._owner = owner
        self._has_network = has_network
        self._journal_bytes = journal_bytes
        self._max_finished_executions = max_finished_executions
        self.executions: dict[str, Execution] = {}
        self.running: dict[str, Execution] = {}
        self.finished: dict[str, Execution] = {}  # the oldest first
        self.undecided: dict[str, Undecided] = {}
        self.held: dict[CallKey, Held] = {}
        self.sent = SentFrames()
        self._spans = SegmentSpans()
        self.replaying = False
        self.generation = generation
        self.oom_kills = 0
        self.taken_seq = 0
        self.lost: str | None = None
        self._memory = memory or unlimited()
        self._added = 0  # executions so far, in this daemon

    def clear(self) -> None:
        """Drops all executions."""
        for execution in self.executions.values():
            execution.leave()
        self.executions.clear()
        self.finished.clear()

    def begin(self, execute: Execute, source: bytes) -> Execution:
        """EXECUTE: adds an execution, which runs or is queued."""
        execution_id = execute.id
        if execution_id in self.executions:
            self._forget(execution_id)
        execution = self._add(
            execution_id, fingerprint(execution_id, execute.mode, execute.asked, source), execute.policy
        )
        execution.code_bytes = len(source)
        self.running[execution_id] = execution
        if len(self.running) > 1:
            execution.publish(Queued(len(self.running) - 1))
        return execution

    def _add(self, execution_id: str, its_fingerprint: bytes, policy: str) -> Execution:
        self._added += 1
        execution = Execution(execution_id, its_fingerprint, policy, self._journal_bytes, self._owner, self._memory)
        execution.number = self._added
        self.executions[execution_id] = execution
        return execution

    # -- frames of the guest -------------------------------------------------------------------------------------

    def read(self, frame: Frame) -> tuple[Execution, EventKind]:
        """Returns a frame's execution and event; changes nothing. Raises FrameError."""
        if frame.kind not in TAKEN:
            raise FrameError(f"frame kind {frame.kind} is not for a daemon")
        execution = self.running.get(frame.head.text("id", 64))
        if execution is None or execution.execution_id in self.undecided:
            raise FrameError("an event of an execution that does not run")
        if frame.kind != ResultMessage.kind:
            event = read_event(frame)
            if isinstance(event, ToolCall) and not self._may_call(execution, event.call_id):
                raise FrameError(f"tool call {event.call_id} was made before, or one too many is open")
            return execution, event
        result = read_result(frame, execution.policy_fingerprint)
        if result.generation < self.generation:
            raise FrameError(f"generation {result.generation} after {self.generation}")
        return execution, result

    def _may_call(self, execution: Execution, call_id: str) -> bool:
        return execution.may_call(call_id) and (execution.execution_id, call_id) not in self.held

    def take(self, frame: Frame, execution: Execution, event: EventKind, segment: int) -> None:
        """Publishes the event of a frame that was read; an undecided result waits for its verdict."""
        self._arrived(frame)
        if not isinstance(event, Result):
            execution.publish(event, len(frame.raw))
            return
        self.generation = event.generation
        message = message_of(frame)
        is_suspect = isinstance(message, ResultMessage) and message.oom_suspect
        if is_suspect or self._has_network:
            self.undecided[execution.execution_id] = Undecided(event, bytes(frame.raw), segment, is_suspect)
        else:
            self._end(execution, event, len(frame.raw))

    def withhold(self, frame: Frame, execution: Execution, call_id: str, reason: str) -> None:
        """STOPPED with a call: notes a withheld tool call; the execution ends instead."""
        self._arrived(frame)
        execution.note_answer(call_id)
        execution.note_stop(reason)

    def hold(self, frame: Frame, execution: Execution, call: ToolCall, segment: int) -> None:
        """HELD: keeps a tool call from clients until it is released or answered."""
        self._arrived(frame)
        self.held[execution.execution_id, call.call_id] = Held(call, bytes(frame.raw), segment)

    def release(self, execution_id: str, call_id: str) -> None:
        """RELEASED: publishes a held call."""
        held = self.held.pop((execution_id, call_id))
        self.running[execution_id].publish(held.call, len(held.raw))

    def discard(self, frame: Frame, execution: Execution, discarded_bytes: int) -> None:
        """DISCARDED: notes how many bytes of a cancelled execution were discarded so far."""
        self._arrived(frame)
        execution.note_discarded(discarded_bytes)

    def note_network(self, execution_id: str, used: NetworkUsage) -> None:
        """NETWORK: notes an execution's network usage so far."""
        self.running[execution_id].network = used

    def add_notice(self, execution_id: str, text: str) -> None:
        """NOTICE: adds a line of the daemon to the log of an execution, even if its result waits for a verdict."""
        self.running[execution_id].publish(Log("stderr", text))

    def _arrived(self, frame: Frame) -> None:
        self.taken_seq = frame.seq
        self.sent.note_delivered(frame.ack)

    # -- ends ----------------------------------------------------------------------------------------------------

    def decide(self, execution_id: str, result: Result, oom_kills: int | None, frame_bytes: int) -> None:
        """VERDICT: ends an undecided execution; OUT_OF_MEMORY if the kernel's count of such kills has risen."""
        self.undecided.pop(execution_id, None)
        if oom_kills is not None and oom_kills > self.oom_kills:
            self.oom_kills = oom_kills
            detail = ErrorDetail("MemoryError", "the program used more memory than memory_bytes allows and was killed")
            result = replace(result, outcome=Outcome.OUT_OF_MEMORY, error=detail)
        self._end(self.running[execution_id], result, frame_bytes)

    def lose(self, reason: str) -> None:
        """LOST: loses the session and its running executions."""
        self.lost = reason
        self.end_all(Outcome.LOST, ErrorDetail("SandboxLost", reason))

    def end_all(self, outcome: Outcome, error: ErrorDetail) -> None:
        """Ends running executions. An undecided result is kept without its verdict."""
        for execution_id, execution in list(self.running.items()):
            waiting = self.undecided.pop(execution_id, None)
            lost = Result(outcome, VariablesState.LOST, self.generation, error=error)
            self._end(execution, waiting.result if waiting is not None else lost)

    def _end(self, execution: Execution, result: Result, frame_bytes: int = 0) -> None:
        policy, network = execution.policy_fingerprint, execution.network
        if result.policy_fingerprint != policy or result.network is not network:
            result = replace(result, policy_fingerprint=policy, network=network)
        if result.outcome is Outcome.CANCELLED and execution.stopped:
            result = replace(result, error=ErrorDetail("Cancelled", execution.stopped))
        if execution.discarded_bytes:
            execution.publish(OutputCut(execution.discarded_bytes))
            result = _without_discarded_output(result)
        execution.publish(result, frame_bytes)
        del self.running[execution.execution_id]
        self._drop_held(execution.execution_id)
        self.finished[execution.execution_id] = execution
        if not self.replaying:
            self.forget_old()
            self._owner.on_end(execution.execution_id, result)

    def forget_old(self) -> None:
        """Drops the oldest finished executions when they are too many or too large; never the last one."""
        # Counted anew: readers may have taken events since the ends, which were dropped.
        kept_bytes = sum(execution.journal_size for execution in self.finished.values())
        while len(self.finished) > 1 and (
            len(self.finished) > self._max_finished_executions
            or kept_bytes > self._journal_bytes
            or self._memory.is_short
        ):
            oldest = next(iter(self.finished.values()))
            kept_bytes -= oldest.journal_size
            self._forget(oldest.execution_id)

    def _forget(self, execution_id: str) -> None:
        execution = self.executions.pop(execution_id, None)
        self.running.pop(execution_id, None)
        if execution is not None:
            self.finished.pop(execution_id, None)
            execution.leave()
        self._drop_held(execution_id)
        self._spans.forget(execution_id)

    def _drop_held(self, execution_id: str) -> None:
        for key in [key for key in self.held if key[0] == execution_id]:
            del self.held[key]

    # -- segments ------------------------------------------------------------------------------------------------

    def begin_segment(self, segment: int) -> None:
        """Begins the span of a segment, for the records that follow."""
        self._spans.begin(segment, self.executions)

    def end_segment(self) -> None:
        """Ends the span of the last segment, if there is one."""
        self._spans.end(self.executions)

    def unneeded_segments(self) -> set[int]:
        """Returns, once each, the ended segments that nothing needs (see the theory of operation)."""
        waiting = {each.segment for each in self.undecided.values()} | {each.segment for each in self.held.values()}
        pinned = self.sent.segments | waiting
        return self._spans.drop_unneeded(pinned, self.executions)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Encodes the state without the events."""
        executions = (*self.finished.values(), *self.running.values())
        known = {
            "taken": self.taken_seq,
            "generation": self.generation,
            "oom_kills": self.oom_kills,
            **self.sent.snapshot(),
            "unjudged": list(self.undecided),
            "held": [each for key in self.held for each in key],
            "executions": [execution.snapshot() for execution in executions],
        }
        return json.dumps(known, separators=(",", ":")).encode()

    def restore(self, snapshot: bytes) -> None:
        """Takes over a snapshot; executions that it does not mention had been dropped."""
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
        self.running, self.finished = {}, {}
        for execution_id, fields in listed.items():
            execution = self._restored(execution_id, fields)
            (self.finished if execution.done else self.running)[execution_id] = execution
        undecided = known.texts("unjudged", _MAX_EXECUTIONS)
        self.undecided = {name: result for name, result in self.undecided.items() if name in undecided}
        held = known.texts("held", 2 * _MAX_EXECUTIONS) if "held" in known else []
        kept = set(zip(held[::2], held[1::2], strict=True))
        self.held = {key: call for key, call in self.held.items() if key in kept}
        self.sent.restore(known)

    def _restored(self, execution_id: str, fields: Fields) -> Execution:
        its_fingerprint = bytes.fromhex(fields.text("fingerprint", 64))
        execution = self.executions.get(execution_id)
        if execution is None or execution.fingerprint != its_fingerprint or execution.done > fields.boolean("done"):
            self._forget(execution_id)  # the id was reused
            execution = self._add(execution_id, its_fingerprint, fields.text("policy", 64))
        execution.restore(fields)
        return execution


def _without_discarded_output(result: Result) -> Result:
    """Removes an output whose blob is incomplete because pieces were discarded."""
    if not isinstance(result.output, BlobRef):
        return result
    error = ErrorDetail("Cancelled", "it was cancelled while its output was sent, and there was no room for the rest")
    return replace(result, outcome=Outcome.CANCELLED, output=None, error=error)


def fingerprint(execution_id: str, mode: str, asked: dict[str, Any], source: bytes) -> bytes:
    """Returns a digest that distinguishes executions of one id; made of values that JSON preserves exactly."""
    values = (execution_id, mode, sorted(asked.items()))
    return hashlib.sha256(source + repr(values).encode()).digest()
