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

from executor_client._core.images import check_image


def encoded(image_format: str, size: tuple[int, int] = (4, 3), mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.new(mode, size, 1).save(file, image_format, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    jpeg = encoded("JPEG", progressive=True)
    return jpeg[:-2] + jpeg[jpeg.rindex(b"\xff\xda") : -2] * count + jpeg[-2:]


def with_chunks(*chunks: bytes) -> bytes:
    """A PNG with these behind its header."""
    return PNG[:33] + b"".join(chunks) + PNG[33:]


PNG = encoded("PNG")
JPEG = encoded("JPEG")


def with_size(data: bytes, width: int, height: int) -> bytes:
    """A PNG whose header claims another size, with a good checksum."""
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_png_of_every_mode_is_decoded(mode: str) -> None:
    image = check_image(encoded("PNG", mode=mode), "image/png", "figure", pixels_left=100)
    assert image.pil is not None and image.pil.mode == mode
    assert (image.width, image.height, image.problem) == (4, 3, "")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0"}])
def test_jpeg_is_decoded(options: dict[str, Any]) -> None:
    image = check_image(encoded("JPEG", **options), "image/jpeg", "display", pixels_left=100)
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
        (PNG[:40], "image/png", "cut off"),
        (JPEG[:-40], "image/jpeg", "no JPEG that we know"),
        (JPEG[:-12], "image/jpeg", "cannot be decoded"),
        (JPEG[:4], "image/jpeg", "no JPEG that we know"),
        (with_scans(1_000), "image/jpeg", "more than 32 scans"),
        (JPEG.replace(b"\xff\xc0", JPEG[JPEG.index(b"\xff\xc0") :][:19] + b"\xff\xc0"), "image/jpeg", "two frames"),
        (with_chunks(*[chunk(b"IDAT", b"")] * 20_000), "image/png", "more than 20,000 chunks"),
        (with_size(PNG, 1, 2 << 20), "image/png", "a side of 2,097,152 pixels is too long"),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 5_000, "image/jpeg", "no JPEG that we know"),
        (with_size(PNG, 0, 3), "image/png", "no pixels"),
        (with_size(PNG, 60_000, 60_000), "image/png", "60000x60000 pixels are too many"),
        (with_size(PNG, 1 << 31, 1 << 31), "image/png", "too long"),
        (with_size(PNG, 11, 10), "image/png", "11x10 pixels are too many"),
    ],
)
def test_image_that_is_not_what_it_says_becomes_an_entry_with_a_problem(
    data: bytes, mime_type: str, problem: str
) -> None:
    image = check_image(data, mime_type, "display", pixels_left=100)
    assert image.pil is None
    assert problem in image.problem


def test_a_library_gets_the_pixels_of_a_file_and_none_of_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed text, profiles and frames cost more than their bytes; a picture that is shown needs none of them."""
    packed = zlib.compress(b"\0" * 1_000_000)
    png = with_chunks(
        chunk(b"acTL", struct.pack(">II", 9, 0)), chunk(b"zTXt", b"a\0\0" + packed), chunk(b"iCCP", b"a\0\0" + packed)
    )
    jpeg = encoded("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0", icc_profile=b"profile", comment=b"words")
    for data, mime_type in ((png, "image/png"), (jpeg, "image/jpeg")):
        image = check_image(data, mime_type, "display", pixels_left=100)
        assert image.pil is not None and image.data == data
        assert {"exif", "icc_profile", "a", "comment"}.isdisjoint(image.pil.info)
        assert getattr(image.pil, "n_frames", 1) == 1


def test_an_image_is_decoded_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver of events must not decode: it may be an event loop, or a thread that answers tool calls."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("it was decoded")

    with monkeypatch.context() as patch:
        patch.setattr(PIL.Image, "open", refuse)
        image = check_image(PNG, "image/png", "figure", pixels_left=100)
        assert (image.width, image.height, image.refusal) == (4, 3, "")
    assert image.pil is not None and image.pil is image.pil


@given(start=st.sampled_from([PNG, JPEG]), position=st.integers(0, 800), junk=st.binary(max_size=40))
def test_no_damage_to_an_image_is_an_error(start: bytes, position: int, junk: bytes) -> None:
    damaged = start[:position] + junk + start[position + len(junk) :]
    for mime_type in ("image/png", "image/jpeg"):
        image = check_image(damaged, mime_type, "display", pixels_left=1_000)
        assert (image.pil is None) == bool(image.problem)
