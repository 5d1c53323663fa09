"""Recognizes values that the codec carries exactly, and values short enough for literals."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import math
import pathlib
import sys
import uuid
import zoneinfo
from typing import Any

from executor_api.values import encode

_SHORT = 120

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...),
    decimal.Decimal, fractions.Fraction, uuid.UUID,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone, zoneinfo.ZoneInfo,
    pathlib.PurePosixPath, pathlib.PosixPath,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter)
_LIBRARIES = {
    "numpy": ("ndarray", "datetime64", "timedelta64", "bool_"),
    "pandas": ("DataFrame", "Series", "Index", "RangeIndex", "MultiIndex", "DatetimeIndex", "Timestamp", "Timedelta"),
    "PIL.Image": ("Image",),
}


class NotPlain(Exception):
    """The codec has no exact form for something in the value."""


def literal(value: object) -> str | None:
    """Returns the value as source, if that is short and exact; None otherwise."""
    kind = type(value)
    if value is None or value is ... or kind is bool:
        return "..." if value is ... else repr(value)
    if kind is int:
        return repr(value) if value.bit_length() <= _SHORT else None  # type: ignore[attr-defined]
    if kind is float:
        return repr(value) if math.isfinite(value) else None  # type: ignore[arg-type]
    if kind in (str, bytes) and len(value) <= _SHORT:  # type: ignore[arg-type]
        return ascii(value)
    return None


def is_plain(value: object) -> bool:
    """Returns True if the codec carries the value with its types. Raises EncodeError if the value is too large."""
    if not _has_plain_types(value):
        return False
    try:
        encode(value, fallback=_refuse)
    except NotPlain:
        return False
    return True


def _refuse(value: object) -> bytes:
    raise NotPlain(type(value).__name__)


def _has_plain_types(value: object) -> bool:
    seen: set[int] = set()
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind in _ATOMS or _is_of_library(each):
            continue
        if id(each) in seen:
            continue
        seen.add(id(each))
        if kind in _CONTAINERS:
            waiting.extend(each)
        elif kind in _MAPPINGS:
            waiting.extend(each.keys())
            waiting.extend(each.values())
        else:
            return False
    return True


def _is_of_library(value: Any) -> bool:
    """Returns True if its class is one of a library that the codec carries; subclasses don't count."""
    kind = type(value)
    for module_name, names in _LIBRARIES.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        if any(kind is getattr(module, name, None) for name in names):
            return module_name != "numpy" or getattr(value, "dtype", None) is None or value.dtype.kind != "O"
        if module_name == "numpy" and isinstance(value, module.generic) and kind.__module__ == "numpy":
            return True
    return False
