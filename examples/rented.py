"""Finds sandboxes rented from E2B, and runs the tests' double of it: for `make demo BACKEND=e2b-double`.

The double is a process that speaks E2B's protocol and creates real sandboxes on this host (tests/support/e2b); the
daemon uses it with the real SDK, like E2B. It needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOP_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 10.0
CLOUD = "https://api.e2b.app"


class DoubleFailure(Exception):
    """The double failed, as the message describes."""


@contextlib.contextmanager
def double() -> Iterator[Mapping[str, str]]:
    """Runs the double and yields the environment by which the SDK finds it. Raises DoubleFailure."""
    command = [sys.executable, "-m", "tests.support.e2b"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        environment: dict[str, str] = {}
        for line in process.stdout:
            if not line.startswith("export "):
                break
            name, _, value = shlex.split(line)[1].partition("=")
            environment[name] = value
        if not environment:
            raise DoubleFailure("there is no double of E2B here")  # it has printed the reason
        yield environment
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_TIMEOUT_S)
    if process.returncode != 0:
        raise DoubleFailure(f"the double ended with exit code {process.returncode}")


def rented_by(daemon_id: str) -> list[str]:
    """Returns the ids of one daemon's sandboxes that E2B still has; the API's address is in the environment."""
    metadata = urllib.parse.urlencode({"executor-daemon": daemon_id})
    address = os.environ.get("E2B_API_URL", CLOUD)
    query = urllib.parse.urlencode({"metadata": metadata, "state": "running,paused"})
    request = urllib.request.Request(
        f"{address}/v2/sandboxes?{query}", headers={"X-API-KEY": os.environ["E2B_API_KEY"]}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        return [each["sandboxID"] for each in json.load(response)]
