"""The journal of one session: its executions, and the segments from which a later daemon recovers them.

Theory of operation. Each change of an execution is a record: one of our frames (it starts, answers, cancels or
restricts), a guest frame, or a finding of the daemon. A record is written before it takes effect, hence before the
guest's frame is acknowledged. `replay` reads the records and applies them by the same methods (state.py), so the next
daemon has the same events under the same numbers. The guest repeats frames that were not acknowledged.

The journal also has our frames that the guest had not received when the daemon died. They are sent again, numbered
after the last frame that the guest has taken. The record RESUMED holds that number, so that a further daemon can
distinguish the old numbers from the new ones.

A segment is removed when nothing in it is needed (state.py), so the segments are about as long as the events in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from executor_server.core import (
    ErrorDetail,
    EventKind,
    ExecutionLimits,
    InvalidRequest,
    NetworkUsage,
    Outcome,
    Reason,
    Result,
    StateRules,
    ToolCall,
)
from executor_server.guest.wire.frames import Frame, encode_frame
from executor_server.guest.wire.messages import Cancel, Execute
from executor_server.sessions.journal.execution import Execution, ExecutionOwner, ExecutionRequest, ToolFailure
from executor_server.sessions.journal.memory import TenantMemory
from executor_server.sessions.journal.records import SegmentError
from executor_server.sessions.journal.replay import replay
from executor_server.sessions.journal.segments import SENT, RecordKind, Segments
from executor_server.sessions.journal.sent_frames import Outgoing
from executor_server.sessions.journal.state import JournalState, fingerprint


class JournalOwner(ExecutionOwner, Protocol):
    """A session, as far as its journal uses it."""

    def refusal_of(self, execution_id: str, call: ToolCall) -> str | None:
        """Returns the reason why this tool call is withheld from clients; None if it is not."""
        ...

    def must_ask(self, call: ToolCall) -> bool:
        """True when a tool call needs an approval."""
        ...

    def on_held(self, execution_id: str, call: ToolCall) -> None:
        """Must ask for a held call, and then call `release` or `deny`."""
        ...

    def on_undecided(self, execution_id: str) -> None:
        """Must find out what the result lacks, and then call `decide`."""
        ...

    def on_event(self, execution_id: str, event: EventKind) -> None:
        """Notified of each event but the last."""
        ...


@dataclass(frozen=True)
class JournalLimits:
    """Bytes that the events of one execution, and of all finished ones, may take; and the count of finished ones."""

    journal_bytes: int
    max_finished_executions: int


class Journal:
    """Owns the segments of one session, and the state that they record; `state` is for reading."""

    def __init__(
        self,
        segments: Segments,
        limits: JournalLimits,
        owner: JournalOwner,
        generation: int = 1,
        *,
        has_network: bool = False,
        memory: TenantMemory | None = None,
    ) -> None:
        """`memory` is shared with other journals; None: unlimited."""
        self._segments = segments
        self._owner = owner
        self.state = JournalState(
            owner,
            limits.journal_bytes,
            limits.max_finished_executions,
            generation,
            has_network=has_network,
            memory=memory,
        )

    def begin_segments(self) -> None:
        """Begins the segments of a new session."""
        self._segments.create()
        self._begin_segment()

    def close(self) -> None:
        """Closes the segments, whose files stay, and drops the executions; their readers may finish.

        Executions and journal refer to each other; without this only the garbage collector would free the events.
        """
        self._segments.close()
        self.state.clear()

    # -- requests of clients --------------------------------------------------------------------------------------

    def known_as(self, request: ExecutionRequest) -> Execution | None:
        """Returns the execution that this id names already. Raises InvalidRequest if the request differs.

        Compares the requested limits, not the granted ones, which may be lower by now.
        """
        known = self.state.executions.get(request.execution_id)
        if known is not None and known.fingerprint != fingerprint(
            request.execution_id, request.mode.value, _asked(request), request.code.encode()
        ):
            raise InvalidRequest(
                Reason.EXECUTION_ID_REUSED,
                f"execution id {request.execution_id!r} names another execution of this session",
            )
        return known

    def execute(
        self, request: ExecutionRequest, limits: ExecutionLimits, policy: str, savepoints: StateRules | None = None
    ) -> Execution:
        """Starts an execution, with these limits and under the policy with this fingerprint.

        `savepoints` are the rules for the savepoint before it, or for its branch.
        """
        source = request.code.encode()
        execute = Execute(
            id=request.execution_id,
            mode=request.mode.value,
            asked=_asked(request),
            wall_time_s=limits.wall_time_s,
            cpu_time_s=limits.cpu_time_s,
            operations=limits.operations,
            output_bytes=limits.output_bytes,
            policy=policy,
            savepoints=savepoints.savepoints if savepoints is not None and request.savepoint else None,
            savepoint_file_bytes=savepoints.savepoint_file_bytes if savepoints is not None else None,
            branches=savepoints.branches if savepoints is not None and request.branch else None,
        )
        self._owner.send(execute, source)
        return self.state.begin(execute, source)

    def stop(self, execution_id: str, reason: str) -> None:
        """Cancels a running or queued execution; its result states the reason."""
        execution = self.state.running.get(execution_id)
        if execution is not None and not execution.stopped:
            self._write(encode_frame(RecordKind.STOPPED, {"id": execution_id}, reason.encode("utf-8", "replace")))
            execution.note_stop(reason)
            execution.cancel()

    def note_sent(self, kind: int, seq: int, prefix: bytes, body: bytes) -> None:
        """Records a frame that is about to leave."""
        if kind in SENT:
            self._write(prefix, body)
            self.state.sent.add(seq, self._segments.segment)

    def note_delivered(self, seq: int) -> None:
        """Notes that the guest has taken our frames up to this number."""
        self.state.sent.note_delivered(seq)

    # -- frames of the guest -------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Records and applies a frame about an execution. Raises FrameError before any change."""
        execution, event = self.state.read(frame)
        if isinstance(event, ToolCall) and self._owner.must_ask(event):
            self._hold(frame, execution, event)
            return
        if isinstance(event, ToolCall) and (refusal := self._owner.refusal_of(execution.execution_id, event)):
            self._withhold(frame, execution, event, refusal)
            return
        if isinstance(event, Result):
            self._note_discarded(execution)
        elif not execution.has_room:
            self._discard(frame, execution)
            return
        self._write(frame.raw)
        self.state.take(frame, execution, event, self._segments.segment)
        if execution.execution_id in self.state.undecided:
            self._owner.on_undecided(execution.execution_id)
        elif not isinstance(event, Result):
            self._owner.on_event(execution.execution_id, event)

    def _hold(self, frame: Frame, execution: Execution, call: ToolCall) -> None:
        self._write(encode_frame(RecordKind.HELD, {"id": execution.execution_id, "call": call.call_id}))
        self._segments.append(frame.raw)  # both records go into one segment
        self.state.hold(frame, execution, call, self._segments.segment)
        self._owner.on_held(execution.execution_id, call)

    def release(self, execution_id: str, call_id: str) -> None:
        """Publishes a held call: it was approved."""
        held = self.state.held[execution_id, call_id]
        self._write(encode_frame(RecordKind.RELEASED, {"id": execution_id, "call": call_id}))
        self._segments.append(held.raw)  # again, since the segment of HELD may be removed
        self.state.release(execution_id, call_id)
        self._owner.on_event(execution_id, held.call)

    def deny(self, execution_id: str, call_id: str, failure: ToolFailure) -> None:
        """Answers a held call with a failure; no client gets to see it."""
        del self.state.held[execution_id, call_id]
        self.state.running[execution_id].send_answer(call_id, failure)

    def _withhold(self, frame: Frame, execution: Execution, call: ToolCall, refusal: str) -> None:
        """Ends an execution instead of passing its tool call to a client.

        The record replaces the frame and has its number. The program is cancelled while it waits for the answer, so it
        can't catch a refusal and go on.
        """
        head = {"id": execution.execution_id, "call": call.call_id}
        self._write(encode_frame(RecordKind.STOPPED, head, refusal.encode("utf-8", "replace"), frame.seq, frame.ack))
        self.state.withhold(frame, execution, call.call_id, refusal)
        execution.cancel()

    def _discard(self, frame: Frame, execution: Execution) -> None:
        """Discards a frame of a cancelled execution for which there is no room.

        The first one is recorded at once, so that a replay knows that something is missing; the sum is recorded before
        the result.
        """
        is_first = not execution.discarded_bytes
        self.state.discard(frame, execution, execution.discarded_bytes + len(frame.raw))
        if is_first:
            self._note_discarded(execution)

    def _note_discarded(self, execution: Execution) -> None:
        if execution.discarded_bytes:
            head = {"id": execution.execution_id, "bytes": execution.discarded_bytes}
            self._write(encode_frame(RecordKind.DISCARDED, head, b"", self.state.taken_seq))

    # -- findings of the daemon ------------------------------------------------------------------------------------

    def note_network(self, execution_id: str, used: NetworkUsage) -> None:
        """Records what an execution that has not ended has used of the network so far."""
        execution = self.state.running.get(execution_id)
        if execution is not None and execution.network != used:
            self._write(encode_frame(RecordKind.NETWORK, {"id": execution_id, **vars(used)}))
            self.state.note_network(execution_id, used)

    def add_notice(self, execution_id: str, text: str) -> None:
        """Adds a line to the log of an execution that has not ended."""
        if execution_id in self.state.running:
            body = text.encode("utf-8", "replace")
            self._write(encode_frame(RecordKind.NOTICE, {"id": execution_id}, body))
            self.state.add_notice(execution_id, body.decode())

    def decide(self, execution_id: str, oom_kills: int | None) -> None:
        """Ends an undecided execution. `oom_kills`: the kernel's count of out-of-memory kills, for a suspect."""
        waiting = self.state.undecided.get(execution_id)
        if waiting is not None:
            counted = {} if oom_kills is None else {"oom_kills": oom_kills}
            # The result is written again, since its first segment may be removed. Both records go into one segment;
            # otherwise a removed segment could leave a result without its verdict.
            self._write(encode_frame(RecordKind.VERDICT, {"id": execution_id, **counted}))
            self._segments.append(waiting.raw)
            self.state.decide(execution_id, waiting.result, oom_kills, len(waiting.raw))

    def lose(self, reason: str) -> None:
        """Records that the session and its running executions are lost."""
        if self.state.lost is None:
            self._write(encode_frame(RecordKind.LOST, {}, reason.encode("utf-8", "replace")))
            self.state.lose(reason)
            self._segments.close()  # no record follows

    def end_all(self, outcome: Outcome, error: ErrorDetail) -> None:
        """Ends running executions without a record, for a session that no later daemon may recover."""
        self.state.end_all(outcome, error)

    # -- segments ------------------------------------------------------------------------------------------------

    def _write(self, first: bytes | memoryview, second: bytes = b"") -> None:
        """Writes one record. Begins a new segment first if needed, whose snapshot holds all earlier records."""
        if self._segments.full:
            self._begin_segment()
        self._segments.append(first, second)

    def _begin_segment(self) -> None:
        if self._segments.broken:
            return
        self.state.end_segment()
        self._segments.begin_segment(self.state.snapshot(), without=self.state.unneeded_segments())
        self.state.begin_segment(self._segments.segment)

    def replay(self) -> None:
        """Applies all records of the segments; new records are appended to them.

        Raises SegmentError at damage: the records before it have taken effect then, and no more will be written.
        """
        try:
            replay(self._segments, self.state)
        except SegmentError:
            self._segments.close()
            raise
        if self.state.lost is not None:
            self._segments.close()

    def resume(self, taken: int) -> list[Outgoing]:
        """Returns the frames to send first, again, to a guest that has taken our frames up to this number."""
        if self.state.sent.to_send_again():  # else no record is written, so a full disk costs no idle session
            self._write(encode_frame(RecordKind.RESUMED, {"taken": taken}))
            self.state.sent.renumber(taken)
        # The earlier daemon may have died between its STOPPED record and the frame. A second cancel is harmless.
        stopped = [execution_id for execution_id, execution in self.state.running.items() if execution.stopped]
        return [
            *self.state.sent.to_send_again(),
            *((Cancel(id=execution_id), b"") for execution_id in stopped),
        ]


def _asked(request: ExecutionRequest) -> dict[str, Any]:
    """Returns the limits that a client asked for; EXECUTE carries them next to the granted ones."""
    asked = {name: value for name, value in vars(request.limits).items() if value is not None}
    if request.savepoint:
        asked["savepoint"] = True
    if request.branch:
        asked["branch"] = True
    return asked
