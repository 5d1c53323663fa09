"""Patterns of authorized imports: their grammar, and whether one grant covers one request.

A pattern is what smolagents takes: a module ("numpy"), a module with all below it ("numpy.*"), or everything ("*").
Matching goes by whole dotted components, so "re" never covers "reprlib". What a pattern means for an import statement
is the guest's business (`guest/imports.py`); here patterns are only compared with patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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


def _covers(granted: str, asked: str) -> bool:
    granted_parts = granted.split(".")
    asked_parts = asked.split(".")
    if granted_parts[-1] != "*":
        return "*" not in asked_parts and granted_parts[: len(asked_parts)] == asked_parts
    stem = granted_parts[:-1]
    shared = min(len(stem), len(asked_parts))
    return "*" not in asked_parts[:shared] and asked_parts[:shared] == stem[:shared]
