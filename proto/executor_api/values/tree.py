"""Reads the tree from JSON text, which is checked before a parser sees it.

A parser recurses, turns digits into integers in quadratic time, and makes sixty bytes of object of three bytes of text.
So the shape of a text is measured first, with a few passes of `bytes` methods that run at the speed of memory: its
depth, its number of values, the length of its numbers.
"""

from __future__ import annotations

import re

from executor_api.strict_json import NotJson, reader, writer
from executor_api.values.limits import MAX_BARE_INT, VALUES_PER_NODE, DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from executor_api.values.limits import ValueLimits

# A shorter text can't have a harmful shape.
_HARMLESS_CHARS = 64
# Lists inside the deepest node: the description of a structured dtype, and what its fields hold.
_HEADER_DEPTH = 24
# Bare numbers are integers of 64 bits and floats of 17 digits with an exponent of 3.
_TOO_MANY_DIGITS = b"0" * 40
# A bare number has one of these, its digits as zeros, if it is an integer of more than 63 bits or a float beyond 1e308.
_SUSPECT_NUMBERS = (b"0" * 19, b"e000", b"e+000", b"E000", b"E+000")
# With pairs of backslashes taken away: half of a surrogate pair, which JSON can name and no UTF-8 text can hold.
_LONE_SURROGATE = rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"

_ALL_BYTES = bytes(range(256))
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(sorted(set(_ALL_BYTES) - set(b'[]{},"')))


def dump_tree(tree: object) -> bytes:
    return _write(tree).encode("utf-8")


def load_tree(text: bytes, limits: ValueLimits) -> Any:
    """Parses a tree from an untrusted sender. Raises DecodeError."""
    if len(text) > _HARMLESS_CHARS:
        _check_shape(text, limits)
    if b"\\u" in text and re.search(_LONE_SURROGATE, text.replace(b"\\\\", b""), re.DOTALL) is not None:
        raise DecodeError("text that stands bare holds half of a surrogate pair")
    zeros = text.translate(_DIGITS_TO_ZERO)
    read = _read
    for digits in _SUSPECT_NUMBERS:
        if digits in zeros:
            read = _read_strictly
    try:
        return read(text)
    except NotJson as error:
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


def _bare_int(digits: str) -> int:
    number = int(digits)
    if abs(number) > MAX_BARE_INT:
        raise ValueError("a bare integer has more than 63 bits")
    return number


def _finite_float(digits: str) -> float:
    number = float(digits)
    if number - number != 0.0:
        raise ValueError("a bare number is too large to be finite")
    return number


_write = writer(ascii_only=False)
_read = reader()
# Calls Python for each number: only for a text that may need it.
_read_strictly = reader(_bare_int, _finite_float)
