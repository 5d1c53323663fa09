"""Writes a value of a sandbox as `repr` would, in bounded time and memory.

`repr` itself has no bounds: a list may hold the same 100 MB string a thousand times, and an integer more digits than
Python writes. Text past the limit is never produced.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import date
from enum import Enum
from typing import Any, cast

from executor_api.values import EnumValue, OpaqueValue, Record, TupleRecord

DEPTH_MAX = 40
CUT = "…"
TABLE_CHARS_MAX = 8 << 20
"""Characters in the cells of all tables of a value. pandas writes each cell whole before it cuts it."""

_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
_SHORT_INT = 1 << 64
_TABLE_CHARS_MIN = 1 << 16  # the least that a table counts: writing any table takes milliseconds


class _Full(Exception):
    """The limit is reached."""


def value_text(value: object, chars_max: int) -> str:
    """Returns the `repr` of a value, cut after `chars_max` characters with a note."""
    text = _beginning(value, chars_max)
    if len(text) > chars_max:
        return f"{text[:chars_max]}{CUT} (only the first {chars_max:,} characters are shown)"
    return text


def cut_text(value: object, chars_max: int) -> str:
    """Returns the `repr` of a value as one line: cut, and without characters that a terminal would obey."""
    return one_line(str(value) if isinstance(value, Enum | date) else _beginning(value, chars_max), chars_max)


def one_line(text: str, chars_max: int) -> str:
    """Returns a text as one line: cut, and without characters that a terminal would obey."""
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[: chars_max + 1])
    return line if len(line) <= chars_max else line[: chars_max - 1] + CUT


def _beginning(value: object, chars_max: int) -> str:
    """Returns the `repr` of a value, or at least `chars_max` characters and one of it."""
    writer = _Writer(chars_max + 1)
    with suppress(_Full):
        writer.write(value)
    return "".join(writer.parts)


def holds_values(value: object) -> bool:
    """True when `repr` also writes the values inside this one, each as often as it is held."""
    return _parts(value) is not None


def text_chars(value: object) -> int:
    """Returns a lower bound of the characters that `repr` would write, in time proportional to the value's own size.

    References are counted each time: ten lists, each ten times in the next, are a hundred items and gigabytes of text.
    """
    return _chars(value, {})


def _chars(value: Any, known: dict[int, int]) -> int:
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if id(value) in known:
        return known[id(value)]
    parts = _parts(value)
    if parts is None:
        chars = len(_plain(value))
    else:
        known[id(value)] = len("...")  # the text of a cycle
        chars = sum(3 if _is_short(each) else 2 + _chars(each, known) for each in parts)
    known[id(value)] = chars
    return chars


def _is_short(value: Any) -> bool:
    kind = type(value)
    return kind is float or value is None or kind is bool or (kind is int and -_SHORT_INT < value < _SHORT_INT)


def table_chars(value: Any) -> int | None:
    """Returns how many characters pandas would write, before it cuts them, to show a table; None for other values."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)):
        return None
    columns = [value]
    if isinstance(value, pandas.DataFrame):
        columns = [*(value.iloc[:, number] for number in range(value.shape[1])), value.index, value.columns]
    elif isinstance(value, pandas.Series):
        columns = [value, value.index]
    cells = [column.tolist() for column in columns if column.dtype.kind not in "biufcmM"]
    return max(_TABLE_CHARS_MIN, text_chars(cells))


def _parts(value: Any) -> Iterable[Any] | None:
    """Returns the values that are shown inside a value; None if it has no such parts."""
    if isinstance(value, dict):
        return itertools.chain(value, value.values())
    if isinstance(value, Record):
        return cast(Iterable[Any], object.__getattribute__(value, "_fields").values())
    if isinstance(value, EnumValue):
        return (value.value,)
    if isinstance(value, (list, tuple, set, frozenset, deque)):  # a TupleRecord is a tuple
        return value
    return cast(Iterable[Any], value.flat) if _is_object_array(value) else None


