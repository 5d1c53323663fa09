"""Images that the program shows: figures of matplotlib, and what it gives to display().

What can't be drawn costs the program a line on stderr, and never fails it (drawing.py).
"""

from __future__ import annotations

import os
import sys

from executor_api.limits import IMAGE_BYTES_MAX

from ..checks.control import ControlException
from .drawing import NotDrawn, one_line

_DPI = 100

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .drawing import Drawer

    Emit = Callable[[str, str, bytes], None]
    """Sends (mime type, source, data)."""

_emit: list[Emit] = []
_drawers: list[Drawer] = []


def connect(emit: Emit, drawer: Drawer) -> None:
    """Sets where images go, and by what they are drawn."""
    _emit[:], _drawers[:] = [emit], [drawer]


def begin() -> None:
    """The next execution begins."""
    for drawer in _drawers:
        drawer.begin()


def display(*objects: Any) -> None:
    """Shows images and figures to the caller of the session; anything else is printed."""
    for item in objects:
        if not _show(item):
            print(item if isinstance(item, str) else repr(item))


def _show(item: Any) -> bool:
    figure_type = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    if figure_type is not None and isinstance(item, figure_type):
        show_figure(item, "display")
        return True
    image_type = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image_type is not None and isinstance(item, image_type):
        _send_drawn("an image", "display", lambda: _png_of(item))
        return True
    for method, mime in (("_repr_png_", "image/png"), ("_repr_jpeg_", "image/jpeg")):
        data = _call(getattr(type(item), method, None), item)
        if isinstance(data, bytes):
            _send(mime, "display", data)
            return True
    return False


def _call(method: Any, item: Any) -> Any:
    return method(item) if callable(method) else None


def _png_of(image: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    plain = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    plain.save(buffer, format="PNG")
    return buffer.getvalue()


def _figure_png(figure: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, bbox_inches="tight")
    return buffer.getvalue()


def show_figure(figure: Any, source: str = "figure") -> None:
    """Sends a figure of matplotlib as PNG."""
    _send_drawn("a figure", source, lambda: _figure_png(figure))


def show_open_figures() -> None:
    """Sends the open figures of pyplot, in the order of their numbers, and closes them, whatever their code raises."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    numbers = list(pyplot.get_fignums())
    try:
        while numbers:
            figure = pyplot.figure(numbers[0])
            if figure.get_axes() or figure.texts or figure.images:
                show_figure(figure)
            _close(pyplot, numbers.pop(0))
    finally:
        for number in numbers:
            _refuse("a figure", "the program was stopped before it was drawn")
            _close(pyplot, number)


def _close(pyplot: Any, number: int) -> None:
    try:
        pyplot.close(number)
    except ControlException:
        raise
    except BaseException as error:  # noqa: BLE001 (the border of agent code: its handlers of the figure's end)
        _refuse("the end of a figure", one_line(error))


def _send_drawn(what: str, source: str, paint: Callable[[], bytes]) -> None:
    _flush()  # else the fork would have the unwritten output, too
    try:
        data = _drawers[0].draw(paint)
    except NotDrawn as reason:
        _refuse(what, str(reason))
    else:
        _send("image/png", source, data)


def _refuse(what: str, why: str) -> None:
    """Writes a line for what is not shown; past the program's own stderr, which may be anything."""
    _flush()
    os.write(2, f"[{what} is not shown: {why}]\n".encode("utf-8", "replace"))


def _send(mime: str, source: str, data: bytes) -> None:
    if len(data) > IMAGE_BYTES_MAX:
        _refuse("an image", f"it has {len(data)} bytes; the limit is {IMAGE_BYTES_MAX}")
        return
    _flush()
    for emit in _emit:
        emit(mime, source, data)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Output without an end of line belongs before the image, too.
        if getattr(stream, "closed", None) is False:  # a program may have put anything here
            stream.flush()
