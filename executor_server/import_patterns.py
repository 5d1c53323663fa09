"""Patterns of authorized imports: their grammar, and whether one grant covers one request.

A pattern is what smolagents takes: a module ("numpy"), a module with all below it ("numpy.*"), or everything ("*").
Matching goes by whole dotted components, so "re" never covers "reprlib". What a pattern means for an import statement
is the guest's business (`guest/imports.py`); here patterns are only compared with patterns.

A pattern that denies reaches further down than one that authorizes, and not up: "os" denies "os.path" too, "os.path"
does not deny "os".
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
    """Whether all that `asked` authorizes is authorized by one of `granted` too.

    A grant of "os.path" covers a request for "os": importing a sub-module imports its parents, so it authorizes them.
    """
    return any(_covers(pattern, asked) for pattern in granted)


def is_denied(asked: str, denied: Iterable[str]) -> bool:
    """Whether all that `asked` is meant for is denied. "os.*" is not, where "os.path" is all that is denied."""
    return any(_denies(pattern, asked) for pattern in denied)


def covered_by_both(left: Sequence[str], right: Sequence[str]) -> tuple[str, ...]:
    """Patterns of one side that the other covers: they authorize nothing that either side does not."""
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
