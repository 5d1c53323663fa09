"""The lines of `/execute`: output, results and errors of an execution in E2B's form.

A result has the forms in which a notebook would show a value. Plain text and pictures are always there. Tables have
their HTML and their columns as `data` if this Python has pandas. JSON is ASCII: the SDK splits lines at U+2028, too.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from executor_api.values import OpaqueValue
from executor_client._core.failure_text import headline
from executor_client._core.short_repr import png_of
from executor_client._core.value_text import TABLE_CHARS_MAX, table_chars, text_chars, value_text
from executor_client.events import DisplayEvent, ExecutionEvent, ImageEvent, LogEvent, OutputCutEvent
from executor_client.results import ErrorDetail, ExecutionResult, Limits, Outcome, VariablesState

VALUE_CHARS_MAX = 1 << 20
"""Characters of the text of a value. A value that would have more has no JSON either."""

Line = dict[str, Any]

_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
_OF_JSON = ("application/json", "e2b/data", "e2b/chart")
_SCALARS = (bool, int, float, str)
_RESET = "The interpreter was restarted; its variables are gone. Define them again."


def encoded(line: Line) -> bytes:
    return json.dumps(line).encode() + b"\n"


def line_of(event: ExecutionEvent) -> Line | None:
    """Returns the line for an event; None if E2B's protocol has none."""
    match event:
        case LogEvent():
            return _output(event.stream, event.text)
        case OutputCutEvent():
            return _output("stderr", f"\n[{event.omitted_bytes} bytes of output omitted]\n")
        case ImageEvent() if event.image.refusal:
            return _output("stderr", f"\n[an image is not shown: {event.image.refusal}]\n")
        case ImageEvent():
            image = event.image
            text = f"<Figure size {image.width}x{image.height}>"
            return _result({image.mime_type: _base64(image.data), "text/plain": text}, is_main=False)
        case DisplayEvent() if event.display.problem:
            return _output("stderr", f"\n[an object is not shown: {event.display.problem}]\n")
        case DisplayEvent():
            return _result(event.display.data, is_main=False)
        case _:
            return None


def _output(stream: str, text: str) -> Line:
    return {"type": stream, "text": text, "timestamp": datetime.now(UTC).isoformat()}


def is_small(value: object) -> bool:
    """True for a value whose line is cheap enough to make without a thread."""
    return type(value) in _SCALARS


def line_of_value(value: object) -> Line:
    """Returns the line for the value of the last expression."""
    return _result(_bundle(value), is_main=True)


def _bundle(value: Any) -> Mapping[str, Any]:
    text = value_text(value, VALUE_CHARS_MAX)
    if type(value) is str:
        return {"text/plain": text[1:-1]}  # without quotes, as E2B has it
    bundle: dict[str, Any] = {"text/plain": text}
    pandas, pictures = sys.modules.get("pandas"), sys.modules.get("PIL.Image")
    if isinstance(value, OpaqueValue):
        bundle |= value.display
    elif isinstance(value, list | dict) and text_chars(value) <= VALUE_CHARS_MAX and _is_json(value):
        bundle["application/json"] = value
    elif pictures is not None and isinstance(value, pictures.Image):
        bundle["image/png"] = _base64(png_of(value))
    elif pandas is not None and isinstance(value, pandas.DataFrame) and (table_chars(value) or 0) <= TABLE_CHARS_MAX:
        bundle["text/html"] = value._repr_html_()
        bundle |= _data(value)
    return bundle


def _is_json(value: object) -> bool:
    try:
        return bool(json.dumps(value, allow_nan=False))
    except (RecursionError, TypeError, ValueError):
        return False


def _data(table: Any) -> dict[str, Any]:
    """Returns the columns of a table as E2B has them. JSON has only strings as keys, and no dates."""
    columns = table.to_dict(orient="list")
    plain = {str(name): [_plain(each) for each in column] for name, column in columns.items()}
    return {"e2b/data": plain}


def _plain(value: Any) -> Any:
    if value is None or type(value) in _SCALARS:
        return None if value != value else value
    return value.isoformat() if hasattr(value, "isoformat") else value_text(value, VALUE_CHARS_MAX)


def _result(bundle: Mapping[str, Any], *, is_main: bool) -> Line:
    line: Line = {"type": "result", "is_main_result": is_main}
    extra = {}
    for mime, value in bundle.items():
        if mime in _OF_JSON and isinstance(value, str):  # objects display themselves as texts
            try:
                value = json.loads(value)
            except (RecursionError, ValueError):
                continue
            if not _is_json(value):
                continue
        if mime in _FIELDS:
            line[_FIELDS[mime]] = value
        else:
            extra[mime] = value
    return {**line, "extra": extra} if extra else line


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def line_of_failure(result: ExecutionResult, code: str, limits: Limits, message: str) -> Line:
    """Returns the line for an execution that did not succeed. `message` is the whole message of its error."""
    error = result.error or ErrorDetail(type="", message="")
    name, value = error.type, message
    if result.outcome is Outcome.CANCELLED:
        name = "KeyboardInterrupt"
    elif result.outcome is not Outcome.EXCEPTION:
        name, value = name or result.outcome.name, headline(result, code, limits)
    traceback = error.traceback or f"{name}: {value}"
    if result.state is VariablesState.RESET:
        value, traceback = f"{value}\n{_RESET}".lstrip(), f"{traceback.rstrip()}\n{_RESET}"
    return failure(name, value, traceback)


def failure(name: str, value: str, traceback: str = "") -> Line:
    return {"type": "error", "name": name, "value": value, "traceback": traceback}
