"""A daemon that is killed when it has made sandboxes ahead: `python -m tests.support.killed_ahead STATE_DIRECTORY COUNT`.

It prints the process ids of their first processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path

from executor_server.backends.local.fork_server.forked_process import ForkedProcess
from tests.support.forked_backend import ForkedBackend
from tests.support.killed_fork import SPEC


async def _make(state_dir: Path, count: int) -> str:
    backend = ForkedBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    for _ in range(2):
        await backend.create(SPEC)
    processes = [each.process for each in await backend.made_ahead(count)]
    return " ".join(str(each.init_pid) for each in processes if isinstance(each, ForkedProcess))


def main() -> None:
    with redirect_stdout(sys.stderr):
        pids = asyncio.run(_make(Path(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.write(pids)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
