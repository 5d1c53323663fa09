"""The files in the directory of an audit log, and how they are read.

Readers take nothing for granted: another process may have put a pipe, a link or a huge file there.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor_server.policy.audit.chain import MAX_CODE_RECORD_BYTES, Position, read_link

ANCHOR_NAME = "anchor"
LOCK_NAME = "lock"
MAX_LINE_BYTES = MAX_CODE_RECORD_BYTES + 1024
"""Bytes that no line of the daemon exceeds."""

_FILE_NAME = re.compile(r"audit-([0-9]{6,12})\.jsonl")
_ANCHOR_FORM = re.compile(rb"([0-9]{20}) ([0-9a-f]{64})\n")
_ANCHOR_BYTES = 86
_HEAD_FORM = re.compile(rb'\{"seq":([1-9][0-9]{0,18}),"prev":"([0-9a-f]{64})"')
_HEAD_BYTES = 512
# Two of the longest lines: enough for the last whole one and half of one after it.
_MAX_TAIL_BYTES = 2 * MAX_LINE_BYTES


def file_path(directory: Path, number: int) -> Path:
    return directory / f"audit-{number:06d}.jsonl"


def file_numbers(directory: Path) -> list[int]:
    """Returns the numbers of the log's files, in order. Raises OSError."""
    names = (_FILE_NAME.fullmatch(path.name) for path in directory.iterdir())
    numbers = (int(name[1]) for name in names if name is not None)
    # A number has one name: audit-0000001 is not a file of the daemon, audit-000001 is.
    return sorted({number for number in numbers if file_path(directory, number).exists()})


def read_anchor(directory: Path) -> Position | None:
    """Reads the anchor; None when it is missing or has another form. Raises OSError."""
    try:
        fd = open_to_read(directory / ANCHOR_NAME)
    except FileNotFoundError:
        return None
    try:
        found = _ANCHOR_FORM.fullmatch(os.read(fd, _ANCHOR_BYTES + 1))
    finally:
        os.close(fd)
    return Position(int(found[1]), found[2].decode()) if found else None


def read_lines(path: Path) -> Iterator[bytes]:
    """Reads the lines of a file with their ends. One that is longer than a record can be comes in pieces.

    Raises OSError, also for a path that is not a regular file.
    """
    with os.fdopen(open_to_read(path), "rb", buffering=1 << 18) as file:
        while line := file.readline(MAX_LINE_BYTES):
            yield line


def open_to_read(path: Path) -> int:
    # A pipe must not block the reader, and a link must not lead it elsewhere.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


def write_anchor(fd: int, position: Position) -> None:
    # In place and of one length: a reader finds the old position or the new one.
    os.pwrite(fd, f"{position.seq:020d} {position.hash}\n".encode(), 0)


@dataclass(frozen=True)
class End:
    """The end of a file: bytes of whole lines, half a line after them, and the last record; None when it is damaged."""

    whole_bytes: int
    torn: bytes
    position: Position | None


def read_end(path: Path) -> End:
    fd = open_to_read(path)
    try:
        size_bytes = os.fstat(fd).st_size
        tail = os.pread(fd, _MAX_TAIL_BYTES, max(0, size_bytes - _MAX_TAIL_BYTES))
    finally:
        os.close(fd)
    whole = tail.rfind(b"\n") + 1
    torn = tail[whole:]
    if len(torn) > MAX_LINE_BYTES:  # not half a record of the daemon, so it is not cut off
        return End(size_bytes, b"", None)
    last = tail[tail.rfind(b"\n", 0, max(0, whole - 1)) + 1 : whole]
    link = read_link(last)
    sound = link is not None and link.actual_hash == link.stated_hash
    return End(size_bytes - len(torn), torn, link.position if link is not None and sound else None)


def read_start(path: Path) -> Position | None:
    """Reads the position before a file's first record; None when that record is damaged. Raises OSError."""
    fd = open_to_read(path)
    try:
        found = _HEAD_FORM.match(os.read(fd, _HEAD_BYTES))
    finally:
        os.close(fd)
    return Position(int(found[1]) - 1, found[2].decode()) if found else None
