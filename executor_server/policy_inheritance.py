"""Profiles that extend others: what a profile does not say itself, it has from the one it extends.

Works on the tables of the file, before anything in them is checked, so they may hold anything. Tables are merged key by
key, at every depth; everything else, arrays too, is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from executor_server.settings import KeyPath, Problem, cut, some_of

_MAX_SHOWN_CIRCLE = 20


def with_inherited(profiles: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Each profile with all that it inherits, and what is wrong with the lines of descent."""
    resolved: dict[str, Any] = {}
    for name in profiles:
        unresolved = takewhile(lambda each: each not in resolved, lineage(name, profiles))
        for each in reversed(list(unresolved)):
            parent = _parent(profiles[each])
            resolved[each] = _merged(resolved.get(parent, {}), profiles[each])
    return {name: resolved[name] for name in profiles}, _problems(profiles)


def lineage(name: str, profiles: Mapping[str, Any]) -> list[str]:
    """A profile and those that it extends, nearest first; one that is met again, in a circle, is the last."""
    names = {name: None}  # a set with an order
    while True:
        parent = _parent(profiles[next(reversed(names))])
        if parent not in profiles:
            return list(names)
        if parent in names:
            return [*names, parent]
        names[parent] = None


def is_written(table: Any, path: KeyPath) -> bool:
    """Whether a table itself has a key, or a part of what is there."""
    for part in path:
        if not isinstance(table, dict):
            return True  # a number in an array
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
        descent = lineage(name, profiles)
        if len(descent) > 1 and descent[-1] == name and name not in in_circles:
            in_circles |= set(descent)
            problems.append(Problem(path, f"goes round in a circle: {_circle(descent)}"))
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
