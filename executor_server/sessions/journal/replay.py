"""Replays the journal of a session, so that its records take effect in the next daemon.

The segments are the daemon's own files, but may be damaged. So each record passes the same checks as a live frame; a
record that does not follow from those before it is an error.
"""

from __future__ import annotations

from executor_server.backends.channel import read_result
from executor_server.core import ToolCall as CallEvent
from executor_server.guest.wire.frames import Frame, FrameError
from executor_server.guest.wire.messages import Cancel, Execute, Result, ToolCall, ToolResult
from executor_server.guest.wire.schema import Message, message_of
from executor_server.sessions.journal.execution import network_usage
from executor_server.sessions.journal.records import SegmentError, snapshot_body
from executor_server.sessions.journal.segments import SENT, RecordKind, Segment, Segments
from executor_server.sessions.journal.state import CallKey, JournalState


def replay(segments: Segments, state: JournalState) -> None:
    """Replays all segments. Raises SegmentError at damage; the records before it have taken effect then."""
    replaying = _Replay(state)
    state.replaying = True
    try:
        for segment in segments.read():
            replaying.read_segment(segment)
    except (ValueError, LookupError, RecursionError) as error:  # a FrameError is a ValueError
        raise SegmentError(f"its journal is damaged: {error}") from error
    finally:
        state.replaying = False
        state.forget_old()


class _Replay:
    """Keeps records for the one that follows them: verdicts for their result, HELD and RELEASED for their tool call."""

    def __init__(self, state: JournalState) -> None:
        self._state = state
        self._verdicts: dict[str, int | None] = {}
        self._calls: dict[CallKey, int] = {}  # HELD or RELEASED

    def read_segment(self, segment: Segment) -> None:
        for record in segment.records:
            if record.kind == RecordKind.SNAPSHOT:
                self._state.restore(snapshot_body(record))
                self._state.begin_segment(segment.number)
            else:
                self._read_record(record, segment.number)
        self._state.end_segment()

    def _read_record(self, record: Frame, segment: int) -> None:
        if record.kind in SENT:
            message = message_of(record)
            self._state.sent.add(record.seq, segment, (message, record.body))
            self._read_sent(message, record.body)
        elif record.kind == RecordKind.VERDICT:
            self._verdicts[record.head.text("id", 64)] = (
                record.head.integer("oom_kills") if "oom_kills" in record.head else None
            )
        elif record.kind == RecordKind.STOPPED:
            self._read_stop(record)
        elif record.kind in (RecordKind.HELD, RecordKind.RELEASED):
            self._calls[record.head.text("id", 64), record.head.text("call", 64)] = record.kind
        elif record.kind == RecordKind.DISCARDED:
            execution = self._state.running[record.head.text("id", 64)]
            self._state.discard(record, execution, record.head.integer("bytes", 1))
        elif record.kind == RecordKind.NETWORK:
            self._state.note_network(record.head.text("id", 64), network_usage(record.head))
        elif record.kind == RecordKind.NOTICE:
            self._state.add_notice(record.head.text("id", 64), record.body.decode())
        elif record.kind == RecordKind.LOST:
            self._state.lose(record.body.decode())
        elif record.kind == RecordKind.RESUMED:
            self._state.sent.renumber(record.head.integer("taken"))
        else:
            self._read_event(record, segment)

    def _read_sent(self, message: Message, body: bytes) -> None:
        if isinstance(message, Execute):
            # A verdict without its result: the daemon was killed between them, and the next one decided again.
            self._verdicts.pop(message.id, None)
            self._state.begin(message, body)
        elif isinstance(message, ToolResult):
            execution = self._state.executions.get(message.id)
            self._state.held.pop((message.id, message.call), None)
            if execution is not None:
                execution.note_answer(message.call, len(body))
        elif isinstance(message, Cancel):
            execution = self._state.running.get(message.id)
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
        if record.kind == ToolCall.kind and self._read_waiting_call(record, execution_id, segment):
            return
        if record.kind != Result.kind or execution_id not in self._verdicts:
            self._state.take(record, *self._state.read(record), segment)
        elif execution_id in self._state.running:
            oom_kills = self._verdicts.pop(execution_id)
            self._state.decide(execution_id, read_result(record), oom_kills, len(record.raw))
        else:
            raise FrameError("a verdict on what does not run")

    def _read_waiting_call(self, record: Frame, execution_id: str, segment: int) -> bool:
        """Holds or releases a tool call; returns False for one that did not wait for an approval."""
        key = (execution_id, record.head.text("call", 64))
        kind = self._calls.pop(key, None)
        if kind == RecordKind.HELD:
            execution, call = self._state.read(record)
            assert isinstance(call, CallEvent), call
            self._state.hold(record, execution, call, segment)
        elif kind == RecordKind.RELEASED:
            self._state.release(*key)
        return kind is not None
