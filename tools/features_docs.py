"""Writes the table of features in docs/smolagents.md, from what the tests of tests/features hold each executor to.

    python tools/features_docs.py [--check]

`--check` writes nothing, and fails when the table is not what would be written.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests/features/expected.toml"
TARGET = ROOT / "docs/smolagents.md"
BEGIN, END = "<!-- features: made by tools/features_docs.py -->\n", "<!-- end of features -->\n"

HEADS = {
    "local": "local executor",
    "docker": "`DockerExecutor`",
    "ours_local": "ours, local",
    "ours_docker": "ours, Docker",
    "ours_e2b": "ours, E2B",
}


def document() -> str:
    """The page as it should be."""
    before, begin, rest = TARGET.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{TARGET.name} has no place for the table, between {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + "\n" + "\n".join(_rows()) + "\n\n" + END + after


def _rows() -> Iterator[str]:
    table = tomllib.loads(SOURCE.read_text())
    yield f"| | {' | '.join(HEADS.values())} |"
    yield "|---" * (len(HEADS) + 1) + "|"
    for group in table["group"]:
        yield f"| **{group['title']}** |" + " |" * len(HEADS)
        for feature in group["feature"]:
            cells = [feature[column] for column in HEADS]
            yield f"| {feature['title']} | {' | '.join(cells)} |"


def main() -> None:
    fresh = document()
    if sys.argv[1:] == ["--check"]:
        if TARGET.read_text() != fresh:
            sys.exit(f"{TARGET.name} is not what {SOURCE.name} says; run: make docs")
    else:
        TARGET.write_text(fresh)


if __name__ == "__main__":
    main()
