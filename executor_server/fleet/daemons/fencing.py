"""Ends the sessions of a node whose front is silent or has reported them lost. `membership.Heartbeat` decides when.

While its front is silent, no client of a node can renew its own lease. So the clients' leases count as renewed until
the front is back.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from executor_server.core.lifecycle import SessionEnd
from executor_server.fleet.membership import FrontHello, Heartbeat
from executor_server.sessions import SessionManager

LOOK_INTERVAL_S = 0.1
AFTER_FAILURE_S = 1.0
"""Seconds before another attempt to end sandboxes, or to write the record."""

_log = structlog.get_logger(__name__)


class Fencing:
    """Owns the task that watches the heartbeats, and the one that ends all sessions."""

    def __init__(self, heartbeat: Heartbeat, sessions: SessionManager, destroy_s: float) -> None:
        """`destroy_s`: seconds after which every sandbox has ended by itself."""
        self.heartbeat = heartbeat
        self._sessions = sessions
        self._destroy_s = destroy_s
        self._is_silent = True
        self._linking = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Ends both tasks. Idempotent."""
        for task in (self._watching, self._ending):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def begin_link(self, hello: FrontHello) -> None:
        """Returns when the front holds the node and the sessions it reported lost have ended. Raises NodeRefused."""
        async with self._linking:
            while not self.heartbeat.hello(hello, time.monotonic()):
                await self._fence()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                await self._look(time.monotonic())
            except Exception:  # noqa: BLE001 - a background owner: the next check tries again
                _log.exception("fleet_fencing_failed")
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _look(self, now_s: float) -> None:
        before, self._is_silent = self._is_silent, self.heartbeat.is_silent(now_s)
        if self._is_silent is not before:
            _log.info("fleet_front_silent" if self._is_silent else "fleet_front_heard", epoch=self.heartbeat.epoch)
        if self._is_silent:
            self._sessions.restart_leases()
        if self.heartbeat.must_end(now_s):
            await self._fence()

    async def _fence(self) -> None:
        """Ends all sessions and begins the next epoch. Callers share one task; cancelling them does not stop it."""
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end_epoch())
        await asyncio.shield(self._ending)

    async def _end_epoch(self) -> None:
        ended, epoch = len(self._sessions.list_all()), self.heartbeat.epoch
        _log.warning("fleet_fencing", epoch=epoch, sessions=ended)
        await self._sessions.end_all(SessionEnd.LEASE_LOST, self._destroy_s)
        self.heartbeat.ended(time.monotonic())
        _log.warning("fleet_fenced", epoch=epoch, sessions=ended, next_epoch=self.heartbeat.epoch)
