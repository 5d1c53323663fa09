"""Reads the current page of the browser in a session, by one evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import PIL.Image

from executor_client import EvaluationError
from executor_client._core.images import check_image

URL_CHARS_MAX = 500
"""Characters of an address that are shown to a model: a page can have an address of megabytes."""

# Chrome starts with the page "data:,", which the agent did not open.
PAGE_EXPRESSION = (
    "(lambda driver: None if driver is None or driver.current_url == 'data:,'"
    " else (driver.get_screenshot_as_png(), driver.current_url))(__import__('helium').get_driver())"
)


@dataclass(frozen=True)
class Page:
    """A snapshot of a page: its address, cut to a length, and a picture of its visible part."""

    url: str
    image: PIL.Image.Image = field(repr=False)


def read_page(value: Any) -> Page | None:
    """Returns the page from the value of `PAGE_EXPRESSION`, which the sandbox may forge. Raises EvaluationError."""
    match value:
        case None:
            return None
        case (bytes() as png, str() as url):
            shown = check_image(png, "image/png", "screenshot")
            if shown.pil is None:
                raise EvaluationError(f"the browser's screenshot is invalid: {shown.problem}")
            address = " ".join(url.split())
            return Page(address if len(address) <= URL_CHARS_MAX else f"{address[:URL_CHARS_MAX]}...", shown.pil)
        case _:
            raise EvaluationError(f"the browser returned a {type(value).__name__} instead of a screenshot")
