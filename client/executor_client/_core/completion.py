"""Completion of names in a sandbox: what to list there, and which of the listed names to use. No I/O."""

from __future__ import annotations

import re

NAMES_MAX = 2_000

_NAME = r"[^\W\d]\w*"
# Names joined by dots. The dot in `f().x` does not match: completing it would mean calling f.
_DOTTED = re.compile(rf"(?<![\w.])(?:({_NAME}(?:\.{_NAME})*)\.)?({_NAME}|)\Z")


def listing(text: str) -> tuple[str, str] | None:
    """Returns the expression that lists the names for the end of the text, and the part of a name already typed.

    The expression calls nothing but `dir`, for names joined by dots. Returns None if they do not suffice.
    """
    found = _DOTTED.search(text)
    return None if found is None else (f"dir({found[1] or ''})", found[2])


def names_of(listed: object) -> set[str]:
    """Returns the names of a listing. The sandbox is untrusted, so only identifiers are kept."""
    if not isinstance(listed, list):
        return set()
    return {name for name in listed[:NAMES_MAX] if isinstance(name, str) and name.isidentifier()}
