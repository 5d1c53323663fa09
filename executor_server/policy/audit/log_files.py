"""Writes the files of the audit log: numbered append-only files, and an anchor next to them.

    audit-000001.jsonl, audit-000002.jsonl, …    the chain; a file's first record has the hash of the one before it
    anchor                                       number and hash of the last record, so that a missing end is noticed
    lock                                         held by the daemon that writes

One call writes a record before its event takes place, and the anchor after the record. So a killed daemon leaves a log
of the anchor's length, or one record longer, perhaps with half a record at its end. The event of half a record has not
taken place: the next daemon cuts it off and records that. If a log is shorter than its anchor, another process has cut
it, or the host has lost its end.

Calls wait only for the disk; those that may wait long are in `Flush`, which a thread runs. After an OSError the log is
unchanged, and `mend` must be called before the next record.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from executor_server.policy.audit.chain import GENESIS, AuditKind, Position, encode
from executor_server.policy.audit.directory import (
    ANCHOR_NAME,
    LOCK_NAME,
    file_numbers,
    file_path,
    read_anchor,
    read_end,
    read_start,
    write_anchor,
)

# O_NONBLOCK: a pipe that another process put there must not block the daemon.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class AuditDirError(Exception):
    """The directory can't hold the audit log; the message gives the reason and the remedy."""


@dataclass
class Flush:
    """Files to sync, and the steps that follow. Made in the event loop, run in a thread."""

    current: int
    position: Position
    retired: list[int] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    directory: int = -1  # descriptor to sync too, when files were added or removed
    anchor: int = -1  # descriptor to write when all is on the disk; -1 when it was written with the record

    def run(self, *, sync: bool) -> None:
        """Raises OSError; the retired files are closed in any case."""
        try:
            if sync:
                for fd in (*self.retired, self.current):
                    os.fdatasync(fd)
                if self.directory >= 0:
                    os.fsync(self.directory)
            if self.anchor >= 0:
                write_anchor(self.anchor, self.position)
            for path in self.removed:
                path.unlink(missing_ok=True)
        finally:
            for fd in self.retired:
                os.close(fd)


