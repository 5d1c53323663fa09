"""Keeps the sandboxes of one backend alive: renews their lifetimes, after which the cloud ends them.

So a sandbox outlives the last daemon by its lifetime at most. A lifetime is renewed several times before it ends, so
that some attempts may fail without harm. Both sides count seconds from now: the request holds a duration and no time of
day, and the waits here follow a clock that can't be set, so a wrong time of day on either side does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from executor_server.backends.e2b.failures import CloudFailure
from executor_server.backends.e2b.retry import with_retries
from executor_server.backends.e2b.sandbox import E2BSandbox

_RENEWALS_PER_LIFETIME = 4

_log = structlog.get_logger(__name__)


class LifetimeRenewer:
    """Owns one task that renews the lifetimes of all sandboxes."""

    def __init__(self, lifetime_s: float, living: Callable[[], Iterable[E2BSandbox]]) -> None:
        self._interval_s = lifetime_s / _RENEWALS_PER_LIFETIME
        self._living = living
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._renew_forever(), name="e2b: lifetimes")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.renew_all()
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not let all sandboxes end
                _log.exception("lifetimes_not_kept")

    async def renew_all(self) -> None:
        """Renews the lifetime of each running sandbox, once."""
        await asyncio.gather(*(self._renew(sandbox) for sandbox in list(self._living())))

    async def _renew(self, sandbox: E2BSandbox) -> None:
        try:
            # Bounded: a sandbox for which the cloud gives no answer must not delay the next renewal of the others.
            async with asyncio.timeout(self._interval_s):
                await with_retries(sandbox.prolong)
        except (CloudFailure, TimeoutError) as failure:  # the next renewal comes before the lifetime ends
            reason = str(failure) or f"not within {self._interval_s:g} s"
            _log.warning("sandbox_not_prolonged", sandbox_id=sandbox.sandbox_id, reason=reason)
