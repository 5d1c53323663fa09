"""The versions of E2B's packages that were tried are the same in three places."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from executor_server.backends.e2b.check import TRIED_PAIRS

ROOT = Path(__file__).parents[3]


def test_the_pairs_that_were_tried_are_the_same_everywhere() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["e2b"]
    pinned = dict(line.split("==") for line in extra)
    assert (pinned["e2b"], pinned["e2b-code-interpreter"]) in TRIED_PAIRS
    rows = re.findall(r"^\| (\d\S+) \| (\d\S+) \| passes", (ROOT / "docs/backends.md").read_text(), re.MULTILINE)
    assert tuple(rows) == TRIED_PAIRS
