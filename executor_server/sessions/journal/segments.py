"""Segments: the files with the records of a session's journal.

A journal is a directory of segments, `1`, `2`, …, and a `head`. A segment is a sequence of records; a record is a frame
of the guest channel, received or sent, or one of the kinds below. The first record of each segment is a SNAPSHOT, with
all that is needed to read on without the segments before it. So any segment that nothing needs can be removed, not only
the first. state.py describes the meaning of the records, records.py their checks.

Invariants.

1. A write is done when the kernel has it. It then outlives the daemon, and needs no fsync. It may not outlive the host,
   but a crash of the host ends the sandboxes, too, so there is nothing to recover.
2. Whole or nothing, since nothing would reveal that half a journal is missing. A journal that can't be written (a full
   disk) is removed, and the session goes on without it; a later daemon reports the session as lost, and why. Of a
   damaged journal, the records before the damage are read, and none after it.
3. Reading needs exactly the segments that a snapshot lists, with sizes and checksums. Others in the directory are left
   from a daemon that was killed before it removed them; reading removes them.

Races with a kill. The order of steps makes each moment readable. (a) In the middle of a record: it is torn and beyond
the head, so it is cut off. (b) After a record, before the head: the head is one record behind, and the record counts.
(c) After a new segment was created, before its snapshot is whole: it has no record, and the one before it, which the
head still names, is the last. (d) After the snapshot, before the head: the new segment is the last if the head fits its
snapshot's list. (e) After the head, before old segments are removed: invariant 3.

Attack. The directory is private to the daemon's user (0700), but its content decides about sessions, so no name alone
is trusted: links are not followed, a new segment is opened with O_EXCL, sizes are bounded before anything is read, and
each record has a checksum that depends on the session and the segment.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.backends.channel import PROCESS_EVENTS
from executor_server.guest.wire.frames import MAX_BODY_BYTES, MAX_FRAME_BYTES, Frame, Kind, encode_frame
from executor_server.sessions.journal.records import (
    CHECKSUM_BYTES,
    HEAD,
    Extent,
    Head,
    Records,
    SegmentError,
    added_checksum,
    damaged,
    encode_head,
    encode_listing,
    first_checksum,
    read_file,
    read_head,
    read_listing,
    read_records,
)

SEGMENT_BYTES = 4 * 1024 * 1024
"""Size after which a new segment begins; twice the snapshot's size if that is larger."""
_MAX_READ_BYTES = SEGMENT_BYTES + 4 * MAX_FRAME_BYTES


class RecordKind:
    """Kinds of records that are not frames of the channel."""

    SNAPSHOT = 128  # the whole state except the events; the first record of a segment
    VERDICT = 129  # the kernel's count of out-of-memory kills, if it matters; the result that it decides about follows
    LOST = 130  # the session and its running executions are lost
    RESUMED = 131  # another daemon connected; the number of our last frame that the guest had taken
    STOPPED = 132  # the daemon stopped an execution; with a call, it replaces the frame of that tool call
    DISCARDED = 133  # replaces frames of a cancelled execution for which there was no room
    NETWORK = 134  # the network usage of a running execution so far
    NOTICE = 135  # a line that the daemon adds to the log of a running execution
    PROCESS = 136  # the description of a process that is about to be started
    FORGOTTEN = 137  # a process was forgotten
    HELD = 138  # the tool call that follows waits for an approval
    RELEASED = 139  # such a call was approved; it follows again


SENT = frozenset((Kind.EXECUTE, Kind.TOOL_RESULT, Kind.CANCEL, Kind.RESTRICT))
"""Frames to the guest that are recorded."""
TAKEN = frozenset(
    (Kind.LOG, Kind.OUTPUT_CUT, Kind.IMAGE, Kind.TOOL_CALL, Kind.BLOB_CHUNK, Kind.LIMIT_WARNING, Kind.RESULT)
)
"""Frames of the guest that are recorded."""
_KINDS = SENT | TAKEN | PROCESS_EVENTS | {value for name, value in vars(RecordKind).items() if name.isupper()}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Segment:
    """A segment that was read: its number and its records, the snapshot first."""

    number: int
    records: list[Frame]


