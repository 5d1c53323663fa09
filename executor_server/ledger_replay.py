"""Reading the tape of a session: its records take effect once more, in the daemon that comes after a killed one.

The tape is our own, and still may be harmed: what does not follow from what was read before it is an error here, by the
checks that a live frame goes through.
"""

from __future__ import annotations

from executor_server.guest.frames import Fields, Frame, FrameError, Kind
from executor_server.guest_events import read_result
from executor_server.journal_records import snapshot_body
from executor_server.ledger_state import LedgerState
from executor_server.tape import SENT, Mark, Segment, Tape, TapeError


def replay(tape: Tape, state: LedgerState) -> None:
    """Raises TapeError when the tape can't be read to its end: then what was read so far has taken effect."""
    replaying = _Replay(state)
    state.replaying = True
    try:
        for segment in tape.read():
            replaying.read_segment(segment)
    except (ValueError, LookupError, RecursionError) as error:  # a FrameError is a ValueError
        raise TapeError(f"its journal is damaged: {error}") from error
    finally:
        state.replaying = False
        state.forget_old()


class _Replay:
    """What is known between two records and of no use later: verdicts of which the result is the next record."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self._verdicts: dict[str, int | None] = {}

    def read_segment(self, segment: Segment) -> None:
        for record in segment.records:
            if record.kind == Mark.SNAPSHOT:
                self._state.restore(snapshot_body(record))
                self._state.begin_segment(segment.number)
            else:
                self._read_record(record, segment.number)
        self._state.end_segment()

    def _read_record(self, record: Frame, segment: int) -> None:
        if record.kind in SENT:
            self._state.note_sent(record.seq, segment, (record.kind, record.head.values, record.body))
            self._read_sent(record.kind, record.head, record.body)
        elif record.kind == Mark.VERDICT:
            self._verdicts[record.head.text("id", 64)] = (
                record.head.integer("oom_kills") if "oom_kills" in record.head else None
            )
        elif record.kind == Mark.STOPPED:
            self._read_stop(record)
        elif record.kind == Mark.DISCARDED:
            execution = self._state.running[record.head.text("id", 64)]
            self._state.discard(record, execution, record.head.integer("bytes", 1))
        elif record.kind == Mark.LOST:
            self._state.lose(record.body.decode())
        elif record.kind == Mark.RESUMED:
            self._state.renumber(record.head.integer("taken"))
        else:
            self._read_event(record, segment)

    def _read_sent(self, kind: int, head: Fields, body: bytes) -> None:
        if kind == Kind.EXECUTE:
            self._verdicts.pop(head.text("id", 64), None)  # torn from its result, which was judged anew
            self._state.begin(head, body)
        elif kind == Kind.TOOL_RESULT:
            execution = self._state.executions.get(head.text("id", 64))
            if execution is not None:
                execution.note_answer(head.text("call", 64), len(body))
        elif kind == Kind.CANCEL:
            execution = self._state.running.get(head.text("id", 64))
            if execution is not None:
                execution.note_cancelled()

    def _read_stop(self, record: Frame) -> None:
        execution, reason = self._state.running[record.head.text("id", 64)], record.body.decode()
        if "call" in record.head:
            self._state.withhold(record, execution, record.head.text("call", 64), reason)
        else:
            execution.note_stop(reason)

    def _read_event(self, record: Frame, segment: int) -> None:
        execution_id = record.head.text("id", 64)
        if record.kind != Kind.RESULT or execution_id not in self._verdicts:
            self._state.take(record, *self._state.read(record), segment)
        elif execution_id in self._state.running:
            oom_kills = self._verdicts.pop(execution_id)
            self._state.judge(execution_id, read_result(record), oom_kills, len(record.raw))
        else:
            raise FrameError("a verdict on what does not run")
