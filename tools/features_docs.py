"""Writes the table of features in docs/smolagents.md, from what the tests of tests/features hold each executor to.

    python tools/features_docs.py [--check]

`--check` writes nothing, and fails when the table is not what would be written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from pages import between_marks, write_or_check

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


def _rows() -> Iterator[str]:
    table = tomllib.loads(SOURCE.read_text())
    yield f"| | {' | '.join(HEADS.values())} |"
    yield "|---" * (len(HEADS) + 1) + "|"
    for group in table["group"]:
        yield f"| **{group['title']}** |" + " |" * len(HEADS)
        for feature in group["feature"]:
            cells = [feature[column] for column in HEADS]
            yield f"| {feature['title']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    write_or_check(TARGET, between_marks(TARGET, BEGIN, END, _rows()))
