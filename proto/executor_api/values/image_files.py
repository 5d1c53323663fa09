"""Walks the parts of a PNG or JPEG file, so that an image library gets nothing but pixels.

The cost of decoding must follow the number of pixels. A small file can cost a library minutes: by repeated scans of a
progressive JPEG, each of which goes through all pixels; by millions of empty chunks; by packed comments and profiles;
by frames. Nothing is unpacked here, and metadata, which no picture needs, is left out.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    Parts = list[memoryview]

MAX_SIDE = 1 << 20
MAX_PNG_CHUNKS = 20_000
MAX_JPEG_SEGMENTS = 1_000
# Encoders write about ten. A scan of 64 million pixels takes 40 ms.
MAX_JPEG_SCANS = 32

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHUNK_OVERHEAD_BYTES = 12
_PNG_CHUNKS = frozenset([b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"])
# Frame headers of the JPEG kinds that decoders know: baseline, extended, progressive.
_JPEG_FRAMES = frozenset([0xC0, 0xC1, 0xC2])
# Those, the tables, the interval of restarts, and the two application segments that say how to read the colours.
_JPEG_SEGMENTS = _JPEG_FRAMES | {0xC4, 0xDB, 0xDD, 0xE0, 0xEE}
_JPEG_SCAN = 0xDA


class UnfitImage(ValueError):
    """The file is not decoded; the message is a clause that says why and calls the file "it"."""


def png_parts(data: memoryview) -> tuple[int, int, Parts]:
    """Returns width, height, and the parts of the file that make its pixels. Raises UnfitImage."""
    if bytes(data[:8]) != _PNG_SIGNATURE:
        raise UnfitImage("it is no PNG")
    width = height = 0
    position, kind, parts = 8, b"", [data[:8]]
    for _ in range(MAX_PNG_CHUNKS):
        if kind == b"IEND":
            break
        if len(data) - position < _CHUNK_OVERHEAD_BYTES:
            raise UnfitImage("it is cut off")
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + length + _CHUNK_OVERHEAD_BYTES
        if end > len(data):
            raise UnfitImage("it is cut off")
        if (kind == b"IHDR") != (position == 8) or (kind == b"IHDR" and length != 13):
            raise UnfitImage("its header is not where it belongs")
        if kind == b"IHDR":
            width, height = struct.unpack_from(">II", data, position + 8)
        if kind in _PNG_CHUNKS:
            parts.append(data[position:end])
        position = end
    else:
        raise UnfitImage(f"it has more than {MAX_PNG_CHUNKS:,} chunks")
    _check_sides(width, height)
    return width, height, parts


def jpeg_parts(data: memoryview) -> tuple[int, int, Parts]:
    """Returns width, height, and the parts of the file that make its pixels. Raises UnfitImage."""
    if bytes(data[:3]) != b"\xff\xd8\xff":
        raise UnfitImage("it is no JPEG")
    width = height = 0
    position, parts = 2, [data[:2]]
    for _ in range(MAX_JPEG_SEGMENTS):
        if len(data) < position + 9 or data[position] != 0xFF:
            break
        marker, length = struct.unpack_from(">BH", data, position + 1)
        end = position + 2 + length
        if marker == _JPEG_SCAN and width:
            # An upper bound: within pixels, each 0xFF has a zero behind it.
            if bytes(data[position:]).count(b"\xff\xda") > MAX_JPEG_SCANS:
                raise UnfitImage(f"it has more than {MAX_JPEG_SCANS} scans")
            _check_sides(width, height)
            return width, height, [*parts, data[position:]]
        if marker in _JPEG_FRAMES:
            if width:
                raise UnfitImage("it has two frames")
            height, width = struct.unpack_from(">HH", data, position + 5)
            _check_sides(width, height)
        if marker in _JPEG_SEGMENTS:
            parts.append(data[position:end])
        position = end
    raise UnfitImage("it is no JPEG that we know")


def _check_sides(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise UnfitImage("it has no pixels")
    if max(width, height) > MAX_SIDE:
        raise UnfitImage(f"a side of {max(width, height):,} pixels is too long")
