"""Shows figures of matplotlib, images, and objects that show themselves as in notebooks.

A picture is drawn in a fork (drawing.py). If something can't be shown, the program gets a line on stderr and goes on.
When an object has display data other than a picture, its text goes to the program's output and the data to the client,
unchanged.
"""

from __future__ import annotations

import io
import os
import sys

from executor_api.displays import DISPLAY_TYPE, is_mime_type, pack
from executor_api.limits import DISPLAY_BYTES_MAX, DISPLAY_TYPES_MAX, DISPLAYS_MAX, IMAGE_BYTES_MAX

from ..checks.control import ControlException
from .drawing import NotDrawn, one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping, Optional

    from .drawing import Drawer

    Emit = Callable[[str, str, bytes], str]
    """Sends (mime type, source, data); returns the reason if it is left out."""

_DPI = 100
_TEXT_CHARS_MAX = 10_000  # A figure of plotly prints all its points.
_HTML_FILES_MAX = 1_000
_IMAGES = ("image/png", "image/jpeg")
_METHODS = {
    "_repr_mimebundle_": "",
    "_repr_html_": "text/html",
    "_repr_svg_": "image/svg+xml",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "to_html": "text/html",  # For plots only: altair's charts have no other method.
}
# Functions of libraries that would open a window, by module and class.
_WINDOWS = (("PIL.Image", "Image", "show"), ("plotly.basedatatypes", "BaseFigure", "show"), ("plotly.io", "", "show"))

_client: list[tuple[Emit, Drawer, str]] = []


def connect(emit: Emit, drawer: Drawer, workspace: str) -> None:
    """Sets how images are sent and drawn, and where files are written. Global, as matplotlib's backend needs it."""
    _client[:] = [(emit, drawer, workspace)]


def begin() -> None:
    """Begins the next execution."""
    _client[0][1].begin()
    show_windows()


def show_windows() -> None:
    """Makes imported libraries show their windows to the caller of the session."""
    for module, cls, name in _WINDOWS:
        owner = sys.modules.get(module)
        owner = getattr(owner, cls, None) if cls else owner
        if getattr(owner, name, _show_window) is not _show_window:
            setattr(owner, name, _show_window)


def _show_window(item: Any, *_args: Any, **_options: Any) -> None:
    display(item)


def display(*objects: Any, raw: bool = False, **_options: Any) -> None:
    """Shows images, figures and objects with display data to the caller of the session; prints the text of all others.

    With `raw`, as IPython's: the objects are display data themselves.
    """
    for item in objects:
        figure, image_type = figure_of(item), getattr(sys.modules.get("PIL.Image"), "Image", ())
        if figure is not None:
            show_figure(figure, "display")
        elif isinstance(item, image_type):
            _send_drawn("an image", "display", lambda item=item: _png_of(item))  # type: ignore[misc]
        else:
            _show_bundle(item, item if raw else bundle_of(item))


def _show_bundle(item: Any, bundle: Mapping[str, Any]) -> None:
    image = image_in(bundle)
    if image is not None:
        _send(image[0], "display", image[1])
        return
    texts = texts_of(bundle)
    text = item if isinstance(item, str) else texts.get("text/plain") or repr(item)
    if texts.keys() - {"text/plain"}:
        text = text if len(text) <= _TEXT_CHARS_MAX else f"{text[:_TEXT_CHARS_MAX]}…"
        print(text)
        _send(DISPLAY_TYPE, "display", pack(texts))
    else:
        print(text)


def _png_of(image: Any) -> bytes:
    buffer = io.BytesIO()
    plain = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16") else image.convert("RGB")
    plain.save(buffer, format="PNG")
    return buffer.getvalue()


def _figure_png(figure: Any) -> bytes:
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
    except BaseException as error:  # noqa: BLE001 (the border of agent code: its handlers of close_event)
        _refuse("the end of a figure", one_line(error))


# ---------------------------------------------------------------------------------------------------------------------
# Display data of objects


def figure_of(item: Any) -> Any:
    """Returns the figure of a matplotlib figure, of axes, or of a seaborn grid; None for anything else."""
    kind, module = type(item), sys.modules.get("matplotlib.figure")
    figure_type = getattr(module, "Figure", None)
    if figure_type is None:
        return None
    if not issubclass(kind, figure_type):
        axes_type = getattr(sys.modules.get("matplotlib.axes"), "Axes", ())
        if not issubclass(kind, axes_type) and kind.__module__ != "seaborn.axisgrid":
            return None
        item = getattr(getattr(item, "figure", None), "figure", None)  # the whole figure, also for a subfigure
    return item if isinstance(item, figure_type) else None


