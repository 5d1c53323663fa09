"""The versions of E2B's packages that were tried are the same in three places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_pairs_that_were_tried_are_the_same_everywhere() -> None:
    """`make test-e2b-matrix ARGS=--write` writes docs/backends.md."""
    command = [sys.executable, "tools/e2b_matrix.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
