"""Runs programs in sandboxes of the local backend, without a guest, as whatever user runs this.

A program of its own, so that an ordinary user can run it where the tests run as root:
`python -m tests.security.local_trials` reads {"image": PATH, "bwrap": PATH or null, "programs": {name: source}} from
standard input and answers {name: {"printed": VALUE, "stderr": TEXT}}, VALUE being the JSON that the program printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from executor_server.backends.local.host import examine_host
from executor_server.backends.local.trial import run_python
from executor_server.core.config.backend_config import LocalImage
from executor_server.core.model import SandboxSpec

MEMORY_BYTES = 2**28
DISK_BYTES = 2**22
PROCESSES = 24
HOST_UID = 2_000_000_123
TIMEOUT_S = 40.0
REMOVE_TIMEOUT_S = 5.0


async def run_programs(asked: dict[str, Any]) -> dict[str, Any]:
    host_uid = HOST_UID if os.geteuid() == 0 else None
    bwrap = Path(asked["bwrap"]) if asked["bwrap"] else None
    with tempfile.TemporaryDirectory(prefix="executor-trials-") as runtime:
        found = await examine_host(Path(runtime), {"base": LocalImage(python=Path(asked["image"]))}, bwrap, host_uid)
        assert found.resources is not None, found.findings
        image = found.resources.images["base"]
        spec = SandboxSpec("base", MEMORY_BYTES, PROCESSES, DISK_BYTES, 1.0)
        answers = {}
        for name, source in asked["programs"].items():
            group = found.resources.make_cgroup("trials", secrets.token_hex(4), spec)
            stdout, stderr = await run_python(
                found.resources,
                image,
                spec,
                source,
                host_uid=host_uid,
                cgroup=group,
                timeout_s=TIMEOUT_S,
                options=("-I",),
            )
            answers[name] = {
                "printed": json.loads(stdout) if stdout else None,
                "stderr": stderr,
                "oom_kills": group.oom_kills() if group else None,
            }
            if group is not None:
                await group.remove(asyncio.get_running_loop().time() + REMOVE_TIMEOUT_S)
    return answers


if __name__ == "__main__":
    json.dump(asyncio.run(run_programs(json.load(sys.stdin))), sys.stdout)