class Segments:
    """The segments of one session, new or left by an earlier daemon.

    Writing never raises OSError: segments that fail become `broken`, like closed ones, and ignore further records.
    """

    def __init__(self, directory: Path, session_id: str = "") -> None:
        self._directory = directory
        self._session_id = session_id
        self._fd = -1
        self._head_fd = -1
        self._number = 0
        self._size_bytes = 0
        self._checksum = 0
        self._full_bytes = SEGMENT_BYTES
        self._ended: dict[int, Extent] = {}  # the segments before the current one
        self.broken = False

    @property
    def full(self) -> bool:
        """True when the next record needs a new segment."""
        return self._size_bytes >= self._full_bytes

    @property
    def segment(self) -> int:
        """The number of the current segment."""
        return self._number

    # -- writing -------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the directory; `begin_segment` must follow."""
        try:
            self._directory.mkdir(mode=0o700)
            self._head_fd = _open(self._directory / HEAD, os.O_CREAT | os.O_EXCL)
            self._write_head()
        except OSError as error:
            self._give_up(error)

    def begin_segment(self, snapshot: bytes, without: Collection[int] = ()) -> None:
        """Begins a new segment with this snapshot; then removes the segments in `without`.

        They are removed last: after an earlier kill, the snapshot's list shows that they are not needed.
        """
        if self.broken:
            return
        if self._number:
            self._ended[self._number] = Extent(self._size_bytes, self._checksum)
        self._ended = {number: each for number, each in self._ended.items() if number not in without}
        listing = encode_listing(self._ended)
        if len(listing) + len(snapshot) > MAX_BODY_BYTES:
            self._give_up(OverflowError(f"a snapshot of {len(snapshot)} bytes"))
            return
        try:
            self._release_segment()
            self._fd = _open(self._directory / str(self._number + 1), os.O_CREAT | os.O_EXCL | os.O_APPEND)
        except OSError as error:
            self._give_up(error)
            return
        self._number += 1
        self._size_bytes, self._full_bytes = 0, max(SEGMENT_BYTES, 2 * len(snapshot))
        self._checksum = first_checksum(self._session_id, self._number)
        self.append(encode_frame(RecordKind.SNAPSHOT, {"segments": len(listing)}, listing + snapshot))
        self._remove(without)

    def append(self, first: bytes | memoryview, second: bytes = b"") -> None:
        """Writes one record, given in one or two pieces."""
        if self.broken:
            return
        checksum, end = added_checksum(self._checksum, first, second)
        size_bytes = len(first) + len(second) + CHECKSUM_BYTES
        try:
            # One call: a record is whole, or is the torn one at the end.
            written = os.writev(self._fd, (first, second, end))
            if written < size_bytes:
                self._write_rest(memoryview(b"".join((first, second, end)))[written:])
            self._size_bytes += size_bytes
            self._checksum = checksum
            self._write_head()
        except OSError as error:
            self._give_up(error)

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _write_head(self) -> None:
        """Covers all records so far: a missing one is now damage, not a torn end."""
        os.pwrite(self._head_fd, encode_head(self._session_id, self._number, self._size_bytes, self._checksum), 0)

    def _remove(self, numbers: Collection[int]) -> None:
        if self.broken:
            return
        try:
            for number in numbers:
                (self._directory / str(number)).unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Ends the writing; the files stay. Idempotent."""
        self._release_segment()
        if self._head_fd >= 0:
            fd, self._head_fd = self._head_fd, -1
            os.close(fd)
        self.broken = True

    def _release_segment(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _give_up(self, error: Exception) -> None:
        _log.error("journal_not_written", directory=str(self._directory), error=str(error))
        self.close()
        remove(self._directory)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[Segment]:
        """Yields all segments in order; afterwards writing continues at the end of the last one.

        Raises SegmentError at damage, after it has yielded the records before it.
        """
        try:
            if self._directory.is_symlink():
                raise damaged("it is a link")
            if not self._directory.exists():
                raise SegmentError("its journal is gone: it could not be written, or was removed")
            head = read_head(self._directory / HEAD, self._session_id)
            last, records, listing = self._read_last(head)
            for number in sorted(listing):
                before = self._read_segment(number, listing[number].size_bytes)
                yield Segment(number, before.frames)
                if before.damage or before.extent != listing[number]:
                    raise damaged(before.damage or "a segment does not fit the next one")
            yield Segment(last, records.frames)
            if records.damage:
                raise damaged(records.damage)
            self._go_on(last, records, listing)
        except (OSError, ValueError) as error:
            raise SegmentError(f"its journal can't be read: {type(error).__name__}") from error

    def _read_last(self, head: Head) -> tuple[int, Records, dict[int, Extent]]:
        """Reads the last segment and the list of those that it needs; removes others that a kill left."""
        names = set(os.listdir(self._directory)) - {HEAD}  # noqa: PTH208 - names only
        numbers = {int(name) for name in names}
        last, least_bytes, damage = head.segment, head.extent.size_bytes, ""
        if last + 1 in numbers:
            begun = self._read_segment(last + 1, 0)
            if begun.frames:  # race (d)
                last, least_bytes = last + 1, 0
            else:
                numbers.discard(last + 1)
                damage = begun.damage
                if not damage:  # race (c)
                    self._segment_path(last + 1).unlink()
        if not last:
            raise SegmentError("its journal is empty")
        if max(numbers, default=0) > last or last not in numbers:
            raise damaged("the last segment is not the one in its head")
        records = self._read_segment(last, least_bytes)
        records.damage = records.damage or damage
        if not records.frames:
            raise damaged(records.damage)
        listing = read_listing(records.frames[0])
        if last > head.segment and head.segment in listing and listing[head.segment] != head.extent:
            raise damaged("its head and its last snapshot do not fit")
        if not listing.keys() <= numbers:
            raise damaged("a segment is missing")
        for number in numbers - listing.keys() - {last}:  # race (e)
            self._segment_path(number).unlink()
        return last, records, listing

    def _read_segment(self, number: int, least_bytes: int) -> Records:
        data = read_file(self._segment_path(number), _MAX_READ_BYTES)
        found = read_records(data, self._session_id, number, _KINDS, least_bytes)
        if found.frames and found.frames[0].kind != RecordKind.SNAPSHOT:
            return Records(damage="a segment does not begin with a snapshot")
        return found

    def _go_on(self, last: int, records: Records, listing: dict[int, Extent]) -> None:
        self._number, self._ended = last, listing
        self._size_bytes, self._checksum = records.extent.size_bytes, records.extent.checksum
        self._full_bytes = max(SEGMENT_BYTES, 2 * len(records.frames[0].raw))
        self._fd = _open(self._segment_path(last), os.O_APPEND)
        os.ftruncate(self._fd, self._size_bytes)
        self._head_fd = _open(self._directory / HEAD, 0)
        self._write_head()

    def _segment_path(self, number: int) -> Path:
        return self._directory / str(number)


def remove(directory: Path) -> None:
    """Removes the journal of a session, if any. If that fails, the next start of the daemon removes it."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.error("journal_not_removed", directory=str(directory), error=str(error))


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
