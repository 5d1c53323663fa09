"""Reads files of agent programs: `=== name (since X.Y)`, then the source, up to the empty line before the next.

Standard library only, and no newer Python than the oldest that a sandbox may have.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_HEADER = re.compile(r"^=== (.+?)(?: \(since (\d+)\.(\d+)\))?\n", re.MULTILINE)


def programs(name: str) -> dict[str, str]:
    """Returns the programs of one file whose syntax this Python has."""
    text = (Path(__file__).parent / "programs" / f"{name}.txt").read_text(encoding="utf-8")
    _, *pieces = _HEADER.split(text)
    found = {}
    for title, major, minor, source in zip(*(pieces[field::4] for field in range(4))):  # noqa: B905 (3.9 has no strict)
        if major is None or sys.version_info >= (int(major), int(minor)):
            found[title] = source.strip("\n")
    return found
