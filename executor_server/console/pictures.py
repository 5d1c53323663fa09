"""Images of sandboxes as a browser may get them: checked PNG and JPEG files, held for a while.

An image is only passed on if its header is whole and its size within bounds, and then without its metadata. SVG and all
other formats are refused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from executor_api.values.image_files import UnfitImage
from executor_client._core.images import read_image

HELD_BYTES_MAX = 128 << 20
"""Bytes of all images; the least recently shown one is dropped first."""
IMAGE_BYTES_MAX = 16 << 20
PIXELS_MAX = 25_000_000
"""Pixels of one image: a browser takes four bytes for each."""


@dataclass(frozen=True)
class Picture:
    """A checked image, named by its hash; or the reason why it is not shown."""

    mime_type: str = ""
    name: str = ""
    width: int = 0
    height: int = 0
    refusal: str = ""

    @property
    def path(self) -> str:
        return f"/pictures/{self.name}"


def checked(data: bytes, mime_type: str) -> tuple[Picture, bytes]:
    """Returns an image with the bytes that a browser may get; none if it is refused."""
    if len(data) > IMAGE_BYTES_MAX:
        return Picture(refusal=f"it has {len(data):,} bytes; at most {IMAGE_BYTES_MAX:,} are shown"), b""
    try:
        width, height, parts = read_image(data, mime_type)
    except UnfitImage as unfit:
        return Picture(refusal=str(unfit)), b""
    if width * height > PIXELS_MAX:
        return Picture(refusal=f"{width}x{height} pixels are too many"), b""
    pixels = b"".join(parts)
    return Picture(mime_type, hashlib.sha256(mime_type.encode() + pixels).hexdigest(), width, height), pixels


class Pictures:
    """The images that pages show."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0

    def hold(self, picture: Picture, pixels: bytes) -> None:
        """Holds a checked image, so that browsers can get it."""
        if picture.refusal:
            return
        if picture.name not in self._held:
            self._held[picture.name] = (picture.mime_type, pixels)
            self._bytes += len(pixels)
        self._held.move_to_end(picture.name)
        while self._bytes > HELD_BYTES_MAX:
            _, (_, gone) = self._held.popitem(last=False)
            self._bytes -= len(gone)

    def route(self) -> Route:
        async def picture(request: Request) -> Response:
            found = self._held.get(request.path_params["name"])
            if found is None:
                return Response("This image is no longer held. Load the page again.", 404, media_type="text/plain")
            mime_type, data = found
            self._held.move_to_end(request.path_params["name"])
            return Response(data, media_type=mime_type, headers={"cross-origin-resource-policy": "same-origin"})

        return Route("/pictures/{name:str}", picture)
