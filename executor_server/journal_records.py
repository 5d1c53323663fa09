"""Records of a journal as bytes: each is checked before it is believed, and the head says how far they go.

Theory of operation. A segment is a sequence of records; a record is a frame and the checksum of all records of the
segment up to it. The checksum is CRC-32, carried on from record to record and begun with the session's id and the
segment's number, so a record that was changed, swapped, repeated or left out, or that comes from another segment or
session, does not fit, and nor does anything after it. CRC-32 is of the standard library and runs at 3 GB/s, a third
more than SHA-256 where the processor helps; it is meant for disks and file systems that fail. Whoever may write the
state directory could compute any checksum without a key, and a key would lie beside it.

A checksum alone does not tell a torn record, which a killed daemon leaves at the end, from a length that was changed,
nor a file that lost its end. That is the head's part: 36 bytes beside the segments, written after each record, which
name the last segment, its size and its checksum there. What the head vouches for must be there in whole; only beyond
it a record may be torn, and none of those had taken effect. Killed between a record and the head, the head is one
record behind. Segments before the last one are vouched for by the last one's snapshot, with size and checksum.
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

from executor_server.guest.frames import MAX_FRAME_BYTES, Frame, FrameDecoder, FrameError

FORMAT = b"rxj1"
"""The format of the head and the segments; a journal of another one is not read."""
HEAD = "head"

# Format, last segment, its size, its checksum there, checksum of these.
_HEAD = struct.Struct("!4sQQII")
_CHECKSUM = struct.Struct("!I")
CHECKSUM_BYTES = _CHECKSUM.size


class TapeError(Exception):
    """The tape can't be read on; the message is a clause for the session's owner."""


def damaged(what: str) -> TapeError:
    return TapeError(f"its journal is damaged: {what}")


@dataclass(frozen=True)
class Extent:
    """How far a segment goes, and the checksum of all that is in it."""

    size_bytes: int
    checksum: int


@dataclass(frozen=True)
class Head:
    """The last segment, and how far it goes at least."""

    segment: int
    extent: Extent


@dataclass
class Records:
    """The records of a segment that can be believed, and how far they go. `damage` says why what follows can't be."""

    frames: list[Frame] = field(default_factory=list)
    extent: Extent = Extent(0, 0)
    damage: str = ""


# -- writing ----------------------------------------------------------------------------------------------------------


def first_checksum(session_id: str, number: int) -> int:
    """The checksum that a segment begins with."""
    return zlib.crc32(b"%s %s %d" % (FORMAT, session_id.encode(), number))


def added_checksum(checksum: int, first: bytes | memoryview, second: bytes = b"") -> tuple[int, bytes]:
    """The checksum with one more record, which may come in two pieces, and the bytes that follow the record."""
    checksum = zlib.crc32(first, checksum)
    if second:
        checksum = zlib.crc32(second, checksum)
    return checksum, _CHECKSUM.pack(checksum)


def encode_head(session_id: str, segment: int, size_bytes: int, checksum: int) -> bytes:
    """The head, to be overwritten in place: a daemon that is killed has written so few bytes in whole or not at all."""
    said = _HEAD.pack(FORMAT, segment, size_bytes, checksum, 0)[:-CHECKSUM_BYTES]
    return said + _CHECKSUM.pack(zlib.crc32(said, zlib.crc32(session_id.encode())))


def encode_listing(segments: Mapping[int, Extent]) -> bytes:
    """The segments that a snapshot relies on; it goes before the snapshot's own bytes."""
    return json.dumps({str(number): [each.size_bytes, each.checksum] for number, each in segments.items()}).encode()


# -- reading ----------------------------------------------------------------------------------------------------------


def read_head(path: Path, session_id: str) -> Head:
    """Raises TapeError, OSError."""
    try:
        data = read_file(path, _HEAD.size)
    except FileNotFoundError as error:
        raise TapeError("its journal has no head: it was removed, or a daemon of another version wrote it") from error
    if len(data) != _HEAD.size or not data.startswith(FORMAT):
        raise damaged("its head is of another form")
    _, segment, size_bytes, checksum, _ = _HEAD.unpack(data)
    if data != encode_head(session_id, segment, size_bytes, checksum):
        raise damaged("its head does not fit its checksum")
    return Head(segment, Extent(size_bytes, checksum))


def read_listing(snapshot: Frame) -> dict[int, Extent]:
    """The segments that a snapshot relies on. Raises TapeError."""
    try:
        listed = json.loads(snapshot.body[: snapshot.head.integer("segments")])
        return {int(number): Extent(int(size), int(checksum)) for number, (size, checksum) in listed.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise damaged("a snapshot without its segments") from error


def snapshot_body(snapshot: Frame) -> bytes:
    """Return the body of a snapshot, without the segments that it relies on. Raises FrameError."""
    return snapshot.body[snapshot.head.integer("segments") :]


def read_records(data: bytes, session_id: str, number: int, kinds: frozenset[int], least_bytes: int) -> Records:
    """As many records as can be believed. A record that is torn is no damage when it lies beyond `least_bytes`."""
    checksum, position, found = first_checksum(session_id, number), 0, Records()
    view = memoryview(data)
    while position < len(data):
        length = 4 + int.from_bytes(view[position : position + 4], "big")
        end = position + length + CHECKSUM_BYTES
        if len(data) - position < 4 or (end > len(data) and length <= 4 + MAX_FRAME_BYTES):
            break  # torn
        if length > 4 + MAX_FRAME_BYTES:
            found.damage = "a record of a length that none has"
            break
        record = view[position : end - CHECKSUM_BYTES]
        checksum, said = added_checksum(checksum, record)
        if said != view[end - CHECKSUM_BYTES : end]:
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
        found.damage = f"of {least_bytes} bytes of a segment {found.extent.size_bytes} are there"
    return found


def read_file(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file of ours. Raises OSError, TapeError."""
    # It is our own file; still, a pipe put there must not hang the start, nor a link lead elsewhere.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            raise damaged("a file is no file of ours")
        return file.read(most_bytes)
