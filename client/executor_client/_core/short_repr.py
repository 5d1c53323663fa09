"""Gives public objects one short line at a prompt, and results a page in a notebook, with all text escaped.

HTML from a sandbox is shown as text only; `Display.data` has the HTML.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import PIL.Image

    from executor_client.results import ExecutionResult

FIELD_CHARS_MAX = 120
REPR_CHARS_MAX = 500
PAGE_CHARS_MAX = 10_000
PAGE_IMAGES_MAX = 10
SCREEN_PIXELS = (1600, 1600)

_COMPARED = (type(None), bool, int, float, str, bytes, tuple)
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


class ShortRepr:
    """Shows the fields that differ from their defaults, each cut. A dataclass omits those with `repr=False`; another
    class lists attributes in `_shows`, such as "_info.session_id", which do no I/O and hold no secret."""

    _shows: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__repr__ = ShortRepr.__repr__  # type: ignore[method-assign]  # else a dataclass writes its own

    def __repr__(self) -> str:
        from executor_client._core.value_text import cut_text, one_line

        shown = ", ".join(f"{name}={cut_text(value, FIELD_CHARS_MAX)}" for name, value in self._shown())
        return one_line(f"{type(self).__name__}({shown})", REPR_CHARS_MAX)

    def _shown(self) -> Iterator[tuple[str, Any]]:
        of_class: dict[str, dataclasses.Field[Any]] = getattr(self, "__dataclass_fields__", {})
        fields: list[tuple[str, Any]] = [(name, each.default) for name, each in of_class.items() if each.repr]
        for path, default in fields or [(name, None) for name in self._shows]:
            try:
                value = attrgetter(path)(self)
            except AttributeError:  # there is no session yet, or the object's `__init__` failed
                continue
            if value is not default and not (type(value) in _COMPARED and value in (default, "")):
                yield path.rpartition(".")[2].lstrip("_"), value


def png_of(image: PIL.Image.Image) -> bytes:
    """Returns a newly encoded PNG, no larger than a screen."""
    shown = image.copy()
    shown.thumbnail(SCREEN_PIXELS)
    file = io.BytesIO()
    (shown if shown.mode in _PNG_MODES else shown.convert("RGBA")).save(file, "PNG")
    return file.getvalue()


def images_of(result: ExecutionResult) -> list[PIL.Image.Image]:
    """Returns the first images of a result, and its output if that is another image."""
    images = result.images[: PAGE_IMAGES_MAX - 1]
    if not type(result.output).__module__.startswith("PIL."):
        return images
    is_among = any(each.tobytes() == result.output.tobytes() for each in images if each.size == result.output.size)
    return images if is_among else [*images, result.output]


def page_of(result: ExecutionResult) -> str:
    """Returns HTML: the result's line, logs and traceback as text, and its images."""
    texts = [repr(result), result.logs, result.error.traceback if result.error else ""]
    cut = [text if len(text) <= PAGE_CHARS_MAX else f"{text[:PAGE_CHARS_MAX]}…" for text in texts if text]
    images = [base64.b64encode(png_of(image)).decode() for image in images_of(result)]
    shown = [f'<img src="data:image/png;base64,{data}">' for data in images]
    return "".join([*(f"<pre>{html.escape(text)}</pre>" for text in cut), *shown])
