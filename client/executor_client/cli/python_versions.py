"""Decides if a version of Python is one that a specifier such as ">=3.11,<3.14" admits (PEP 440).

Only what releases of CPython need: the versions compared are final releases and pre-releases.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

_CLAUSE = re.compile(r"(~=|===|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*|(?:a|b|rc)\d+|\.?dev\d+)?")
_VERSION = re.compile(r"(\d+(?:\.\d+)*)((?:a|b|rc)\d+)?")
_PARTS = 4
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "===": operator.eq,
    "!=": operator.ne,
    "~=": operator.ge,
}


def admits(specifier: str, version: str) -> bool:
    """Returns True when all clauses hold, or when the version is none that can be compared.

    Raises ValueError, with a clause for people, for a specifier of a wrong form.
    """
    clauses = [_clause(text) for text in specifier.split(",") if text.strip()]
    found = _VERSION.match(version)
    if found is None:
        return True
    key = _key(found[1], is_final=not found[2])
    return all(_holds(key, *clause) for clause in clauses)


def _clause(text: str) -> tuple[str, str, str]:
    found = _CLAUSE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text.strip()!r} is no bound of versions, such as >=3.11")
    order, release, suffix = found[1], found[2], found[3] or ""
    if suffix == ".*" and order not in ("==", "!="):
        raise ValueError(f"{text.strip()!r}: .* goes with == and != only")
    if order == "~=" and "." not in release:
        raise ValueError(f"{text.strip()!r}: ~= needs two parts, as in ~=3.11")
    return order, release, suffix


def _holds(version: tuple[tuple[int, ...], bool], order: str, release: str, suffix: str) -> bool:
    if suffix == ".*":
        return _begins_with(version, release) == (order == "==")
    if order == "~=" and not _begins_with(version, release.rpartition(".")[0]):
        return False
    bound = _key(release, is_final=not suffix)
    if order == "<" and version[0] == bound[0]:
        return False  # 3.12.0rc1 is not below 3.12
    return _ORDER[order](version, bound)


def _begins_with(version: tuple[tuple[int, ...], bool], release: str) -> bool:
    parts = tuple(map(int, release.split(".")))
    return version[0][: len(parts)] == parts


def _key(release: str, *, is_final: bool) -> tuple[tuple[int, ...], bool]:
    """Returns a key that orders a pre-release before its release."""
    parts = [*map(int, release.split(".")), *[0] * _PARTS]
    return tuple(parts[: max(_PARTS, release.count(".") + 1)]), is_final
