"""The journal of a session's processes: their logs, and the segments from which a later daemon recovers them.

It is separate from the journal of executions (journal.py), in a directory made with the first process: a session
without processes pays nothing, and a process that prints for hours displaces no execution's events.

Theory of operation. A record is written before it takes effect, hence before the guest's frame is acknowledged: the
description of a process before it starts, each guest frame about it, and a note when it is forgotten. The frames of
both journals share one sequence of numbers, and each is stored before the next is taken. So the channel goes on after
the larger of the two journals' last numbers.

A segment is removed when no event in it is kept. Which events are kept is not recorded; a later daemon may keep a few
more than the one before, never fewer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable
from typing import Protocol

from executor_server.backends.channel import read_process_event
from executor_server.core import (
    ExecutorError,
    InvalidRequest,
    ProcessEventKind,
    ProcessOutcome,
    ProcessRequest,
    ProcessResult,
    Reason,
)
from executor_server.guest.wire.frames import Fields, Frame, FrameError, encode_frame
from executor_server.sessions.journal.memory import TenantMemory, unlimited
from executor_server.sessions.journal.process_log import (
    PROCESS_JOURNAL_BYTES,
    ProcessDescription,
    ProcessLog,
    described,
    fingerprint_of,
)
from executor_server.sessions.journal.records import SegmentError, snapshot_body
from executor_server.sessions.journal.segments import RecordKind, Segments
from executor_server.sessions.journal.spans import SegmentSpans
from executor_server.sessions.journal.typed_json import as_json, from_json

MAX_FINISHED_PROCESSES = 64
"""Ended processes of a session that are kept after their end was read; the oldest is forgotten first."""
MAX_UNREAD_PROCESSES = 512
"""Ended processes of a session that are kept although their end is unread: a client may come back."""

# Bytes that the events and the arguments of all finished processes of a session may take.
_MAX_FINISHED_BYTES = 2 * PROCESS_JOURNAL_BYTES
_MAX_PROCESSES = 1024
_MAX_FORGOTTEN = 1024  # ids of processes that were forgotten


class ProcessJournalOwner(Protocol):
    """A session, as far as the journal of its processes uses it."""

    def grant(self, process_id: str, granted_bytes: int) -> None:
        """Sets the cost of the output that the guest may send, counted from the start of the process."""
        ...

    def forget(self, process_id: str) -> None:
        """Lets the guest forget an ended process."""
        ...

    def on_process_event(self, log: ProcessLog, event: ProcessEventKind) -> None:
        """Notified of each event, but not during a replay."""
        ...


class ProcessJournal:
    """Owns the segments and the logs. `processes` has all known ones, in the order of their starts."""

    def __init__(
        self,
        segments: Segments,
        owner: ProcessJournalOwner,
        memory: TenantMemory | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._segments = segments
        self._owner = owner
        self._now_s = now_s
        self._memory = memory or unlimited()
        self._spans = SegmentSpans()
        self._begun = False
        self.taken_seq = 0
        self._forgotten: dict[str, None] = {}  # the oldest first
        self.processes: dict[str, ProcessLog] = {}

    def close(self) -> None:
        """Closes the segments, whose files stay, and drops the processes; their readers may finish."""
        self._segments.close()
        for log in self.processes.values():
            log.leave()
        self.processes.clear()

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[ProcessLog]:
        """Processes that have not ended, including those being started."""
        return [log for log in self.processes.values() if not log.done]

    def known_as(self, request: ProcessRequest) -> ProcessLog | None:
        """Returns the process that this id names already. Raises InvalidRequest if the request differs."""
        known = self.processes.get(request.process_id)
        if known is not None and known.description.fingerprint != fingerprint_of(request):
            raise InvalidRequest(
                Reason.PROCESS_ID_REUSED, f"process id {request.process_id!r} names another process of this session"
            )
        return known

    # -- changes -------------------------------------------------------------------------------------------------

    def begin(self, request: ProcessRequest) -> ProcessLog:
        """Adds a process that is about to be started."""
        if not self._begun:
            self._begun = True
            self._segments.create()
            self._begin_segment()
        description = described(request)
        self._write(encode_frame(RecordKind.PROCESS, {}, as_json(description).encode()))
        return self._add(description)

    def refuse(self, log: ProcessLog, error: ExecutorError) -> None:
        """Drops a process that could not be started, and gives its caller the error."""
        self._write(encode_frame(RecordKind.FORGOTTEN, {"id": log.process_id}))
        self._forget(log.process_id)
        log.refuse(error)

    def take(self, frame: Frame) -> None:
        """Records and applies a frame about a process. Raises FrameError before any change.

        Events of an unknown process are dropped: it was forgotten, or its journal could not be written.
        """
        process_id, kind = read_process_event(frame)
        log = self.processes.get(process_id)
        if log is None:
            self.taken_seq = frame.seq
            return
        log.check(kind)
        self._write(frame.raw)
        self.taken_seq = frame.seq
        log.publish(kind, len(frame.raw))
        self._owner.on_process_event(log, kind)
        if log.done:
            self._owner.forget(process_id)
            self._forget_old()

    def lose(self, reason: str) -> None:
        """Ends running processes when the session is lost or ends. The journal of executions records that."""
        for log in self.running:
            result = ProcessResult(ProcessOutcome.LOST, lost_reason=reason)
            log.publish(result)
            self._owner.on_process_event(log, result)

    def grant_all(self) -> None:
        """Repeats the grants of all processes."""
        for log in self.running:
            if log.pid:
                log.grant_again()

    def drop_unstarted(self, error: ExecutorError, begun: Container[str]) -> None:
        """Drops the processes that the guest has not reported as started, except those being started (`begun`)."""
        for log in self.running:
            if not log.pid and log.process_id not in begun:
                self.refuse(log, error)

    def trim(self) -> None:
        """Must be called regularly: unread events may be dropped after a time."""
        for log in self.running:
            log.trim()

    def _add(self, description: ProcessDescription) -> ProcessLog:
        log = ProcessLog(description, self._owner, self._memory, self._now_s)
        self.processes[description.process_id] = log
        return log

    def was_forgotten(self, process_id: str) -> bool:
        """True for an ended process whose id is still remembered."""
        return process_id in self._forgotten

    def _forget_old(self) -> None:
        finished = [log for log in self.processes.values() if log.done]
        while len(finished) > 1:
            is_full = len(finished) > MAX_UNREAD_PROCESSES or sum(map(_kept_bytes, finished)) > _MAX_FINISHED_BYTES
            candidates = [log for log in finished[:-1] if not log.followed]
            read = [log for log in candidates if log.end_was_read]
            if not is_full and len(read) < MAX_FINISHED_PROCESSES:
                return
            oldest = next(iter(read or candidates), None)
            if oldest is None:
                return
            finished.remove(oldest)
            self._write(encode_frame(RecordKind.FORGOTTEN, {"id": oldest.process_id}))
            self._forget(oldest.process_id)

    def _forget(self, process_id: str) -> None:
        log = self.processes.pop(process_id, None)
        if log is not None:
            log.leave()
            if log.pid:
                self._note_forgotten([process_id])
        self._spans.forget(process_id)

    def _note_forgotten(self, process_ids: Iterable[str]) -> None:
        self._forgotten.update(dict.fromkeys(process_ids))
        while len(self._forgotten) > _MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    # -- segments ------------------------------------------------------------------------------------------------

    def _write(self, first: bytes | memoryview) -> None:
        if self._segments.full:
            self._begin_segment()
        self._segments.append(first)

    def _begin_segment(self) -> None:
        if self._segments.broken:
            return
        self._spans.end(self.processes)
        unneeded = self._spans.drop_unneeded((), self.processes)
        self._segments.begin_segment(self._snapshot(), without=unneeded)
        self._spans.begin(self._segments.segment, self.processes)

    def _snapshot(self) -> bytes:
        known = [log.snapshot() for log in self.processes.values()]
        snapshot = {"taken": self.taken_seq, "processes": known, "forgotten": [*self._forgotten]}
        return json.dumps(snapshot, separators=(",", ":")).encode()

    # -- after another daemon ------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Applies all records of the segments; new records are appended to them.

        Raises SegmentError at damage: the records before it have taken effect then, and no more will be written.
        """
        self._begun = True
        try:
            for segment in self._segments.read():
                for record in segment.records:
                    self._replay_record(record, segment.number)
                self._spans.end(self.processes)
        except (ValueError, LookupError, TypeError, RecursionError) as error:  # a FrameError is a ValueError
            raise SegmentError(f"the journal of its processes is damaged: {error}") from error
        for log in self.running:
            log.expect_granted()
        if self._segments.broken:
            raise SegmentError("the journal of its processes can't be written")

    def _replay_record(self, record: Frame, segment: int) -> None:
        if record.kind == RecordKind.SNAPSHOT:
            self._restore(snapshot_body(record))
            self._spans.begin(segment, self.processes)
        elif record.kind == RecordKind.PROCESS:
            self._add(from_json(ProcessDescription, json.loads(record.body)))
        elif record.kind == RecordKind.FORGOTTEN:
            self._forget(record.head.text("id", 64))
        else:
            process_id, kind = read_process_event(record)
            log = self.processes.get(process_id)
            if log is None:
                raise FrameError("an event of a process that is not known")
            log.expect_granted()
            log.check(kind)
            self.taken_seq = record.seq
            log.publish(kind, len(record.raw))

    def _restore(self, snapshot: bytes) -> None:
        known = Fields(json.loads(snapshot))
        self.taken_seq = known.integer("taken")
        self._note_forgotten(known.texts("forgotten", _MAX_FORGOTTEN, 64) if "forgotten" in known.values else ())
        listed = {}
        for fields in known.objects("processes", _MAX_PROCESSES):
            description = from_json(ProcessDescription, fields.values["what"])
            listed[description.process_id] = description, fields
        for process_id in [each for each in self.processes if each not in listed]:
            self._forget(process_id)
        for process_id, (description, fields) in listed.items():
            log = self.processes.get(process_id) or self._add(description)
            log.restore(fields)


def _kept_bytes(log: ProcessLog) -> int:
    return log.journal_size + sum(map(len, log.description.argv))