class AuditFiles:
    """The directory of the log, locked for writing from `open` to `close`."""

    def __init__(self, directory: Path, *, max_file_bytes: int, max_files: int | None, anchor_after_sync: bool) -> None:
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files
        self._anchor_after_sync = anchor_after_sync
        self.position = GENESIS
        self._directory_fd = self._lock_fd = self._anchor_fd = self._fd = -1
        self._number = 0
        self._path = str(directory)  # a text: it is looked up for each record
        self._size_bytes = 0
        self._identity = (0, 0)
        self._torn = False  # there may be half a record after _size_bytes
        self._retired: list[int] = []
        self._removed: list[Path] = []
        self._names_changed = False

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> list[dict[str, Any]]:
        """Locks the directory and continues the log at its end. Returns the repairs, to be recorded before anything
        else. Raises AuditDirError."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_directory()
            numbers = file_numbers(self._directory)
            if not numbers:
                return self._begin(read_anchor(self._directory))
            return self._continue(numbers, read_anchor(self._directory))
        except AuditDirError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise AuditDirError(
                f"The audit log in {self._directory} can't be opened: {error.strerror}. Repair it, choose another "
                "directory (audit.directory), or disable the log (audit.enabled = false)."
            ) from error

    def _lock_directory(self) -> None:
        found = self._directory.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise AuditDirError(f"The audit directory {self._directory} is not a directory (a link is not accepted).")
        if found.st_uid != os.geteuid():
            raise AuditDirError(f"The audit directory {self._directory} belongs to user {found.st_uid}.")
        if found.st_mode & 0o022:
            raise AuditDirError(
                f"The audit directory {self._directory} can be written by other users; run: chmod 700 {self._directory}"
            )
        self._directory_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._lock_fd = os.open(self._directory / LOCK_NAME, flags, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise AuditDirError(
                f"Another executor-server writes the audit log in {self._directory}; choose another directory."
            ) from error
        self._anchor_fd = os.open(self._directory / ANCHOR_NAME, flags, 0o600)

    def _begin(self, anchor: Position | None) -> list[dict[str, Any]]:
        """Begins a log with its first record."""
        repairs = []
        if anchor not in (None, GENESIS):
            assert anchor is not None
            repairs.append(_records_missing(GENESIS, anchor))
        else:
            # Before the first record: from then on, a missing anchor was removed.
            write_anchor(self._anchor_fd, GENESIS)
        self._next_file(1)
        return repairs

    def _continue(self, numbers: list[int], anchor: Position | None) -> list[dict[str, Any]]:
        self._number = numbers[-1]
        path = file_path(self._directory, self._number)
        self._path = str(path)
        self._write_to(os.open(path, _APPEND))
        end = read_end(path)
        repairs = []
        if end.torn:
            os.ftruncate(self._fd, end.whole_bytes)
            digest = hashlib.sha256(end.torn).hexdigest()
            repairs.append({"what": "torn_record", "file": path.name, "bytes": len(end.torn), "sha256": digest})
        self._size_bytes = end.whole_bytes
        for number in reversed(numbers[:-1]):
            if end.whole_bytes:
                break
            # The file had just been begun: the last record is in the one before.
            path = file_path(self._directory, number)
            end = read_end(path)
        self.position = end.position or anchor or GENESIS
        if end.position is None and end.whole_bytes:
            # The damaged file stays as it is, for people to examine, and the log continues in a new one.
            repairs.append({"what": "damaged_record", "file": path.name})
            self._next_file()
        if anchor is None:
            repairs.append({"what": "anchor_missing"})
        elif anchor.seq > self.position.seq:
            repairs.append(_records_missing(self.position, anchor))
        elif anchor.seq == self.position.seq and anchor.hash != self.position.hash:
            repairs.append({"what": "record_changed", "record": anchor.seq, "record_hash": anchor.hash})
        return repairs

    def _write_to(self, fd: int) -> None:
        """Makes this the file that records are appended to."""
        if self._fd >= 0:
            self._retired.append(self._fd)
        self._fd = fd
        found = os.fstat(fd)
        self._identity = (found.st_dev, found.st_ino)
        self._torn = False
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")

    def _next_file(self, number: int | None = None) -> None:
        """Continues in a new file, by default the one after all others."""
        if number is None:
            number = max([self._number, *file_numbers(self._directory)]) + 1
        path = file_path(self._directory, number)
        self._write_to(os.open(path, _APPEND | os.O_CREAT | os.O_EXCL, 0o600))
        self._number, self._path, self._size_bytes = number, str(path), 0
        self._names_changed = True

    def close(self) -> None:
        """Closes the files and releases the lock. Idempotent."""
        for fd in (self._fd, *self._retired, self._anchor_fd, self._lock_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._directory_fd = self._lock_fd = self._anchor_fd = self._fd = -1
        self._retired.clear()

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(self, time: str, kind: AuditKind, fields: Mapping[str, Any]) -> int:
        """Writes a record and returns its size in bytes. Raises OSError."""
        line, after = encode(self.position, time, kind, fields)
        if self._size_bytes and self._size_bytes + len(line) > self._max_file_bytes:
            self._next_file()
            self._remove_oldest(time)
            line, after = encode(self.position, time, kind, fields)
        self._write(line, after)
        return len(line)

    def _write(self, line: bytes, after: Position) -> None:
        # A write to a file that was removed or moved away succeeds, but no reader of the log would find the record.
        found = os.lstat(self._path)
        if (found.st_dev, found.st_ino) != self._identity:
            raise OSError(errno.ESTALE, "the file of the audit log was replaced")
        try:
            written = os.write(self._fd, line)
            while written < len(line):  # the disk is nearly full, and the next call fails
                written += os.write(self._fd, line[written:])
            if not self._anchor_after_sync:
                write_anchor(self._anchor_fd, after)
        except OSError:
            self._cut_back()
            raise
        self._size_bytes += len(line)
        self.position = after

    def _cut_back(self) -> None:
        """Removes the written part of a record after an error."""
        try:
            os.ftruncate(self._fd, self._size_bytes)
        except OSError:
            self._torn = True  # `mend` tries again: no record may follow half a record

    def _remove_oldest(self, time: str) -> None:
        """Removes files beyond `max_files`, each after a record of the position at which the chain will begin."""
        if self._max_files is None:
            return
        removed = {path.name for path in self._removed}
        numbers = [n for n in file_numbers(self._directory) if file_path(self._directory, n).name not in removed]
        surplus = max(0, len(numbers) - self._max_files)
        for number, following in islice(pairwise(numbers), surplus):
            path = file_path(self._directory, number)
            fields = {"file": path.name, "bytes": path.stat().st_size, **self._end_before(following)}
            line, after = encode(self.position, time, AuditKind.FILE_REMOVED, fields)
            self._write(line, after)
            self._removed.append(path)
            self._names_changed = True

    def _end_before(self, number: int) -> dict[str, Any]:
        """The last record of the file before this one, as this one's first record names it."""
        if number == self._number and not self._size_bytes:
            return {"last_seq": self.position.seq, "last_hash": self.position.hash}
        start = read_start(file_path(self._directory, number))
        if start is None:
            return {"last_seq": 0, "last_hash": ""}  # the file is damaged, which the verification of the log will find
        return {"last_seq": start.seq, "last_hash": start.hash}

    def mend(self, *, new_file: bool) -> None:
        """Makes the log writable again after an error. Raises OSError, AuditDirError."""
        try:
            found = os.lstat(self._path)
            missing = (found.st_dev, found.st_ino) != self._identity
        except FileNotFoundError:
            missing = True
        if missing or self._fd < 0:
            # The chain continues from the position in memory, whatever the directory holds now: so records that were
            # removed are noticed.
            self.close()
            self._lock_directory()
            self._next_file()
            return
        if self._torn:
            os.ftruncate(self._fd, self._size_bytes)
            self._torn = False
        if new_file and self._size_bytes:
            self._next_file()

    @property
    def is_open(self) -> bool:
        """True while there is a file to write to: not after the directory was removed."""
        return self._fd >= 0

    @property
    def files_changed(self) -> bool:
        """True when a file was begun or removed since the last flush."""
        return self._names_changed

    def flush(self) -> Flush:
        """Returns the flush of everything that is not on the disk yet. It must have run before the next one is made."""
        made = Flush(
            current=self._fd,
            position=self.position,
            retired=self._retired,
            removed=self._removed,
            directory=self._directory_fd if self._names_changed else -1,
            anchor=self._anchor_fd if self._anchor_after_sync else -1,
        )
        self._retired, self._removed, self._names_changed = [], [], False
        return made


def _records_missing(found: Position, anchor: Position) -> dict[str, Any]:
    return {"what": "records_missing", "first": found.seq + 1, "last": anchor.seq, "last_hash": anchor.hash}
