"""Reads an archive that was written in a sandbox: the headers that the guest writes, and nothing else.

A header is ustar, with at most one pax header before it that gives a path or a size. Nothing is read before its length
is known to be small, and the position only ever goes forward, so that a forged archive costs neither memory nor time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from executor_api.tar import BLOCK_BYTES, PAX_BYTES_MAX, TarError, decimal, padding, parse_header, parse_records
from executor_client.errors import ProtocolError

_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Member:
    """A member and the place of its content. Its name is whatever the archive says."""

    name: str
    size_bytes: int
    offset: int
    is_directory: bool
    is_executable: bool


def read_members(archive: BinaryIO) -> Iterator[Member]:
    """Yields the members, in order. Raises ProtocolError for bytes that are no such archive, or break off."""
    try:
        yield from _members(archive)
    except TarError as error:
        raise ProtocolError(f"the archive cannot be read: {error}") from error


def _members(archive: BinaryIO) -> Iterator[Member]:
    end = archive.seek(0, os.SEEK_END)
    position = 0
    while (block := _read(archive, position, BLOCK_BYTES, end)) != bytes(BLOCK_BYTES):
        kind, name, size_bytes, mode = parse_header(block, strict=True)
        records: dict[str, bytes] = {}
        position += BLOCK_BYTES
        if kind == b"x":
            if size_bytes > PAX_BYTES_MAX:
                raise TarError(f"a header of {size_bytes} bytes")
            records = parse_records(_read(archive, position, size_bytes, end), only=("path", "size"))
            position += size_bytes + padding(size_bytes)
            kind, name, size_bytes, mode = parse_header(_read(archive, position, BLOCK_BYTES, end), strict=True)
            position += BLOCK_BYTES
        if "size" in records:
            size_bytes = decimal(records["size"])
        member = _member(kind, records.get("path", name), size_bytes, mode, position)
        yield member
        position += member.size_bytes + padding(member.size_bytes)


def _read(archive: BinaryIO, position: int, size_bytes: int, end: int) -> bytes:
    if position + size_bytes > end:
        raise TarError("it breaks off before its end")
    archive.seek(position)
    return archive.read(size_bytes)


def _member(kind: bytes, raw_name: bytes, size_bytes: int, mode: int, offset: int) -> Member:
    try:
        name = raw_name.decode()
    except UnicodeDecodeError:
        raise TarError("a name is not UTF-8") from None
    if kind not in (b"0", b"5"):
        raise ProtocolError(f"the archive's member {name[:_SHOWN_CHARS]!r} is neither a regular file nor a directory")
    is_directory = kind == b"5"
    if is_directory and size_bytes:
        raise TarError("a size is damaged")
    name = name.removesuffix("/") if is_directory else name
    return Member(name, size_bytes, offset, is_directory, bool(mode & 0o100))
