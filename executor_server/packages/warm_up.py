"""The first import of an environment: it makes bytecode that each session would otherwise have to make.

It runs code of packages, so it has a build sandbox of its own, without a network and with a read-only environment.
Python writes the bytecode below /tmp there; it comes out as a stream that bytecode.py checks and writes. A failure here
costs bytecode only: each session compiles what is missing. Modules that the requested packages don't import are not
compiled: for numpy and pandas that would take five times as long, for files that hardly any program imports.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import structlog

from executor_server.core import Progress, SandboxFailure
from executor_server.guest.wire.paths import ENVIRONMENT_PATH
from executor_server.packages.build_sandbox import Order, open_build_sandbox, program
from executor_server.packages.bytecode import MAX_STREAM_BYTES, BytecodeWriter, Written

STEP = "first import"
_SITE = f"{ENVIRONMENT_PATH}/site"
_BYTECODE_PATH = "/tmp/bytecode"
_PACKED_NAME = "bytecode"
_PACKED_PATH = f"/workspace/{_PACKED_NAME}"
_REPORT_TIME_S = 10.0
_MODULE = re.compile(r"[\w.]{1,200}")

_log = structlog.get_logger(__name__)


async def warm_up(
    order: Order,
    site_fd: int,
    distributions: Sequence[str],
    *,
    cache_tag: str,
    time_s: float,
    on_progress: Callable[[Progress], None],
) -> Written:
    """Imports the top-level modules of these distributions (empty: of all), and writes the bytecode into `site_fd`.

    Returns the files written; less or none if the first import fails, which is logged.
    """
    writer = BytecodeWriter(site_fd, cache_tag)
    task = {
        "site": _SITE,
        "cache": _BYTECODE_PATH,
        "distributions": list(distributions),
        "time_s": time_s,
        "packed": _PACKED_PATH,
    }
    try:
        async with open_build_sandbox(order) as sandbox:
            text = program("first_import", task)
            await sandbox.run(text, time_s=time_s + _REPORT_TIME_S, on_line=lambda said: _note(said, on_progress))
            async with aclosing(sandbox.take_file(_PACKED_NAME, MAX_STREAM_BYTES)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(writer.take, chunk)
        writer.end()
    except SandboxFailure as failure:
        _log.warning("first_import_failed", error=str(failure)[:500], files=writer.written.files)
    return writer.written


def _note(said: dict[str, Any], on_progress: Callable[[Progress], None]) -> None:
    match said:
        case {"done": int(done), "total": int(total)} if 0 <= done <= total < 100_000:
            on_progress(Progress(STEP, done, total, "modules"))
        case {"failed": str(module), "why": str(why)} if _MODULE.fullmatch(module):
            _log.info("module_not_imported", module=module, error=why[:300])


def cache_tag_of(python: str) -> str:
    """Returns the bytecode tag of a Python such as "3.12" or "3.13t"."""
    return "cpython-" + python.rstrip("t").replace(".", "")
