"""Sweeps the host at intervals: destroys everything with this daemon's id that belongs to no known sandbox.

A sandbox whose destruction failed, or whose creation was interrupted, leaves something behind; the backend finds it by
the id. A failure is logged and delays the next sweep, longer each time; only `close` ends the sweeping.
"""

from __future__ import annotations

import asyncio

import structlog

from executor_server.backends.base import Backend
from executor_server.core import SandboxFailure

# The wait doubles after each failure, up to this number of intervals.
_MAX_BACKOFF_FACTOR = 16

_log = structlog.get_logger(__name__)


class HostSweeper:
    """Owns the task that sweeps. The backend must have started, and is closed after the sweeper."""

    def __init__(self, backend: Backend, interval_s: float) -> None:
        self._backend = backend
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to sweep, first after one interval: a starting backend sweeps by itself."""
        assert self._task is None, "a sweeper starts once"
        self._task = asyncio.create_task(self._sweep_forever())

    async def close(self) -> None:
        """Ends the task, in the middle of a sweep too. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sweep_forever(self) -> None:
        wait_s = self._interval_s
        while True:
            await asyncio.sleep(wait_s)
            longer_s = min(wait_s * 2, self._interval_s * _MAX_BACKOFF_FACTOR)
            try:
                found = await self._backend.sweep()
            except SandboxFailure as failure:
                wait_s = longer_s
                _log.warning("host_sweep_failed", error=str(failure), retry_after_s=wait_s)
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end sweeping for good
                wait_s = longer_s
                _log.exception("host_sweep_broke", retry_after_s=wait_s)
            else:
                wait_s = self._interval_s
                if found:
                    _log.warning("host_swept", found=found)
