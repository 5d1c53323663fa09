"""Checks images from the sandbox on arrival, and decodes them on demand.

Only PNG and JPEG are decoded, up to a number of pixels, and only if the library agrees with the header. Any other image
becomes an entry with the problem: a hostile image never makes `execute` fail.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from executor_api.values.image_files import UnfitImage, jpeg_parts, png_parts
from executor_client._core.limits import IMAGE_PIXELS_MAX
from executor_client.results import Image

if TYPE_CHECKING:
    import PIL.Image

    from executor_api.values.image_files import Parts

_READERS = {"image/png": png_parts, "image/jpeg": jpeg_parts}


def check_image(data: bytes, mime_type: str, source: str, *, pixels_left: int = IMAGE_PIXELS_MAX) -> Image:
    """Returns an image with checked headers. Never raises; `refusal` has the reason for a refused image."""
    width = height = 0
    try:
        width, height, _ = read_image(data, mime_type)
        if width * height > min(IMAGE_PIXELS_MAX, pixels_left):
            raise UnfitImage(f"{width}x{height} pixels are too many")
    except UnfitImage as unfit:
        return Image(data, mime_type[:100], source[:100], width, height, refusal=str(unfit))
    return Image(data, mime_type, source[:100], width, height)


def decode(image: Image) -> PIL.Image.Image | str:
    """Returns the pixels of a checked image, or the reason why it has none."""
    if image.refusal:
        return image.refusal
    import PIL.Image

    try:
        *size, parts = read_image(image.data, image.mime_type)
        with warnings.catch_warnings():
            # The library warns of odd data; odd data is refused.
            warnings.simplefilter("error")
            file = io.BytesIO(b"".join(parts))
            decoded = PIL.Image.open(file, formats=[image.mime_type.removeprefix("image/")])
            if decoded.size != tuple(size):
                return "its headers contradict each other"
            decoded.load()
    except Exception as error:  # noqa: BLE001 - decoders raise all kinds of errors on broken data
        return f"it cannot be decoded: {type(error).__name__}"
    return decoded


def read_image(data: bytes, mime_type: str) -> tuple[int, int, Parts]:
    """Returns the width, the height, and the parts of the file that show the image. Raises UnfitImage."""
    reader = _READERS.get(mime_type)
    if reader is None:
        raise UnfitImage("its type is neither image/png nor image/jpeg")
    return reader(memoryview(data))
