"""The first import of an environment, which makes the bytecode that every session would otherwise make for itself.

It runs code of packages, so it has a workshop of its own: without a network, in which the environment is read-only.
Python writes the bytecode below /tmp there; it comes out as a stream that bytecode.py checks and writes. Whatever goes
wrong costs bytecode and no environment: what is missing is compiled in each session, as it is for an image without
bytecode. What no asked package imports is not compiled ahead: for numpy and pandas that would take five times as long,
for files that hardly any program imports.
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
from executor_server.packages.bytecode import MAX_STREAM_BYTES, BytecodeWriter, Written
from executor_server.packages.workshop import Order, open_workshop, program

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

    Returns what was written; where the first import fails, that is less or nothing, and the log says why.
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
        async with open_workshop(order) as workshop:
            text = program("first_import", task)
            await workshop.run(text, time_s=time_s + _REPORT_TIME_S, on_line=lambda said: _note(said, on_progress))
            async with aclosing(workshop.take_file(_PACKED_NAME, MAX_STREAM_BYTES)) as chunks:
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
    """Returns the tag of bytecode of a Python such as "3.12" or "3.13t"."""
    return "cpython-" + python.rstrip("t").replace(".", "")
