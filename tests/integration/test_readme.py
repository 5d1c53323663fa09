"""The programs of the readme run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.daemon import Daemon

README = Path(__file__).parents[2] / "README.md"


def test_readmes_program_runs(daemon: Daemon) -> None:
    (program,) = re.findall(r"^```python\n(from executor_client import.*?)^```", README.read_text(), re.M | re.S)
    access = {f"EXECUTOR_{name.upper()}": str(value) for name, value in daemon.access.items()}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | access,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    first, *_, last = ran.stdout.splitlines()
    assert first.startswith("42 working")
    assert last == "Outcome.TIMEOUT VariablesState.KEPT 20"
