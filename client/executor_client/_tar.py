"""Reads an archive that was written in a sandbox: the headers that the guest writes, and nothing else.

tarfile is not for that. It knows every dialect, and an attacker's header can make it read the whole archive at once (a
size below zero), go round in circles, or gather a sparse map of gigabytes; which Python has which of these mended
differs. Here a header is ustar, with at most one pax header before it that says a path or a size. Nothing is read
before its length is known to be small, and the position only ever goes forward.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from executor_client.errors import ProtocolError

BLOCK_BYTES = 512
EXTENSION_BYTES_MAX = 65_536
"""Of one pax header: a path is far shorter."""

_MAGIC = b"ustar\x00"
_NUMBER = re.compile(rb"([0-7]{1,11})[ \0]+")
_RECORD = re.compile(rb"([1-9][0-9]{0,5}) (path|size)=")
_SIZE = re.compile(rb"[0-9]{1,15}")
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Member:
    """A member and where its content lies. Its name is whatever the archive says."""

    name: str
    size_bytes: int
    offset: int
    is_directory: bool
    is_executable: bool


@dataclass(frozen=True)
class _Header:
    kind: bytes
    name: bytes
    size_bytes: int
    mode: int


def read_members(archive: BinaryIO) -> Iterator[Member]:
    """The members, in order. Raises ProtocolError for what is no such archive, or breaks off."""
    end = archive.seek(0, os.SEEK_END)
    position = 0
    while (block := _read(archive, position, BLOCK_BYTES, end)) != bytes(BLOCK_BYTES):
        header, records = _header(block), dict[bytes, bytes]()
        position += BLOCK_BYTES
        if header.kind == b"x":
            if header.size_bytes > EXTENSION_BYTES_MAX:
                raise _unreadable(f"a header of {header.size_bytes} bytes")
            records = _records(_read(archive, position, header.size_bytes, end))
            position += header.size_bytes + padding(header.size_bytes)
            header = _header(_read(archive, position, BLOCK_BYTES, end))
            position += BLOCK_BYTES
        member = _member(header, records, position)
        yield member
        position += member.size_bytes + padding(member.size_bytes)


def padding(size_bytes: int) -> int:
    """How many bytes are missing to a whole block."""
    return -size_bytes % BLOCK_BYTES


def _read(archive: BinaryIO, position: int, size_bytes: int, end: int) -> bytes:
    if position + size_bytes > end:
        raise _unreadable("it breaks off before its end")
    archive.seek(position)
    return archive.read(size_bytes)


def _header(block: bytes) -> _Header:
    blanked = block[:148] + b" " * 8 + block[156:]
    if block[257:263] != _MAGIC or _number(block[148:156]) != sum(blanked):
        raise _unreadable("a header is damaged, or of another format")
    prefix, name = (field.split(b"\0", 1)[0] for field in (block[345:500], block[:100]))
    name = prefix + b"/" + name if prefix else name
    return _Header(block[156:157], name, _number(block[124:136]), _number(block[100:108]))


def _number(field: bytes) -> int:
    digits = _NUMBER.fullmatch(field)
    if digits is None:
        raise _unreadable("a header has a damaged number")
    return int(digits[1], 8)


def _records(data: bytes) -> dict[bytes, bytes]:
    """What a pax header says: each record has its own length before it. Two keys, so two records at most."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data):
        found = _RECORD.match(data, start)
        if found is None or found[2] in records:
            raise _unreadable("a header says what none should")
        stop = start + int(found[1])
        if stop > len(data) or stop <= found.end() or data[stop - 1 : stop] != b"\n":
            raise _unreadable("a header is damaged")
        records[found[2]] = data[found.end() : stop - 1]
        start = stop
    return records


def _member(header: _Header, records: dict[bytes, bytes], offset: int) -> Member:
    try:
        name = records.get(b"path", header.name).decode()
    except UnicodeDecodeError:
        raise _unreadable("a name is not UTF-8") from None
    if header.kind not in (b"0", b"5"):
        raise ProtocolError(f"the archive's member {name[:_SHOWN_CHARS]!r} is neither a regular file nor a directory")
    size = records.get(b"size", b"%d" % header.size_bytes)
    is_directory = header.kind == b"5"
    if not _SIZE.fullmatch(size) or (is_directory and int(size)):
        raise _unreadable("a size is damaged")
    name = name.removesuffix("/") if is_directory else name
    return Member(name, int(size), offset, is_directory, bool(header.mode & 0o100))


def _unreadable(why: str) -> ProtocolError:
    return ProtocolError(f"the archive cannot be read: {why}")