class _Writer:
    def __init__(self, chars_max: int) -> None:
        self.parts: list[str] = []
        self._left = chars_max
        self._inside: set[int] = set()
        self._table_chars_left = TABLE_CHARS_MAX

    def write(self, value: object) -> None:
        kind = type(value)
        if kind in (str, bytes, bytearray):
            self._text(repr(value[: self._left + 1]))  # type: ignore[index]  # its repr is no shorter than itself
        elif isinstance(value, OpaqueValue):
            self._text(value.repr)
        elif isinstance(value, EnumValue) and value.name is not None:
            self._text(str(value))
        elif (
            kind is dict
            or kind in _BRACKETS
            or isinstance(value, Record | TupleRecord | EnumValue)
            or _is_object_array(value)
        ):
            self._nested(value)
        elif isinstance(value, (dict, deque)) and text_chars(value) > self._left:
            # An OrderedDict, for example: its own repr would write it whole.
            self._text(f"{kind.__name__}(")
            self.write(dict(value) if isinstance(value, dict) else list(value))
            self._text(")")
        elif (chars := table_chars(value)) is not None:
            self._table_chars_left -= chars
            is_shown = self._table_chars_left >= 0
            shape = "x".join(map(str, cast(Any, value).shape))
            self._text(_plain(value) if is_shown else f"<{kind.__name__} of {shape}, too large to be shown>")
        else:
            self._text(_plain(value))

    def _nested(self, value: Any) -> None:
        if id(value) in self._inside or len(self._inside) >= DEPTH_MAX:
            self._text("...")
            return
        self._inside.add(id(value))
        if isinstance(value, dict):
            self._dict(value)
        elif isinstance(value, Record):
            fields = object.__getattribute__(value, "_fields")  # a field may be named `fields`
            self._named(object.__getattribute__(value, "_type_name"), fields.items())
        elif isinstance(value, EnumValue):
            self._named("EnumValue", [("type_name", value.type_name), ("value", value.value)])
        elif isinstance(value, TupleRecord):
            self._named(value.__dict__["_type_name"], zip(value.__dict__["_fields"], value, strict=True))
        elif type(value) in _BRACKETS:
            self._sequence(value)
        else:
            self._text("array(")
            self.write(value.tolist())
            self._text(", dtype=object)")
        self._inside.discard(id(value))

    def _sequence(self, value: Any) -> None:
        opening, closing = _BRACKETS[type(value)]
        if not value:
            self._text(repr(value))
            return
        if type(value) is tuple and len(value) == 1:
            closing = ",)"
        self._text(opening)
        for number, each in enumerate(value):
            self._text(", " if number else "")
            self.write(each)
        self._text(closing)

    def _named(self, type_name: str, fields: Iterable[tuple[str, object]]) -> None:
        self._text(f"{type_name.rpartition('.')[2]}(")
        for number, (name, each) in enumerate(fields):
            self._text(f"{', ' if number else ''}{name}=")
            self.write(each)
        self._text(")")

    def _dict(self, value: dict[object, object]) -> None:
        self._text("{")
        for number, (key, each) in enumerate(value.items()):
            self._text(", " if number else "")
            self.write(key)
            self._text(": ")
            self.write(each)
        self._text("}")

    def _text(self, text: str) -> None:
        self.parts.append(text[: self._left])
        if len(text) > self._left:
            raise _Full
        self._left -= len(text)


def _is_object_array(value: Any) -> bool:
    """True for an array of Python objects, which numpy would show whole."""
    return type(value).__module__ == "numpy" and hasattr(value, "tolist") and getattr(value.dtype, "hasobject", False)


def _plain(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - objects of libraries with a sandbox's data may fail in any way
        if isinstance(value, int):
            return f"<an integer of {value.bit_length():,} bits>"
        return f"<a value of type {type(value).__name__} that cannot be shown>"
