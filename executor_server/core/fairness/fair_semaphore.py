"""A semaphore that is fair among tenants.

A released permit goes first to tenants that hold none, then to the others, round robin in both groups. So however many
requests of one tenant wait, another tenant waits for one permit only. Every step takes constant time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from executor_server.core import Reason, ResourceExhausted

# Waiting requests per tenant; the RPC layer bounds those of all tenants together.
MAX_WAITING = 256
RETRY_S = 2.0

# An ordered dict removes a future in constant time wherever it stands.
_Ring: TypeAlias = "OrderedDict[str, OrderedDict[asyncio.Future[None], None]]"


class FairSemaphore:
    """Grants `capacity` permits at a time. For use in one event loop."""

    def __init__(self, capacity: int, *, max_waiting: int = MAX_WAITING) -> None:
        assert capacity > 0
        self._free = capacity
        self._max_waiting = max_waiting
        self._taken: dict[str, int] = {}
        # The waiting requests by tenant, next first: of tenants that hold no permit, and of those that hold one.
        self._without: _Ring = OrderedDict()
        self._with: _Ring = OrderedDict()

    @asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Holds a permit while the block runs. Raises ResourceExhausted when too many requests wait already."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    def waiting(self, tenant: str) -> int:
        """Returns the number of requests of this tenant that wait."""
        return len(self._ring_of(tenant).get(tenant, ()))

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._note_taken(tenant)
            return
        if self.waiting(tenant) >= self._max_waiting:
            message = f"{self._max_waiting} requests of this tenant are waiting already"
            raise ResourceExhausted(Reason.QUEUE_FULL, message, retry_after_s=RETRY_S)
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ring_of(tenant).setdefault(tenant, OrderedDict())[grant] = None
        try:
            await grant
        except asyncio.CancelledError:
            if grant.cancelled():
                self._forget(tenant, grant)
            else:  # the permit was granted before the cancellation arrived
                self._give_back(tenant)
            raise

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        if not self._taken[tenant]:
            del self._taken[tenant]
            if tenant in self._with:
                self._without[tenant] = self._with.pop(tenant)
        while self._free and (self._with or self._without):
            self._grant_next()

    def _grant_next(self) -> None:
        """Grants a permit to the next tenant; cancelled requests are skipped."""
        ring = self._without or self._with
        tenant, waiting = ring.popitem(last=False)
        while waiting:
            grant, _ = waiting.popitem(last=False)
            if not grant.done():
                grant.set_result(None)
                self._note_taken(tenant)
                break
        if waiting:
            self._ring_of(tenant)[tenant] = waiting

    def _note_taken(self, tenant: str) -> None:
        self._free -= 1
        self._taken[tenant] = self._taken.get(tenant, 0) + 1
        if tenant in self._without:
            self._with[tenant] = self._without.pop(tenant)

    def _forget(self, tenant: str, grant: asyncio.Future[None]) -> None:
        ring = self._ring_of(tenant)
        waiting = ring.get(tenant)
        if waiting is not None:
            waiting.pop(grant, None)
            if not waiting:
                del ring[tenant]

    def _ring_of(self, tenant: str) -> _Ring:
        return self._with if tenant in self._taken else self._without