def bundle_of(item: Any) -> dict[str, Any]:
    """Returns an object's display data by MIME type, without the parts whose own code raises."""
    kind = type(item)
    found: dict[str, Any] = {}
    for name, mime in _METHODS.items():
        method = getattr(kind, name, None)
        if not callable(method) or mime in found or (name == "to_html" and not _is_plot(found)):
            continue
        try:
            made = method(item)
            made = made[0] if type(made) is tuple else made  # the second part describes the first
            found.update({mime: made} if mime else made or {})
        except ControlException:
            raise
        except Exception as error:  # noqa: BLE001 (the border of agent code)
            _refuse(f"the {name} of a {kind.__name__}", one_line(error))
    return found


def image_in(bundle: Mapping[str, Any]) -> Optional[tuple[str, bytes]]:
    """Returns (MIME type, data) of the picture in an object's display data."""
    for mime in _IMAGES:
        data = bundle.get(mime)
        if isinstance(data, str):  # as in notebooks
            import base64

            try:
                data = base64.b64decode(data.encode("ascii", "replace"))
            except ValueError as error:
                _refuse(mime, one_line(error))
        if isinstance(data, bytes):
            return mime, data
    return None


def texts_of(bundle: Mapping[Any, Any]) -> dict[str, str]:
    """Returns the text and JSON of the display data, the smallest first if there is no room for all."""
    import json

    texts: dict[str, str] = {}
    for mime, value in bundle.items():
        if value is not None and is_mime_type(mime) and mime not in _IMAGES:
            try:
                texts[mime] = value if isinstance(value, str) else json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                _refuse(mime, one_line(error))
    fitting: dict[str, str] = {}
    for mime in sorted(texts, key=lambda mime: len(texts[mime]))[:DISPLAY_TYPES_MAX]:
        if len(pack({**fitting, mime: texts[mime]})) <= DISPLAY_BYTES_MAX:
            fitting[mime] = texts[mime]
        else:
            _refuse(mime, f"the display data of an object has at most {DISPLAY_BYTES_MAX} bytes")
    return fitting


def _is_plot(bundle: Mapping[str, Any]) -> bool:
    return any(str(mime).startswith("application/vnd.") for mime in bundle)


class StandIns:
    """Returns a picture or display data for each object in a value that can show itself; at most DISPLAYS_MAX.

    If it `saves`, the page of an interactive plot also becomes a file of the workspace, and so an artifact.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self._left = DISPLAYS_MAX
        self._saves = saves
        self._drawn: list[object] = []  # figures: other axes of the same figure would give the same picture

    def __call__(self, value: object) -> object:
        figure = figure_of(value)
        if not self._left or (figure is None and not any(hasattr(type(value), name) for name in _METHODS)):
            return None
        if figure is not None and any(each is figure for each in self._drawn):
            return None
        self._drawn.append(figure)
        self._left -= 1
        bundle = {} if figure is not None else bundle_of(value)
        try:
            image = image_in(bundle) if figure is None else ("image/png", _drawn(lambda: _figure_png(figure)))
            if image is not None:
                from PIL import Image

                picture = Image.open(io.BytesIO(image[1]))
                picture.load()
                return picture
        except (NotDrawn, ImportError, OSError, SyntaxError, ValueError) as error:
            _refuse("a value", str(error))
        texts = texts_of(bundle)
        if self._saves and _is_plot(texts) and "text/html" in texts:
            _save_page(texts["text/html"])
        return texts or None


def _save_page(html: str) -> None:
    for number in range(1, _HTML_FILES_MAX + 1):
        try:
            with open(os.path.join(_client[0][2], f"figure-{number}.html"), "x", encoding="utf-8") as file:
                file.write(f'<meta charset="utf-8">\n{html}\n')
            return
        except FileExistsError:
            continue
        except (OSError, ControlException) as error:  # the rules may forbid agent code to write
            _refuse("the page of a figure", one_line(error))
            return


# ---------------------------------------------------------------------------------------------------------------------
# Sending


def _drawn(paint: Callable[[], bytes]) -> bytes:
    _flush()  # else the fork would have the unwritten output, too
    return _client[0][1].draw(paint)


def _send_drawn(what: str, source: str, paint: Callable[[], bytes]) -> None:
    try:
        data = _drawn(paint)
    except NotDrawn as reason:
        _refuse(what, str(reason))
    else:
        _send("image/png", source, data)


def _send(mime: str, source: str, data: bytes) -> None:
    _flush()
    left_out = f"it has {len(data)} bytes" if len(data) > IMAGE_BYTES_MAX else _client[0][0](mime, source, data)
    if left_out:
        _refuse("an image" if mime in _IMAGES else "display data", left_out)


def _refuse(what: str, why: str) -> None:
    """Writes a line about something not shown to descriptor 2: sys.stderr may be anything."""
    _flush()
    os.write(2, f"[{what} is not shown: {why}]\n".encode("utf-8", "replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # Output without an end of line belongs before the image, too.
        if getattr(stream, "closed", None) is False:  # a program may have put anything here
            stream.flush()
