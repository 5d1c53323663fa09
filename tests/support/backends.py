"""Which backends this host can run, and which of them a run of the tests must not do without.

A test asks with `require("local")`. Where the backend cannot work the test is skipped, with the reason; where the
environment names it in REQUIRED_BACKENDS (comma-separated, as CI does) the test fails instead: a suite that skips what
it was meant to prove must not look like one that passed.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

CHECK_TIMEOUT_S = 60.0


def require(backend: str) -> None:
    """Skips the test, or fails it, when `backend` cannot run here."""
    reason = why_not(backend)
    if not reason:
        return
    if backend in os.environ.get("REQUIRED_BACKENDS", "").split(","):
        pytest.fail(f"backend {backend} is required here, but {reason}", pytrace=False)
    pytest.skip(f"backend {backend}: {reason}")


@functools.cache
def why_not(backend: str) -> str:
    """Why `backend` cannot run here; empty when it can. The daemon's own answer, asked once."""
    if sys.platform != "linux":
        return "it needs Linux"
    check = subprocess.run(
        [sys.executable, "-m", "executor_server", "check-host", "--backend", backend],
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    return "" if check.returncode == 0 else f"check-host says:\n{check.stdout}{check.stderr}"
