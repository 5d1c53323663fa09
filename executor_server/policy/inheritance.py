"""Resolves profiles that extend others: a profile inherits the keys that it does not set.

Works on the tables of the file before they are checked, so they may hold anything. Tables are merged key by
key, at every depth; everything else, arrays too, is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor_server.core.config import KeyPath, Problem, cut, some_of

_MAX_SHOWN_CIRCLE = 20


def with_inherited(profiles: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns each profile with all that it inherits, and the problems of `extends`: unknown names and circles."""
    resolved: dict[str, Any] = {}
    circles: dict[str, str] = {}  # by the first of its profiles
    order = {name: place for place, name in enumerate(profiles)}
    for name in profiles:
        line: dict[str, None] = {}  # a set with an order: those that no line had before
        each = name
        while each in profiles and each not in resolved and each not in line:
            line[each] = None
            each = _parent(profiles[each])
        names = list(line)
        if each in line:
            circle = names[names.index(each) :]
            first = circle.index(min(circle, key=order.__getitem__))
            circles[circle[first]] = _circle([*circle[first:], *circle[: first + 1]])
        for each in reversed(names):
            resolved[each] = _merged(resolved.get(_parent(profiles[each]), {}), profiles[each])
    return {name: resolved[name] for name in profiles}, _problems(profiles, circles)


def lineage(name: str, profiles: Mapping[str, Any]) -> list[str]:
    """Returns a profile and those that it extends, nearest first; in a circle, the last one repeats an earlier one."""
    names = {name: None}  # a set with an order
    while True:
        parent = _parent(profiles[next(reversed(names))])
        if parent not in profiles:
            return list(names)
        if parent in names:
            return [*names, parent]
        names[parent] = None


def is_written(table: Any, path: KeyPath) -> bool:
    """True when a table itself has a key, or has a value where the path goes on."""
    for part in path:
        if not isinstance(table, dict):
            return True  # the rest of the path is a number in an array
        if part not in table:
            return False
        table = table[part]
    return True


def _problems(profiles: Mapping[str, Any], circles: Mapping[str, str]) -> list[Problem]:
    problems = []
    for name in profiles:
        path = ("profiles", name, "extends")
        parent = _parent(profiles[name])
        if parent and parent not in profiles:
            problems.append(Problem(path, f"no profile {cut(parent)!r}; available: {some_of(profiles)}"))
        elif name in circles:
            problems.append(Problem(path, f"goes round in a circle: {circles[name]}"))
    return problems


def _circle(names: list[str]) -> str:
    return " → ".join(names if len(names) <= _MAX_SHOWN_CIRCLE else [*names[:_MAX_SHOWN_CIRCLE], "…", names[-1]])


def _parent(table: Any) -> str:
    parent = table.get("extends") if isinstance(table, dict) else None
    return parent if isinstance(parent, str) else ""


def _merged(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: _merged(base[key], value) if key in base else value for key, value in over.items()}}
