"""Keeps the sandboxes of one backend alive: the cloud ends each of them at a time that somebody has to put off.

So a sandbox outlives the last daemon that cared for it by its lifetime at most. Its end is put off long before then:
several attempts may fail before one does any harm. The cloud is told how long from now, never until when, and the waits
here are those of a clock that nobody can set; what either side's calendar says does not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from executor_server.backends.e2b.failures import CloudFailure
from executor_server.backends.e2b.patience import patiently
from executor_server.backends.e2b.sandbox import E2BSandbox

# How often in one lifetime.
_TURNS = 4

_log = structlog.get_logger(__name__)


class LifetimeKeeper:
    """One task for all sandboxes."""

    def __init__(self, lifetime_s: float, living: Callable[[], Iterable[E2BSandbox]]) -> None:
        self._interval_s = lifetime_s / _TURNS
        self._living = living
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_forever(), name="e2b: lifetimes")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _keep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.keep()
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not let all sandboxes end
                _log.exception("lifetimes_not_kept")

    async def keep(self) -> None:
        """Puts off the end of all that run, once."""
        await asyncio.gather(*(self._prolong(sandbox) for sandbox in list(self._living())))

    async def _prolong(self, sandbox: E2BSandbox) -> None:
        try:
            # One of which the cloud does not answer must not keep all the others waiting for their next turn.
            async with asyncio.timeout(self._interval_s):
                await patiently(sandbox.prolong)
        except (CloudFailure, TimeoutError) as failure:  # there are some turns left
            reason = str(failure) or f"not within {self._interval_s:g} s"
            _log.warning("sandbox_not_prolonged", sandbox_id=sandbox.sandbox_id, reason=reason)
