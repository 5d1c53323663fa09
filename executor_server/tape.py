"""A tape: what happened in a session, written down as it happened, for the daemon that comes after a killed one.

A tape is a directory of segments, `1`, `2`, …; a segment is a sequence of records, and a record is a frame of the guest
channel: one that came, one that was sent, or one of the kinds below. The first record of each segment is a SNAPSHOT of
all that is needed to read on without the segments before it, so one that is not needed any more can be removed, be it
the first or not. What the records mean is the business of ledger_state.py.

A write is done when the kernel has it: that outlives the daemon, though not the host, whose end takes the sandboxes
along anyway. The last record may be torn, when the daemon was killed over it; it is cut off. A tape that can't be
written, because the disk is full, is given up and removed: half of what happened would be a lie, nothing says that
something is missing.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.guest.frames import (
    MAX_BODY_BYTES,
    MAX_FRAME_BYTES,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    encode_frame,
)

SEGMENT_BYTES = 4 * 1024 * 1024
"""Past so many bytes the next record goes to another segment; past twice its snapshot, where that is larger."""
_MAX_READ_BYTES = SEGMENT_BYTES + 4 * MAX_FRAME_BYTES


class Mark:
    """Kinds of records that are no frames of the channel."""

    SNAPSHOT = 128  # all that is known, at the head of a segment
    VERDICT = 129  # what the daemon found out about a result
    LOST = 130  # the session is lost, and what ran with it
    RESUMED = 131  # another daemon: how far the guest had taken what was sent
    STOPPED = 132  # the daemon stopped an execution; in the place of a tool call that no client is told of


SENT = frozenset((Kind.EXECUTE, Kind.TOOL_RESULT, Kind.CANCEL, Kind.RESTRICT))
"""Frames to the guest that are written down."""
TAKEN = frozenset(
    (Kind.LOG, Kind.OUTPUT_CUT, Kind.IMAGE, Kind.TOOL_CALL, Kind.BLOB_CHUNK, Kind.LIMIT_WARNING, Kind.RESULT)
)
"""Frames of the guest that are written down."""
_KINDS = SENT | TAKEN | {value for name, value in vars(Mark).items() if name.isupper()}

_log = structlog.get_logger(__name__)


class TapeError(Exception):
    """The tape can't be read on; the message is a clause for the session's owner."""


@dataclass(frozen=True)
class Segment:
    """A segment that was read: its number and its records, the snapshot first."""

    number: int
    records: list[Frame]


class Tape:
    """One session's tape, from its first record or from where an earlier daemon was killed.

    Nothing here raises OSError: a tape that fails is `broken`, as one that was closed, and takes nothing more.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1
        self._number = 0
        self._size_bytes = 0
        self._full_bytes = SEGMENT_BYTES
        self.broken = False

    @property
    def full(self) -> bool:
        """Whether the next record belongs into another segment."""
        return self._size_bytes >= self._full_bytes

    @property
    def segment(self) -> int:
        """The number of the segment that is written now."""
        return self._number

    # -- writing -------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the directory; `begin_segment` must follow."""
        try:
            self._directory.mkdir(mode=0o700)
        except OSError as error:
            self._give_up(error)

    def begin_segment(self, snapshot: bytes) -> None:
        """Goes on in another segment, which begins with this body of a SNAPSHOT."""
        if self.broken:
            return
        if len(snapshot) > MAX_BODY_BYTES:
            self._give_up(OverflowError(f"a snapshot of {len(snapshot)} bytes"))
            return
        try:
            self._release()
            self._fd = _open(self._directory / str(self._number + 1), os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._give_up(error)
            return
        self._number += 1
        self._size_bytes, self._full_bytes = 0, max(SEGMENT_BYTES, 2 * len(snapshot))
        self.append(encode_frame(Mark.SNAPSHOT, {}, snapshot))

    def append(self, first: bytes | memoryview, second: bytes = b"") -> None:
        """Writes one record, which may come in two pieces."""
        if self.broken:
            return
        try:
            # One call: a record is there in whole, or is the torn one at the end.
            written = os.writev(self._fd, (first, second)) if second else os.write(self._fd, first)
            if written < len(first) + len(second):
                self._write_rest(memoryview(b"".join((first, second)))[written:])
        except OSError as error:
            self._give_up(error)
        self._size_bytes += len(first) + len(second)

    def _write_rest(self, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def drop(self, numbers: Iterable[int]) -> None:
        """Removes segments."""
        try:
            for number in numbers:
                (self._directory / str(number)).unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Takes nothing more; what is there stays. Idempotent."""
        self._release()
        self.broken = True

    def _release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _give_up(self, error: Exception) -> None:
        _log.error("journal_not_written", directory=str(self._directory), error=str(error))
        self.close()
        remove(self._directory)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[Segment]:
        """All segments, in order; afterwards the tape goes on where the last one ends. Raises TapeError."""
        try:
            if self._directory.is_symlink():
                raise TapeError("its journal is damaged: it is a link")
            numbers = sorted(int(name) for name in os.listdir(self._directory))  # noqa: PTH208 - names only
            if not numbers:
                raise TapeError("its journal is empty")
            for number in numbers:
                records, size_bytes = _read_segment(self._directory / str(number), is_last=number == numbers[-1])
                if records:
                    self._number, self._size_bytes = number, size_bytes
                    self._full_bytes = max(SEGMENT_BYTES, 2 * len(records[0].raw))
                    yield Segment(number, records)
                else:  # killed when it had just been begun: all that it would have said is in the ones before
                    (self._directory / str(number)).unlink()
            if not self._number:
                raise TapeError("its journal is empty")
            self._fd = _open(self._directory / str(self._number), 0)
            os.ftruncate(self._fd, self._size_bytes)
        except FileNotFoundError as error:
            raise TapeError("its journal is gone: it could not be written, or was removed") from error
        except (OSError, ValueError) as error:
            raise TapeError(f"its journal can't be read: {type(error).__name__}") from error


def remove(directory: Path) -> None:
    """Removes a tape, if it is there. What can't be removed now is when the daemon starts."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.error("journal_not_removed", directory=str(directory), error=str(error))


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _read_segment(path: Path, *, is_last: bool) -> tuple[list[Frame], int]:
    """The records of a segment and how many bytes they take; of the last one, as far as they are whole."""
    data = _read_whole(path)
    try:
        records = FrameDecoder(_KINDS).feed(data)
    except FrameError as error:
        raise TapeError(f"its journal is damaged: {error}") from error
    size_bytes = sum(len(record.raw) for record in records)
    if size_bytes < len(data) and not is_last:
        raise TapeError("its journal is damaged: a record is torn")
    if records and records[0].kind != Mark.SNAPSHOT:
        raise TapeError("its journal is damaged: a segment does not begin with a snapshot")
    return records, size_bytes


def _read_whole(path: Path) -> bytes:
    """A segment's bytes. Raises OSError, TapeError."""
    # It is our own file; still, a pipe put there must not hang the start, nor a link lead elsewhere.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_READ_BYTES:
            raise TapeError("its journal is damaged: a segment is no file of ours")
        return file.read(_MAX_READ_BYTES)
