"""The executions of a session: which run, which are kept, and the tape by which a later daemon knows them again.

Theory of operation. All that happens to the executions of a session is a record: a frame of ours that starts one,
answers or cancels it, or holds those that follow to other rules; a frame of the guest's about one; a finding of the
daemon's own. A record is written to the tape before it takes effect, hence also before the guest is told that its frame
has arrived. `replay` reads the records and lets them take effect by the same methods, those of `ledger_state.py`, so
the later daemon has the same events under the same numbers; what it has not read, the guest has not been told the
arrival of, and sends again.

What of ours the guest had not received when the daemon died is on the tape too, and is sent again, under new numbers:
those that follow the last one the guest has taken. RESUMED says which that was, so that one more daemon can tell the
numbers before from those after.

The tape is as long as what is held in memory, about: a segment of which no event is held any more, no frame is on its
way and no result waits for a verdict, is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_server.errors import InvalidRequest, Reason
from executor_server.executions import Execution, ExecutionControl, ExecutionRequest, ToolFailure
from executor_server.guest.frames import Fields, Frame, Kind, encode_frame
from executor_server.journal_room import TenantRoom
from executor_server.ledger_replay import replay
from executor_server.ledger_state import LedgerState, Outgoing, fingerprint
from executor_server.model import (
    BlobRef,
    ErrorDetail,
    EventKind,
    ExecutionLimits,
    Outcome,
    Payload,
    Result,
    ToolCall,
)
from executor_server.tape import SENT, Mark, Tape, TapeError


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


class Ledger:
    """Owns the tape of one session, and the state that it is the record of."""

    def __init__(self, tape: Tape, limits: LedgerLimits, control: LedgerControl, generation: int = 1) -> None:
        self._tape = tape
        self._control = control
        self._state = LedgerState(
            self._control_of, control.on_end, limits.journal_bytes, limits.max_finished_executions, generation
        )

    def _control_of(self, execution_id: str) -> ExecutionControl:
        return ExecutionControl(
            cancel=lambda execution_id: self._control.send(Kind.CANCEL, {"id": execution_id}, b""),
            answer=self._answer,
            hold=lambda held: self._control.hold(execution_id, held),
        )

    def share_room(self, room: TenantRoom) -> None:
        """From here on the journals share room with those of other sessions."""
        self._state.share_room(room)

    def begin_tape(self) -> None:
        """Begins the tape of a new session."""
        self._tape.create()
        self._begin_segment()

    def close(self) -> None:
        """Lets go of the tape, which stays as it is, and of the executions: the last to be told may still read them.

        They know us and we know them, so the collector would come for all that they hold only when it is large.
        """
        self._tape.close()
        self._state.clear()

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def running(self) -> dict[str, Execution]:
        """Those that have not ended, in order of arrival."""
        return self._state.running

    @property
    def generation(self) -> int:
        return self._state.generation

    @property
    def oom_kills(self) -> int:
        return self._state.oom_kills

    @property
    def taken_seq(self) -> int:
        """The number of the last frame of the guest's that is on the tape."""
        return self._state.taken_seq

    @property
    def lost(self) -> str | None:
        """Why the session is lost, when the tape says that it is."""
        return self._state.lost

    def known(self, execution_id: str) -> Execution | None:
        return self._state.executions.get(execution_id)

    def unjudged(self) -> list[str]:
        """Executions whose result still waits for its verdict."""
        return list(self._state.suspects)

    # -- what clients ask ----------------------------------------------------------------------------------------

    def known_as(self, request: ExecutionRequest) -> Execution | None:
        """The execution that this id names already. Raises InvalidRequest when that one is of other code.

        What was asked for is compared, and not what was granted: that may be less by now.
        """
        known = self.known(request.execution_id)
        if known is not None and known.fingerprint != fingerprint(Fields(_asked(request)), request.code.encode()):
            raise InvalidRequest(
                Reason.EXECUTION_ID_REUSED,
                f"execution id {request.execution_id!r} names another execution of this session",
            )
        return known

    def execute(self, request: ExecutionRequest, limits: ExecutionLimits, policy: str) -> Execution:
        """Starts an execution, with these limits and under the policy of this fingerprint."""
        head, source = {**_asked(request), **vars(limits), "policy": policy}, request.code.encode()
        self._control.send(Kind.EXECUTE, head, source)
        return self._state.begin(Fields(head), source)

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
            self._state.note_sent(seq, self._tape.segment)

    def note_delivered(self, seq: int) -> None:
        """The guest has taken what was sent, up to this number."""
        self._state.note_delivered(seq)

    # -- what the guest says -------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """A frame about an execution. Raises FrameError, and has changed nothing then."""
        execution, event = self._state.read(frame)
        if isinstance(event, ToolCall) and (refusal := self._control.refuses(execution.execution_id, event)):
            self._withhold(frame, execution, event, refusal)
            return
        if isinstance(event, Result):
            self._note_discarded(execution)
        elif not execution.has_room:
            self._discard(frame, execution)
            return
        self._write(frame.raw)
        self._state.take(frame, execution, event, self._tape.segment)
        if execution.execution_id in self._state.suspects:
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
        self._state.withhold(frame, execution, call.call_id, refusal)
        execution.cancel()

    def _discard(self, frame: Frame, execution: Execution) -> None:
        """Takes a frame of a cancelled execution for which there is no room, and keeps nothing of it.

        Of the first one it is written at once that something is missing, of all of them before the result how much.
        """
        is_first = not execution.discarded_bytes
        self._state.discard(frame, execution, execution.discarded_bytes + len(frame.raw))
        if is_first:
            self._note_discarded(execution)

    def _note_discarded(self, execution: Execution) -> None:
        if execution.discarded_bytes:
            head = {"id": execution.execution_id, "bytes": execution.discarded_bytes}
            self._write(encode_frame(Mark.DISCARDED, head, b"", self.taken_seq))

    # -- what the daemon finds -----------------------------------------------------------------------------------

    def judge(self, execution_id: str, oom_kills: int | None) -> None:
        """Ends an execution whose interpreter was killed, now that the kernel's kills for memory have been counted."""
        suspect = self._state.suspects.get(execution_id)
        if suspect is not None:
            counted = {} if oom_kills is None else {"oom_kills": oom_kills}
            # With the result once more: this is where it becomes an event, and its first segment may be removed.
            # Both in one segment, or the verdict could be removed before the result.
            self._write(encode_frame(Mark.VERDICT, {"id": execution_id, **counted}))
            self._tape.append(suspect.raw)
            self._state.judge(execution_id, suspect.result, oom_kills, len(suspect.raw))

    def lose(self, reason: str) -> None:
        """The session is lost: so is what runs."""
        if self.lost is None:
            self._write(encode_frame(Mark.LOST, {}, reason.encode("utf-8", "replace")))
            self._state.lose(reason)
            self._tape.close()  # nothing happens any more

    def end_all(self, outcome: Outcome, error: ErrorDetail) -> None:
        """Ends what runs, of a session that no later daemon is to know."""
        self._state.end_all(outcome, error)

    # -- the tape ------------------------------------------------------------------------------------------------

    def _write(self, first: bytes | memoryview, second: bytes = b"") -> None:
        """One record. A new segment begins before it and not after, when what is known is what has taken effect."""
        if self._tape.full:
            self._begin_segment()
        self._tape.append(first, second)

    def _begin_segment(self) -> None:
        if self._tape.broken:
            return
        self._state.end_segment()
        self._tape.begin_segment(self._state.snapshot(), without=self._state.unneeded_segments())
        self._state.begin_segment(self._tape.segment)

    def replay(self) -> None:
        """Lets all that is on the tape take effect, and goes on writing where it ends.

        Raises TapeError when it can't be read to its end: then what was read so far has taken effect, and nothing more
        will be written.
        """
        try:
            replay(self._tape, self._state)
        except TapeError:
            self._tape.close()
            raise
        if self.lost is not None:
            self._tape.close()

    def resume(self, taken: int) -> list[Outgoing]:
        """What is to be sent again, before all else, to a guest that has taken our frames up to this number."""
        if self._state.to_send_again():  # else there is nothing to number anew, and a full disk costs no idle session
            self._write(encode_frame(Mark.RESUMED, {"taken": taken}))
            self._state.renumber(taken)
        # Killed at that moment, the earlier daemon may not have cancelled what it had stopped. Twice does no harm.
        stopped = [execution_id for execution_id, execution in self.running.items() if execution.stopped]
        return [
            *self._state.to_send_again(),
            *((int(Kind.CANCEL), {"id": execution_id}, b"") for execution_id in stopped),
        ]


def _asked(request: ExecutionRequest) -> dict[str, Any]:
    """What a client asks for, as the head of the frame says it beside what is granted."""
    limits = {name: value for name, value in vars(request.limits).items() if value is not None}
    return {"id": request.execution_id, "mode": request.mode.value, "asked": limits}
