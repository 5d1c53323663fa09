"""Encodes and decodes numbers, text, bytes and other scalars.

None, booleans, finite floats, integers of 64 bits and text without surrogates are bare in the tree, which keeps
them exact. This module has the others, and Decimal, Fraction, UUID, paths, ranges and slices.
"""

from __future__ import annotations

import sys

from executor_api.values.generic import OpaqueValue
from executor_api.values.kinds import BYTES_ENTRY, Kind, get_bytes, matches, put_bytes
from executor_api.values.limits import (
    MAX_BARE_INT,
    MAX_DECIMAL_CHARS,
    MAX_INLINE_BYTES,
    MAX_INT_BITS,
    MAX_INT_DIGITS,
    MAX_SENT_INT_BITS,
    DecodeError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

_FLOAT_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_HEX = rf"-?[0-9a-f]{{1,{MAX_SENT_INT_BITS // 4}}}"
_MAX_FLOAT_CHARS = 32
# Fractions of earlier senders. A fraction is reduced when it is made, and the greatest common divisor is quadratic.
_MAX_FRACTION_CHARS = (1 << 14) // 4 + 1
_DECIMAL = r"-?(s?NaN\d*|Infinity|(\d+(\.\d*)?|\.\d+)(E[+-]?\d{1,20})?)"
_UUID = r"[0-9a-f]{32}"


def is_utf8(text: str) -> bool:
    """True when JSON keeps the text exact; it would join two surrogates into one character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Python's own


def _lower_str(value: str, writer: Writer) -> Lowered:
    if len(value) <= MAX_INLINE_BYTES and (value.isascii() or is_utf8(value)):
        writer.add_unfolded_bytes(len(value))
        return value, (), False
    return ["str", put_bytes(writer, value.encode("utf-8", "surrogatepass"))], (), False


def _make_str(reader: Reader, children: list[Any], data: int | str) -> str:
    return str(get_bytes(reader, data), "utf-8", "surrogatepass")


def _lower_int(value: int, writer: Writer) -> Lowered | None:
    if -MAX_BARE_INT <= value <= MAX_BARE_INT:
        return value, (), False
    return (["int", f"{value:x}"], (), False) if value.bit_length() <= MAX_INT_BITS else None


def _make_int(reader: Reader, children: list[Any], digits: str) -> int | OpaqueValue:
    if not matches(_HEX, digits):
        raise DecodeError("an int node does not hold a hexadecimal number")
    number = int(digits, 16)
    return number if _is_shown(number) else OpaqueValue("int", f"<an int of {number.bit_length()} bits>")


def _is_shown(number: int) -> bool:
    """True when Python writes it in decimal, here and at the next receiver."""
    bits = number.bit_length()
    digits = getattr(sys, "get_int_max_str_digits", lambda: 0)()
    if not 0 < digits < MAX_INT_DIGITS:
        return bits <= MAX_INT_BITS
    return bits <= MAX_INT_BITS * digits // MAX_INT_DIGITS


def _lower_float(value: float, writer: Writer) -> Lowered:
    if value - value == 0.0:
        return value, (), False
    return ["float", repr(value)], (), False


def _make_float(reader: Reader, children: list[Any], word: str) -> float:
    # A new object each time: two NaNs are two keys of a dict only while they are two objects.
    return float(repr(_FLOAT_WORDS[word]))


def _lower_complex(value: complex, writer: Writer) -> Lowered:
    return ["complex", repr(value.real), repr(value.imag)], (), False


def _make_complex(reader: Reader, children: list[Any], real: str, imag: str) -> complex:
    if max(len(real), len(imag)) > _MAX_FLOAT_CHARS:
        raise DecodeError("a complex node does not hold two numbers")
    value = complex(float(real), float(imag))
    if (repr(value.real), repr(value.imag)) != (real, imag):  # "1e999" is no infinity
        raise DecodeError("a complex node does not hold two numbers")
    return value


def _lower_bytes(value: bytes, writer: Writer) -> Lowered:
    return ["bytes", put_bytes(writer, value)], (), False


def _lower_bytearray(value: bytearray, writer: Writer) -> Lowered:
    return ["bytearray", put_bytes(writer, bytes(value))], (), False


def _lower_range(value: range, writer: Writer) -> Lowered | None:
    numbers = [int.__int__(number) for number in (value.start, value.stop, value.step)]  # True is a stop, too
    if max(number.bit_length() for number in numbers) > MAX_INT_BITS:
        return None
    return ["range"], numbers, False


def _make_range(reader: Reader, children: list[Any]) -> range:
    if not all(type(child) is int for child in children) or children[2] == 0:
        raise DecodeError("a range node does not hold a range")
    return range(*children)


def _lower_slice(value: slice, writer: Writer) -> Lowered:
    return ["slice"], (value.start, value.stop, value.step), False


def _lower_ellipsis(value: object, writer: Writer) -> Lowered:
    return ["ellipsis"], (), False


# ---------------------------------------------------------------------------------------------------------------------
# The standard library's. Each module is imported when the first of its values arrives.


def _lower_decimal(value: Any, writer: Writer) -> Lowered | None:
    text = str(value)
    return (["decimal", text], (), False) if len(text) <= MAX_DECIMAL_CHARS else None


def _make_decimal(reader: Reader, children: list[Any], text: str) -> object:
    from decimal import Decimal

    if len(text) > MAX_DECIMAL_CHARS or not matches(_DECIMAL, text):
        raise DecodeError("a decimal node does not hold a decimal number")
    return Decimal(text)


def _lower_fraction(value: Any, writer: Writer) -> Lowered | None:
    top, bottom = value.numerator, value.denominator
    if max(top.bit_length(), bottom.bit_length()) > MAX_INT_BITS:
        return None
    return ["fraction", f"{top:x}", f"{bottom:x}"], (), False


def _make_fraction(reader: Reader, children: list[Any], top: str, bottom: str) -> object:
    from fractions import Fraction

    if max(len(top), len(bottom)) > _MAX_FRACTION_CHARS or not (matches(_HEX, top) and matches(_HEX, bottom)):
        raise DecodeError("a fraction node does not hold two numbers")
    if int(bottom, 16) <= 0:
        raise DecodeError("the denominator of a fraction is not positive")
    if not (_is_shown(int(top, 16)) and _is_shown(int(bottom, 16))):
        return OpaqueValue("fractions.Fraction", "<a fraction of more digits than Python writes>")
    return Fraction(int(top, 16), int(bottom, 16))


def _lower_uuid(value: Any, writer: Writer) -> Lowered:
    return ["uuid", value.hex], (), False


def _make_uuid(reader: Reader, children: list[Any], digits: str) -> object:
    from uuid import UUID

    if not matches(_UUID, digits):
        raise DecodeError("a uuid node does not hold 32 hexadecimal digits")
    return UUID(digits)


def _lower_path(value: Any, writer: Writer) -> Lowered:
    # The text is a child: names of files may hold surrogates.
    return ["path", type(value).__name__], (str(value),), False


def _make_path(reader: Reader, children: list[Any], flavour: str) -> object:
    import pathlib

    if flavour not in _PATHS or type(children[0]) is not str:
        raise DecodeError("a path node does not hold a path")
    try:
        return getattr(pathlib, flavour)(children[0])
    except NotImplementedError:  # a WindowsPath elsewhere, or the other way round
        return getattr(pathlib, "Pure" + flavour)(children[0])


_PATHS = ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")

LOWER = {
    str: _lower_str,
    int: _lower_int,
    float: _lower_float,
    complex: _lower_complex,
    bytes: _lower_bytes,
    bytearray: _lower_bytearray,
    range: _lower_range,
    slice: _lower_slice,
    type(Ellipsis): _lower_ellipsis,
}
LOWER_BY_NAME = {
    ("decimal", "Decimal"): _lower_decimal,
    ("fractions", "Fraction"): _lower_fraction,
    ("uuid", "UUID"): _lower_uuid,
    **{("pathlib", name): _lower_path for name in _PATHS},
}
KINDS = {
    "str": Kind(_make_str, header=(BYTES_ENTRY,)),
    "int": Kind(_make_int, header=(str,)),
    "float": Kind(_make_float, header=(str,)),
    "complex": Kind(_make_complex, header=(str, str)),
    "bytes": Kind(lambda reader, children, data: bytes(get_bytes(reader, data)), header=(BYTES_ENTRY,)),
    "bytearray": Kind(lambda reader, children, data: bytearray(get_bytes(reader, data)), header=(BYTES_ENTRY,)),
    "range": Kind(_make_range, children=3),
    "slice": Kind(lambda reader, children: slice(*children), children=3),
    "ellipsis": Kind(lambda reader, children: ...),
    "decimal": Kind(_make_decimal, header=(str,)),
    "fraction": Kind(_make_fraction, header=(str, str)),
    "uuid": Kind(_make_uuid, header=(str,)),
    "path": Kind(_make_path, header=(str,), children=1),
}
