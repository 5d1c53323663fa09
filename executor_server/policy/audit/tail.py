"""Reads the end of an audit log while the daemon writes it, for operators.

Records are read backwards from the newest, or from a record that was reached before; one search reads a bounded part
of the files. `code`, `command` and `input`, which a profile may have recorded whole, are left out: another rule decides
how much code operators see (`audit.view`). Nor can a search find a text in them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor_server.policy.audit.chain import WHOLE_FIELDS, as_ascii, read_fields, read_link
from executor_server.policy.audit.directory import MAX_LINE_BYTES, file_numbers, file_path, open_to_read

SEARCH_BYTES = 4 * 2**20
"""Bytes that one search reads, but for the last line."""

_CHUNK_BYTES = 128 * 1024
_SEQ = re.compile(rb'\{"seq":([1-9][0-9]{0,18}),')


@dataclass(frozen=True)
class Wanted:
    """The records to find: the newest `most` whose JSON contains `text`, ignoring case. Empty fields match all."""

    tenant: str = ""
    session: str = ""
    kinds: frozenset[str] = frozenset()
    text: str = ""
    after_seq: int = 0
    before_seq: int = 0
    most: int = 100


@dataclass(frozen=True)
class Record:
    """A record as it may be shown. `is_sound`: its hash is right, and it follows the one before it in the files."""

    seq: int
    json: str
    is_sound: bool


@dataclass(frozen=True)
class Found:
    """Records, the newest first, and the number from which to search on for older ones; 0: there are none."""

    records: tuple[Record, ...]
    continue_before_seq: int = 0


def search(directory: Path, wanted: Wanted) -> Found:
    """Returns the newest records that match. Raises OSError."""
    records: list[Record] = []
    read_bytes, last_seq = 0, 0
    newer: tuple[bytes, int, dict[str, object]] | None = None  # a record that matches: its line, number and fields
    for line in _lines_backwards(directory, wanted.before_seq):
        if newer is not None:
            records.append(_record(*newer, line))
            newer = None
        form = _SEQ.match(line)
        seq = int(form[1]) if form is not None else 0
        if 0 < seq <= wanted.after_seq:
            break
        if len(records) >= wanted.most or read_bytes >= SEARCH_BYTES:
            return Found(tuple(records), last_seq)
        read_bytes += len(line)
        last_seq = seq or last_seq
        if (fields := _matching(line, wanted)) is not None:
            newer = line, seq, fields
    if newer is not None:
        records.append(_record(*newer, None))
    return Found(tuple(records))


def _matching(line: bytes, wanted: Wanted) -> dict[str, object] | None:
    """Returns the fields to show of a record that matches."""
    text = (wanted.text if wanted.text.isascii() else as_ascii(wanted.text)[1:-1]).lower()
    # Most lines of a large log don't match; this rejects them without reading their JSON.
    if not all(each.encode() in line for each in (wanted.tenant, wanted.session)) or text.encode() not in line.lower():
        return None
    fields = read_fields(line)
    if (
        fields is None
        or (wanted.tenant and fields.get("tenant") != wanted.tenant)
        or (wanted.session and fields.get("session") != wanted.session)
        or (wanted.kinds and fields.get("kind") not in wanted.kinds)
    ):
        return None
    for name in WHOLE_FIELDS:
        if name in fields:
            del fields[name]
            fields[f"{name}_withheld"] = True
    return fields if text in as_ascii(fields).lower() else None


def _record(line: bytes, seq: int, fields: dict[str, object], before: bytes | None) -> Record:
    link, previous = read_link(line), None if before is None else read_link(before)
    is_sound = link is not None and link.actual_hash == link.stated_hash
    if link is not None and before is not None:
        follows = previous is not None and (previous.seq + 1, previous.actual_hash) == (link.seq, link.prev)
        is_sound = is_sound and follows
    return Record(seq, as_ascii(fields), is_sound)


# ---------------------------------------------------------------------------------------------------------------------
# Lines, the last first


def _lines_backwards(directory: Path, before_seq: int) -> Iterator[bytes]:
    """Yields the whole lines of all files before a record; 0: all. Raises OSError."""
    for number in reversed(file_numbers(directory)):
        try:
            fd = open_to_read(file_path(directory, number))
        except FileNotFoundError:
            return  # the daemon has just removed it, and the older ones before
        try:
            end = os.fstat(fd).st_size
            if before_seq:
                end = _end_of_those_before(fd, end, before_seq)
            yield from _lines_up_to(fd, end)
        finally:
            os.close(fd)


def _lines_up_to(fd: int, end: int) -> Iterator[bytes]:
    """Yields the lines of a file before an offset, the last first; half a line at the end is left out."""
    rest = b""  # the end of a line whose beginning is not read yet
    is_whole = False
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        lines = (_read(fd, start, end) + rest).splitlines(keepends=True)
        rest = lines.pop(0) if start > 0 else b""
        if len(rest) > MAX_LINE_BYTES:
            raise OSError(errno.EINVAL, "a line is longer than any record")
        for line in reversed(lines):
            is_whole = is_whole or line.endswith(b"\n")
            if is_whole:
                yield line
        end = start


def _end_of_those_before(fd: int, end: int, seq: int) -> int:
    """Returns the offset after the last line whose number is below `seq`; numbers rise within a file."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        start, line = _line_from(fd, middle, end)
        form = _SEQ.match(line)
        if start >= high or (form is not None and int(form[1]) >= seq):
            high = middle
        else:
            low = start + len(line)
    return low


def _line_from(fd: int, offset: int, end: int) -> tuple[int, bytes]:
    """Returns the first whole line that begins at an offset or later, and where; empty if there is none."""
    data = b""
    begin = max(0, offset - 1)  # the line begins at the offset if the byte before ends one
    start = 0 if offset == 0 else -1
    while begin + len(data) < end and len(data) <= 2 * MAX_LINE_BYTES:
        at = begin + len(data)
        data += _read(fd, at, min(end, at + 4096))
        if start < 0:
            start = data.find(b"\n") + 1 or -1
        stop = data.find(b"\n", start) if start >= 0 else -1
        if stop >= 0:
            return begin + start, data[start : stop + 1]
    return end, b""


def _read(fd: int, start: int, end: int) -> bytes:
    data = os.pread(fd, end - start, start)
    if len(data) < end - start:
        raise OSError(errno.EIO, "the file became shorter while it was read")
    return data
