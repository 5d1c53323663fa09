"""Images from a sandbox are decoded when they are what they say, and refused with a reason when not; never an error."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_client._core.images import decode_image


def encoded(image_format: str, size: tuple[int, int] = (4, 3), mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.new(mode, size, 1).save(file, image_format, **options)
    return file.getvalue()


PNG = encoded("PNG")
JPEG = encoded("JPEG")


def with_size(data: bytes, width: int, height: int) -> bytes:
    """A PNG whose header claims another size, with a good checksum."""
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_of_every_mode_is_decoded(mode: str) -> None:
    image = decode_image(encoded("PNG", mode=mode), "image/png", "figure", pixels_left=100)
    assert image.pil is not None and image.pil.mode == mode
    assert (image.width, image.height, image.problem) == (4, 3, "")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}])
def test_jpeg_is_decoded(options: dict[str, Any]) -> None:
    image = decode_image(encoded("JPEG", **options), "image/jpeg", "display", pixels_left=100)
    assert image.pil is not None and image.pil.size == (4, 3)


@pytest.mark.parametrize(
    ("data", "mime_type", "problem"),
    [
        (b"", "image/png", "no PNG"),
        (b"", "image/jpeg", "no JPEG"),
        (JPEG, "image/png", "no PNG"),
        (PNG, "image/jpeg", "no JPEG"),
        (encoded("GIF"), "image/gif", "neither"),
        (encoded("GIF"), "image/png", "no PNG"),
        (encoded("TIFF"), "image/jpeg", "no JPEG"),
        (PNG[:40], "image/png", "cannot be decoded"),
        (JPEG[:-40], "image/jpeg", "cannot be decoded"),
        (JPEG[:4], "image/jpeg", "no JPEG that we know"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 5_000, "image/jpeg", "no JPEG that we know"),
        (with_size(PNG, 0, 3), "image/png", "no pixels"),
        (with_size(PNG, 60_000, 60_000), "image/png", "60000x60000 pixels are too many"),
        (with_size(PNG, 1 << 31, 1 << 31), "image/png", "too many"),
        (with_size(PNG, 11, 10), "image/png", "11x10 pixels are too many"),
    ],
)
def test_image_that_is_not_what_it_says_becomes_an_entry_with_a_problem(
    data: bytes, mime_type: str, problem: str
) -> None:
    image = decode_image(data, mime_type, "display", pixels_left=100)
    assert image.pil is None
    assert problem in image.problem


@given(start=st.sampled_from([PNG, JPEG]), position=st.integers(0, 800), junk=st.binary(max_size=40))
def test_no_damage_to_an_image_is_an_error(start: bytes, position: int, junk: bytes) -> None:
    damaged = start[:position] + junk + start[position + len(junk) :]
    for mime_type in ("image/png", "image/jpeg"):
        image = decode_image(damaged, mime_type, "display", pixels_left=1_000)
        assert (image.pil is None) == bool(image.problem)
