"""A daemon that is killed while it makes a sandbox by a fork, or at the latest when that is there.

    python -m tests.chaos.killed_fork STATE_DIRECTORY LINES

It runs so many lines of those two modules that ask for the fork and make a sandbox of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from executor_server.backends.local import LocalBackend
from executor_server.backends.local.fork_server import fork, forked_process
from executor_server.core import SandboxSpec
from tests.support.forked_backend import ForkedBackend

SPEC = SandboxSpec("base", 2**28, 32, 2**24, 60.0, fork_server="shared")


async def _create(state_dir: Path, kill_at: int) -> None:
    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    await ForkedBackend.fork_server_for(backend, SPEC)  # type: ignore[arg-type]  # what it needs of it, every one has
    files, lines = {fork.__file__, forked_process.__file__}, 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            if lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            lines += 1
        return trace

    sys.settrace(trace)
    await backend.create(SPEC)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(_create(Path(sys.argv[1]), int(sys.argv[2])))
