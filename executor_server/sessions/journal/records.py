"""Records of a journal as bytes: each is checked before it is used, and the head holds the verified length.

Invariant: the records that are read from segments are an unbroken prefix of those that were written, at least up to the
head. Everything else is damage, and is reported.

Checksums. A record is a frame, followed by the checksum of all records of the segment up to and including it. The
checksum is a CRC-32 that starts from the session's id and the segment's number and continues from record to record. So
it detects a record that was changed, swapped, repeated or removed, or that comes from another segment or session, and
rejects all that follow. CRC-32 is in the standard library and runs at 3 GB/s. It protects against failing disks and
file systems, not against an attacker who may write the state directory: the attacker could compute any checksum.

The head. A checksum can't distinguish a record torn by a kill from a changed length field, and does not notice that a
file lost its end. The head does: a file of 28 bytes, overwritten after each record, with the number of the last
segment, its size and its checksum at that size. Up to that size, records must be whole. Only after it may a record be
torn; a torn record has had no effect, since `append` returns after the head is written. A kill between the two leaves
the head one record behind, never ahead. The last segment's snapshot lists the size and checksum of the segments before
it, so an older version of a segment is noticed, too.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from executor_server.guest.wire.frames import MAX_FRAME_BYTES, Frame, FrameDecoder, FrameError

FORMAT = b"rxj1"
"""The format of head and segments; a journal of another format is not read."""
HEAD = "head"

# Format, last segment, its size, its checksum there, checksum of these.
_HEAD = struct.Struct("!4sQQII")
_CHECKSUM = struct.Struct("!I")
CHECKSUM_BYTES = _CHECKSUM.size


class SegmentError(Exception):
    """The segments can't be read further; the message is a clause for the session's owner."""


def damaged(what: str) -> SegmentError:
    return SegmentError(f"its journal is damaged: {what}")


@dataclass(frozen=True)
class Extent:
    """The size of a segment, and the checksum of its content."""

    size_bytes: int
    checksum: int


@dataclass(frozen=True)
class Head:
    """The number of the last segment, and its least extent."""

    segment: int
    extent: Extent


@dataclass
class Records:
    """The valid records of a segment, and their extent. `damage` is the reason why the next record is not valid."""

    frames: list[Frame] = field(default_factory=list)
    extent: Extent = Extent(0, 0)
    damage: str = ""


# -- writing ----------------------------------------------------------------------------------------------------------


def first_checksum(session_id: str, number: int) -> int:
    """Returns the checksum that a segment starts from."""
    return zlib.crc32(b"%s %s %d" % (FORMAT, session_id.encode(), number))


def added_checksum(checksum: int, first: bytes | memoryview, second: bytes = b"") -> tuple[int, bytes]:
    """Returns the checksum with one more record, given in one or two pieces, and the bytes that follow the record."""
    checksum = zlib.crc32(first, checksum)
    if second:
        checksum = zlib.crc32(second, checksum)
    return checksum, _CHECKSUM.pack(checksum)


def encode_head(session_id: str, segment: int, size_bytes: int, checksum: int) -> bytes:
    """Encodes the head. It is overwritten in place; a kill can't tear so short a write."""
    packed = _HEAD.pack(FORMAT, segment, size_bytes, checksum, 0)[:-CHECKSUM_BYTES]
    return packed + _CHECKSUM.pack(zlib.crc32(packed, zlib.crc32(session_id.encode())))


def encode_listing(segments: Mapping[int, Extent]) -> bytes:
    """Encodes the list of segments that a snapshot needs; it precedes the snapshot's own bytes."""
    return json.dumps({str(number): [each.size_bytes, each.checksum] for number, each in segments.items()}).encode()


# -- reading ----------------------------------------------------------------------------------------------------------


def read_head(path: Path, session_id: str) -> Head:
    """Reads and checks the head. Raises SegmentError, OSError."""
    try:
        data = read_file(path, _HEAD.size)
    except FileNotFoundError as error:
        raise SegmentError(
            "its journal has no head: it was removed, or a daemon of another version wrote it"
        ) from error
    if len(data) != _HEAD.size or not data.startswith(FORMAT):
        raise damaged("its head is of another form")
    _, segment, size_bytes, checksum, _ = _HEAD.unpack(data)
    if data != encode_head(session_id, segment, size_bytes, checksum):
        raise damaged("its head does not fit its checksum")
    return Head(segment, Extent(size_bytes, checksum))


def read_listing(snapshot: Frame) -> dict[int, Extent]:
    """Reads the list of segments that a snapshot needs. Raises SegmentError."""
    try:
        listed = json.loads(snapshot.body[: snapshot.head.integer("segments")])
        return {int(number): Extent(int(size), int(checksum)) for number, (size, checksum) in listed.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("a snapshot without its segments") from error


def snapshot_body(snapshot: Frame) -> bytes:
    """Returns the body of a snapshot, without the list of segments. Raises FrameError."""
    return snapshot.body[snapshot.head.integer("segments") :]


def read_records(data: bytes, session_id: str, number: int, kinds: frozenset[int], least_bytes: int) -> Records:
    """Reads records up to the first invalid one. A torn record is damage unless it is beyond `least_bytes`."""
    checksum, position, found = first_checksum(session_id, number), 0, Records()
    view = memoryview(data)
    while position < len(data):
        length = 4 + int.from_bytes(view[position : position + 4], "big")
        end = position + length + CHECKSUM_BYTES
        if len(data) - position < 4 or (end > len(data) and length <= 4 + MAX_FRAME_BYTES):
            break  # torn
        if length > 4 + MAX_FRAME_BYTES:
            found.damage = "a record has an impossible length"
            break
        record = view[position : end - CHECKSUM_BYTES]
        checksum, expected = added_checksum(checksum, record)
        if expected != view[end - CHECKSUM_BYTES : end]:
            found.damage = "a record does not fit its checksum"
            break
        try:
            found.frames += FrameDecoder(kinds).feed(record)
        except FrameError as error:
            found.damage = str(error)
            break
        position = end
        found.extent = Extent(position, checksum)
    if found.extent.size_bytes < least_bytes and not found.damage:
        found.damage = f"a segment has {found.extent.size_bytes} bytes instead of {least_bytes}"
    return found


def read_file(path: Path, most_bytes: int) -> bytes:
    """Reads a file of the journal. Raises OSError, SegmentError."""
    # A pipe must not hang the start, a link must not lead elsewhere, and a huge file must not be read into memory; each
    # would let one damaged session stop the daemon.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            raise damaged("a file is not one of ours")
        return file.read(most_bytes)
