"""Tries images with our guest: `python tools/probe_images.py base data`.

A daemon with the Docker backend runs `images/NAME/probe.py` in a sandbox of each, confined as agents' code is. So what
fails in a sandbox only, for want of a writable root or of a network, fails here and not with somebody's agent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from executor_client import ExecutorClient, ExecutorClientError, Outcome

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

from own_daemon import DaemonFailure, own_daemon  # noqa: E402 - it lies beside the demo, which is no package


def probe(client: ExecutorClient, name: str) -> bool:
    """Whether an image does what it promises; says so in a line, or says why not."""
    began = time.monotonic()
    code = (ROOT / "images" / name / "probe.py").read_text()
    with client.create_session(image=name, authorized_imports=["*"]) as session:
        result = session.execute(code)
    if result.outcome is Outcome.SUCCEEDED:
        print(f"probe: {name:8} {result.output} ({time.monotonic() - began:.1f} s)")
        return True
    told = (result.error.traceback or result.error.message) if result.error is not None else ""
    print(f"probe: {name} failed ({result.outcome.name.lower()})\n{result.logs}{told}", file=sys.stderr)
    return False


def main(names: Sequence[str]) -> int:
    try:
        with own_daemon("docker") as address, ExecutorClient(address) as client:
            failed = [name for name in names if not probe(client, name)]
            return 1 if failed else 0
    except (DaemonFailure, ExecutorClientError) as failure:
        print(f"probe: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
