"""Runs one short command in a sandbox without a guest, for check-host and for tests of the isolation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.descriptors import read_within
from executor_server.backends.local.images import Image
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.backends.local.resources import Resources
from executor_server.core import SandboxFailure, SandboxSpec

_OUTPUT_BYTES = 1_048_576
_CHUNK_BYTES = 65_536
_END_TIMEOUT_S = 10.0

# The supervisor's first act in a sandbox of root's daemon; see bwrap_process.py.
_DROP = f"import os; os.setgroups([]); os.setresgid(*[{SANDBOX_ID}] * 3); os.setresuid(*[{SANDBOX_ID}] * 3)\n"


async def run_python(
    resources: Resources,
    image: Image,
    spec: SandboxSpec,
    code: str,
    *,
    host_uid: int | None,
    cgroup: Cgroup | None,
    timeout_s: float,
    options: Sequence[str] = ("-I", "-S"),
) -> tuple[bytes, str]:
    """Runs `code` in a fresh sandbox as a guest would run it, destroys the sandbox, and returns its stdout and stderr.

    The cgroup stays the caller's. Raises SandboxFailure when no sandbox can be made.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    source = code if host_uid is None else _DROP + code
    read, write = os.pipe()
    try:
        try:
            process = resources.start(
                image,
                spec,
                [str(image.python), *options, "-c", source],
                host_uid=host_uid,
                cgroup=cgroup,
                stdout=write,
            )
        finally:
            os.close(write)
        try:
            await process.confine_and_release(
                rlimits=resources.rlimits(spec),
                on_held=lambda pid: None,
                deadline=deadline,
            )
            stdout = await _read_to_end(read, deadline)
            stderr = process.last_words()
        finally:
            await process.kill_and_reap(asyncio.get_running_loop().time() + _END_TIMEOUT_S)
    finally:
        os.close(read)
    return stdout, stderr


async def _read_to_end(fd: int, deadline: float) -> bytes:
    output = b""
    while len(output) < _OUTPUT_BYTES:
        piece = await read_within(fd, _CHUNK_BYTES, deadline)
        if not piece:
            return output
        output += piece
    raise SandboxFailure("a trial wrote more than it may")
