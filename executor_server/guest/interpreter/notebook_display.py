"""The names of IPython.display for a sandbox without IPython. Its objects are shown like other display data."""

from __future__ import annotations

from .display import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIMES = {"HTML": "text/html", "Image": "image/png", "Javascript": "application/javascript", "SVG": "image/svg+xml"}
_READABLE = {"Code": "text/plain", "JSON": "application/json", "Latex": "text/latex", "Markdown": "text/markdown"}
_READABLE.update(Math="text/latex", Pretty="text/plain")  # text that is printed as it is


class DisplayObject:
    """Data, or the file or the address where it is."""

    _mime, _is_text = "text/plain", True
    _open: Any = None

    def __init__(self, data: Any = None, url: Any = None, filename: Any = None, **_options: Any) -> None:
        is_image = self._mime == "image/png"
        if isinstance(data, str) and data.startswith(("http://", "https://")):
            data, url = None, data
        elif isinstance(data, str) and is_image:
            data, filename = None, data
        if filename is not None:
            with self._open(filename, "rb" if is_image else "r") as file:
                data = file.read()
        self.data, self.url, self.filename = data, url, filename

    def __repr__(self) -> str:
        return f"<IPython.core.display.{type(self).__name__} object>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if self.url is not None:
            return {"text/html": f'<img src="{self.url}">', "text/plain": str(self.url)}
        mime = "image/jpeg" if self._mime == "image/png" and self.data[:2] == b"\xff\xd8" else self._mime
        return {mime: self.data, "text/plain": str(self.data) if self._is_text else repr(self)}


def names(builtins: dict[str, Any]) -> dict[str, Any]:
    """Returns the names of the module; `builtins` are those of agent code."""
    shared = {"__module__": "IPython.core.display", "_open": staticmethod(lambda *given: builtins["open"](*given))}
    made: dict[str, Any] = {"DisplayObject": DisplayObject, "display": display, "clear_output": _clear_output}
    for name, mime in {**_MIMES, **_READABLE}.items():
        made[name] = type(name, (DisplayObject,), {**shared, "_mime": mime, "_is_text": name in _READABLE})
    return made


def _clear_output(wait: bool = False) -> None:
    """Does nothing: output that was sent can't be taken back."""
