"""Decodes images from the sandbox. The header is checked here before an image library sees the data.

Only PNG and JPEG are decoded, only up to a number of pixels, and only when the library finds what the header says. Any
other image becomes an entry with the problem: a hostile image never makes `execute` fail.
"""

from __future__ import annotations

import io
import struct
import warnings
from typing import TYPE_CHECKING

from executor_client._core.limits import IMAGE_PIXELS_MAX
from executor_client.results import Image

if TYPE_CHECKING:
    import PIL.Image

_PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_JPEG_START = b"\xff\xd8\xff"
_JPEG_SEGMENTS_MAX = 1_000
# Frame headers of the JPEG kinds that decoders know: baseline, extended, progressive.
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_PIL_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG"}


class _Refused(Exception):
    """The image is not decoded; the message says why."""


def decode_image(data: bytes, mime_type: str, source: str, *, pixels_left: int) -> Image:
    """Decodes an image within `pixels_left`. Never raises: an image that is refused has a `problem` and no `pil`."""
    width = height = 0
    try:
        width, height = _dimensions(data, mime_type)
        if width < 1 or height < 1:
            raise _Refused("it has no pixels")
        if width * height > min(IMAGE_PIXELS_MAX, pixels_left):
            raise _Refused(f"{width}x{height} pixels are too many")
        decoded = _decode(data, _PIL_FORMATS[mime_type], (width, height))
    except _Refused as refused:
        return Image(data, mime_type[:100], source[:100], width, height, problem=str(refused))
    return Image(data, mime_type, source[:100], width, height, decoded)


def _dimensions(data: bytes, mime_type: str) -> tuple[int, int]:
    if mime_type == "image/png":
        if not data.startswith(_PNG_START) or len(data) < 24:
            raise _Refused("it is no PNG")
        return struct.unpack_from(">II", data, 16)
    if mime_type == "image/jpeg":
        return _jpeg_dimensions(data)
    raise _Refused("its type is neither image/png nor image/jpeg")


def _jpeg_dimensions(data: bytes) -> tuple[int, int]:
    if not data.startswith(_JPEG_START):
        raise _Refused("it is no JPEG")
    position = 2
    for _ in range(_JPEG_SEGMENTS_MAX):
        if len(data) < position + 9 or data[position] != 0xFF:
            break
        marker, length = data[position + 1], struct.unpack_from(">H", data, position + 2)[0]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return width, height
        position += 2 + length
    raise _Refused("it is no JPEG that we know")


def _decode(data: bytes, image_format: str, size: tuple[int, int]) -> PIL.Image.Image:
    import PIL.Image

    try:
        with warnings.catch_warnings():
            # The library warns of odd data; odd data is refused.
            warnings.simplefilter("error")
            image = PIL.Image.open(io.BytesIO(data), formats=[image_format])
            if image.size != size:
                raise _Refused("its headers contradict each other")
            image.load()
    except Exception as error:
        # Decoders raise all kinds of errors on broken data.
        raise _Refused(f"it cannot be decoded: {type(error).__name__}") from error
    return image
