"""The tree as JSON text, checked before a parser sees it.

`json` recurses, turns digits into integers in quadratic time, and makes sixty bytes of object of three bytes of text.
So the shape of a text is measured first, with a few passes of `bytes` methods that run at the speed of memory: how deep
it is, how many values it holds, how long its numbers are.
"""

from __future__ import annotations

import json

from executor_api.values.limits import VALUES_PER_NODE, DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from executor_api.values.limits import ValueLimits

# A text of this length holds no shape that could hurt.
_HARMLESS_CHARS = 64
# Lists inside the deepest node: the description of a structured dtype, and what its fields hold.
_HEADER_DEPTH = 24
# Bare numbers are integers of 64 bits and floats of 17 digits with an exponent of 3.
_TOO_MANY_DIGITS = b"0" * 40

_ALL_BYTES = bytes(range(256))
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(sorted(set(_ALL_BYTES) - set(b'[]{},"')))


def dump_tree(tree: object) -> bytes:
    return _ENCODER.encode(tree).encode("utf-8")


def load_tree(view: memoryview, limits: ValueLimits) -> Any:
    """Parses a tree that came from anywhere. Raises DecodeError."""
    text = bytes(view)
    if len(text) > _HARMLESS_CHARS:
        _check_shape(text, limits)
    try:
        return _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # RecursionError: the shape is fine, but the caller's own stack is nearly used up.
        raise DecodeError(f"the tree is not JSON: {error}") from error


def _check_shape(text: bytes, limits: ValueLimits) -> None:
    # Backslashes stand only inside strings. Left to right, pairs of them first, then what escapes a quote: after that
    # every quote begins or ends a string.
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _TOO_MANY_DIGITS in text.translate(_DIGITS_TO_ZERO):
        outside = b" ".join(text.split(b'"')[::2])
        if _TOO_MANY_DIGITS in outside.translate(_DIGITS_TO_ZERO):
            raise DecodeError("a number has too many digits")
    # Brackets, commas and quotes only. A pair of adjacent quotes is an empty string, or the end of one and the
    # beginning of the next: without it, what is inside a string and what is not stays as it was.
    marks = text.translate(_BRACES_TO_BRACKETS, _NO_STRUCTURE).replace(b'""', b"")
    if b'"' in marks:
        marks = b"".join(marks.split(b'"')[::2])
    opened = marks.count(b"[")
    values = opened + marks.count(b",") + 1
    if values > (VALUES_PER_NODE + 1) * limits.nodes:
        raise DecodeError(f"the tree holds more than the limit of {limits.nodes} nodes")
    brackets = marks.translate(None, b",")
    # Each pass takes away the innermost lists, so the number of passes is the depth.
    for _ in range(limits.depth + _HEADER_DEPTH):
        if not brackets:
            return
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            raise DecodeError("the tree is not JSON: its brackets do not match")
        brackets = inner
    if brackets:
        raise DecodeError(f"the tree is deeper than the limit of {limits.depth}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
