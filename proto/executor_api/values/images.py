"""Encodes and decodes PIL images: as PNG where that keeps every pixel, as raw pixels for the other modes.

A PNG is read by Pillow's PNG reader only, and only after `image_files` has walked its chunks: the header names as many
pixels as are allowed and as the node announced, and there is nothing in it but header, palette, transparency and
pixels. The metadata of an image (`info`: comments, profiles, EXIF) is not sent.
"""

from __future__ import annotations

import io
import struct
import sys

from executor_api.values.image_files import MAX_SIDE, UnfitImage, png_parts
from executor_api.values.kinds import BYTES_ENTRY, Kind, get_bytes, put_bytes, without_library
from executor_api.values.limits import DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

_PNG_MODES = frozenset(["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
# Bytes per pixel.
_RAW_MODES = {"I": 4, "F": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "HSV": 3, "RGBa": 4, "La": 2, "RGBX": 4}
_STRIP_BYTES = 1 << 20


def lower(value: Any, writer: Writer, *, bases: bool = False) -> Lowered | None:
    """Lowers an image of Pillow's own classes; with `bases`, also of another author's subclass."""
    image_module: Any = sys.modules.get("PIL.Image")
    kind = type(value)
    if image_module is None or not issubclass(kind, image_module.Image):
        return None
    if not bases and not kind.__module__.startswith("PIL."):
        return None
    if value.size[0] * value.size[1] > writer.limits.image_pixels:
        return None  # before a file is read
    value.load()
    width, height = value.size
    pixels = width * height
    if not pixels or max(width, height) > MAX_SIDE or not _is_carried(value) or not writer.take_pixels(pixels):
        return None
    if value.mode in _PNG_MODES:
        plain = value.copy()
        plain.info = {name: value.info[name] for name in ("transparency",) if name in value.info}
        file = io.BytesIO()
        plain.save(file, "PNG", compress_level=1)
        return ["pil.png", value.mode, width, height, _put_pixels(writer, file.getbuffer())], (), False
    return ["pil.raw", value.mode, width, height, _put_pixels(writer, _raw_pixels(value))], (), False


def _put_pixels(writer: Writer, data: memoryview) -> int | str:
    entry = put_bytes(writer, data)
    if type(entry) is int:
        writer.add_unfolded_bytes(-data.nbytes)  # no text shows them
    return entry


def _get_pixels(reader: Reader, entry: int | str) -> bytes | memoryview:
    data = get_bytes(reader, entry)
    if type(entry) is int:
        reader.add_unfolded_bytes(-len(data))
    return data


def _raw_pixels(image: Any) -> memoryview:
    """Returns the bytes of `tobytes`, read strip by strip; `tobytes` would hold all of them twice for a moment."""
    width, height = image.size
    row_bytes = width * _RAW_MODES[image.mode]
    rows = max(1, _STRIP_BYTES // row_bytes)
    pixels = bytearray(height * row_bytes)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top * row_bytes : bottom * row_bytes] = image.crop((0, top, width, bottom)).tobytes()
    return memoryview(pixels)


def _is_carried(image: Any) -> bool:
    if image.mode == "P":
        return bool(image.palette.mode == "RGB")
    return image.mode in _PNG_MODES or image.mode in _RAW_MODES


def _make_png(reader: Reader, children: list[Any], mode: str, width: int, height: int, data: int | str) -> object:
    if mode not in _PNG_MODES:
        raise DecodeError("an image has a mode that PNG is not used for")
    _claim(reader, width, height)
    png = memoryview(_get_pixels(reader, data))
    _check_png(png, width, height)
    image_module = _import_image()
    if image_module is None:
        shown = f"image of {width} x {height} pixels, mode {mode}"
        return without_library(reader, "Pillow", "PIL.Image.Image", shown)
    try:
        image = image_module.open(_ViewFile(png), formats=["PNG"])
        if image.size != (width, height):
            raise DecodeError("an image is not as large as it says")
        image.load()
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, image_module.DecompressionBombError) as error:
        raise DecodeError(f"an image cannot be read: {error}") from error
    # A plain image, since one that was read from a file keeps the file. As `copy` does, without copying the pixels.
    plain = image._new(image.im)
    plain.info = {name: image.info[name] for name in ("transparency",) if name in image.info}
    if plain.mode == "I" and mode == "I;16":  # as older versions of Pillow read 16 bits of grey
        plain = plain.convert("I;16")
    if plain.mode != mode:
        raise DecodeError(f"an image has mode {plain.mode}, not {mode}")
    return plain


def _make_raw(reader: Reader, children: list[Any], mode: str, width: int, height: int, data: int | str) -> object:
    if mode not in _RAW_MODES:
        raise DecodeError("an image has a mode that raw pixels are not used for")
    _claim(reader, width, height)
    raw = _get_pixels(reader, data)
    if len(raw) != width * height * _RAW_MODES[mode]:
        raise DecodeError("an image does not have the bytes that its size and mode need")
    image_module = _import_image()
    if image_module is None:
        shown = f"image of {width} x {height} pixels, mode {mode}"
        return without_library(reader, "Pillow", "PIL.Image.Image", shown)
    return image_module.frombytes(mode, (width, height), raw)


def _claim(reader: Reader, width: int, height: int) -> None:
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise DecodeError("an image has no proper size")
    reader.take_pixels(width * height)


class _ViewFile:
    """A file for Pillow over bytes in memory, which are not copied: a large image is not held twice."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        end = len(self._view) if size < 0 else self._position + size
        data = bytes(self._view[self._position : end])
        self._position += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, len(self._view))[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position


def _check_png(png: memoryview, width: int, height: int) -> None:
    """Checks the chunks of a PNG without unpacking any. Raises DecodeError."""
    try:
        *size, parts = png_parts(png)
    except UnfitImage as error:
        raise DecodeError(f"an image cannot be read: {error}") from error
    if size != [width, height]:
        raise DecodeError("a PNG is not as large as it says")
    if sum(map(len, parts)) != len(png):
        raise DecodeError("a PNG holds something that does not belong there")


def _import_image() -> Any:
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image


_HEADER = (str, int, int, BYTES_ENTRY)
KINDS = {
    "pil.png": Kind(_make_png, header=_HEADER),
    "pil.raw": Kind(_make_raw, header=_HEADER),
}
