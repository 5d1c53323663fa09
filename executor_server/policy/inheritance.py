"""Resolves profiles that extend others: a profile inherits the keys that it does not set.

Works on the tables of the file before they are checked, so they may hold anything. Tables are merged key by
key, at every depth; everything else, arrays too, is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from executor_server.config import KeyPath, Problem, cut, some_of

_MAX_SHOWN_CIRCLE = 20


def with_inherited(profiles: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns each profile with all that it inherits, and the problems of `extends`: unknown names and circles."""
    resolved: dict[str, Any] = {}
    for name in profiles:
        unresolved = takewhile(lambda each: each not in resolved, lineage(name, profiles))
        for each in reversed(list(unresolved)):
            parent = _parent(profiles[each])
            resolved[each] = _merged(resolved.get(parent, {}), profiles[each])
    return {name: resolved[name] for name in profiles}, _problems(profiles)


def lineage(name: str, profiles: Mapping[str, Any]) -> list[str]:
    """Returns a profile and those that it extends, nearest first; in a circle the last is one of the others again."""
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


def _problems(profiles: Mapping[str, Any]) -> list[Problem]:
    problems = []
    in_circles: set[str] = set()
    for name in profiles:
        path = ("profiles", name, "extends")
        parent = _parent(profiles[name])
        if parent and parent not in profiles:
            problems.append(Problem(path, f"there is no profile {cut(parent)!r}; there are {some_of(profiles)}"))
        line = lineage(name, profiles)
        if len(line) > 1 and line[-1] == name and name not in in_circles:
            in_circles |= set(line)
            problems.append(Problem(path, f"goes round in a circle: {_circle(line)}"))
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
