"""Images that the program shows: figures of matplotlib, and what it gives to display()."""

from __future__ import annotations

import sys

from executor_api.limits import IMAGE_BYTES_MAX

_DPI = 100

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Emit = Callable[[str, str, bytes], None]
    """Sends (mime type, source, data)."""

_emit: list[Emit] = []


def connect(emit: Emit) -> None:
    """Sets where images go."""
    _emit[:] = [emit]


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
        _send("image/png", "display", _png_of(item))
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


def show_figure(figure: Any, source: str = "figure") -> None:
    """Sends a figure of matplotlib as PNG."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, bbox_inches="tight")
    _send("image/png", source, buffer.getvalue())


def show_open_figures() -> None:
    """Sends the open figures of pyplot, in the order of their numbers, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in list(pyplot.get_fignums()):
        figure = pyplot.figure(number)
        if figure.get_axes() or figure.texts or figure.images:
            show_figure(figure)
        pyplot.close(figure)


def _send(mime: str, source: str, data: bytes) -> None:
    if len(data) > IMAGE_BYTES_MAX:
        print(f"[an image of {len(data)} bytes is not shown: the limit is {IMAGE_BYTES_MAX}]", file=sys.stderr)
        return
    for stream in (sys.stdout, sys.stderr):
        # Output without an end of line belongs before the image, too.
        if getattr(stream, "closed", None) is False:  # a program may have put anything here
            stream.flush()
    for emit in _emit:
        emit(mime, source, data)
