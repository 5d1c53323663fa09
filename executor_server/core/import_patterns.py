"""Patterns of authorized imports: their grammar, and the comparison of a request with the grants.

A pattern is what smolagents takes: a module ("numpy"), a module with all below it ("numpy.*"), or everything ("*").
Matching goes by whole dotted components, so "re" never covers "reprlib". Here patterns are only compared with patterns;
guest/checks/imports.py applies them to import statements.

Unlike a grant, a denial covers all sub-modules and no parents: "os" denies "os.path" too, "os.path" does not deny "os".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_PATTERN_CHARS = 200
PATTERN_FORM = 'a dotted module name ("numpy"), one followed by ".*" ("numpy.*"), or "*"'

_PATTERN = re.compile(r"\*|[^\W\d]\w*(\.[^\W\d]\w*)*(\.\*)?")


def is_pattern(text: str) -> bool:
    return len(text) <= MAX_PATTERN_CHARS and _PATTERN.fullmatch(text) is not None


def is_covered(asked: str, granted: Iterable[str]) -> bool:
    """Returns True when one of `granted` authorizes all that `asked` does.

    A grant of "os.path" covers a request for "os": importing a sub-module imports its parents, so it authorizes them.
    """
    return any(_covers(pattern, asked) for pattern in granted)


def is_denied(asked: str, denied: Iterable[str]) -> bool:
    """Returns True when all that `asked` authorizes is denied: "os.*" is not denied by "os.path" alone."""
    return any(_denies(pattern, asked) for pattern in denied)


def covered_by_both(left: Sequence[str], right: Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of each side that the other covers: together they authorize what both sides do."""
    return tuple(
        sorted(
            {
                *(pattern for pattern in left if is_covered(pattern, right)),
                *(pattern for pattern in right if is_covered(pattern, left)),
            }
        )
    )


def _denies(denied: str, asked: str) -> bool:
    denied_parts = denied.removesuffix("*").removesuffix(".").split(".")
    asked_parts = asked.removesuffix("*").removesuffix(".").split(".")
    return denied == "*" or asked_parts[: len(denied_parts)] == denied_parts


def _covers(granted: str, asked: str) -> bool:
    granted_parts = granted.split(".")
    asked_parts = asked.split(".")
    if granted_parts[-1] != "*":
        return "*" not in asked_parts and granted_parts[: len(asked_parts)] == asked_parts
    stem = granted_parts[:-1]
    shared = min(len(stem), len(asked_parts))
    return "*" not in asked_parts[:shared] and asked_parts[:shared] == stem[:shared]
