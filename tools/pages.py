"""Writes or checks the pages of docs/ that are made, wholly or between two marks, from their sources."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def between_marks(target: Path, begin: str, end: str, lines: Iterable[str]) -> str:
    """Returns the page with these lines between its two marks. Exits when it lacks a mark."""
    before, found_begin, rest = target.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        sys.exit(f"{target.name} has no place for the table, between {begin.strip()} and {end.strip()}")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def write_or_check(target: Path, fresh: str) -> None:
    """Writes the page. With `--check` in the arguments of the program, exits when it is not what would be written."""
    if "--check" not in sys.argv[1:]:
        target.write_text(fresh)
    elif not target.exists() or target.read_text() != fresh:
        sys.exit(f"{target.name} is not what {Path(sys.argv[0]).name} would write; run: make docs")
