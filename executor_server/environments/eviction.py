"""Makes room: damaged environments that no sandbox has any more, then what disk_use.py chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from executor_server.environments.builds import Builds
from executor_server.environments.catalog import Catalog
from executor_server.environments.disk_use import DiskUse, measure, to_remove
from executor_server.environments.listing import Collected, Evicted
from executor_server.environments.observer import EnvironmentObserver
from executor_server.environments.store import remove

_log = structlog.get_logger(__name__)


class Evictor:
    """Removes one thing at a time, and only while no build can be using the cache."""

    def __init__(self, catalog: Catalog, builds: Builds, observer: EnvironmentObserver) -> None:
        self._catalog = catalog
        self._builds = builds
        self._observer = observer
        self._turn = asyncio.Lock()
        self.total_bytes = 0
        """Bytes on disk when they were measured last."""

    async def collect(self, max_bytes: int, reason: str) -> Collected:
        """Removes what is unused, the least recently used first, until `max_bytes` are left. Raises OSError."""
        async with self._turn:
            for path in self._catalog.forsaken():
                await asyncio.to_thread(remove, path)
            use = await self._measure()
            if use.total_bytes <= max_bytes:
                return Collected((), 0, use.total_bytes)
            async with self._builds.paused():
                return await self._remove(await self._measure(), max_bytes, reason)

    async def _measure(self) -> DiskUse:
        use = await asyncio.to_thread(measure, self._catalog.places)
        self.total_bytes = use.total_bytes
        return use

    async def _remove(self, use: DiskUse, max_bytes: int, reason: str) -> Collected:
        chosen = await asyncio.to_thread(to_remove, use, max_bytes, self._catalog.unused())
        evicted = []
        for removal in chosen:
            if isinstance(removal.what, Path):
                await asyncio.to_thread(self._catalog.store.discard, removal.what)
                continue
            if self._catalog.in_use(removal.what):  # since it was chosen; what comes later frees less then
                continue
            # From the look to the rename the loop does nothing else, so that no request can get it in between.
            await asyncio.to_thread(remove, self._catalog.take_out(removal.what))
            evicted.append(Evicted(removal.what, removal.freed_bytes))
            self._observer.environment_evicted(removal.what, removal.freed_bytes, reason)
            _log.info("environment_evicted", environment_id=removal.what, freed_bytes=removal.freed_bytes)
        left = await self._measure()
        if left.total_bytes > max_bytes:
            _log.warning("environments_above_limit", total_bytes=left.total_bytes, max_bytes=max_bytes)
        return Collected(tuple(evicted), use.total_bytes - left.total_bytes, left.total_bytes)
