"""Turns at something scarce, fairly among tenants.

So many turns there are at a time. When all are taken, who asks waits; a turn that is given back goes first to tenants
that have none, then to the others, and among these to the one that has waited its round. So however many wait for
one tenant, another waits for one turn to end and not for theirs. Everything takes the same time however many wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from executor_server.errors import Reason, ResourceExhausted

# Of one tenant; all of them together are bounded by what they wait for.
MAX_WAITING = 256
RETRY_S = 2.0

# A future of an ordered dict leaves it in the same time wherever it stands.
_Ring: TypeAlias = "OrderedDict[str, OrderedDict[asyncio.Future[None], None]]"


class FairQueue:
    """Grants `capacity` turns at a time. Used in one event loop."""

    def __init__(self, capacity: int, *, max_waiting: int = MAX_WAITING) -> None:
        assert capacity > 0
        self._free = capacity
        self._max_waiting = max_waiting
        self._taken: dict[str, int] = {}
        # Who waits, by tenant: those of tenants without a turn, and of those that have one; next first.
        self._without: _Ring = OrderedDict()
        self._with: _Ring = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """A turn, for as long as the context is open. Raises ResourceExhausted when too many wait already."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    def waiting(self, tenant: str) -> int:
        """How many wait for a turn of this tenant."""
        return len(self._ring_of(tenant).get(tenant, ()))

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._note_taken(tenant)
            return
        if self.waiting(tenant) >= self._max_waiting:
            message = f"{self._max_waiting} requests of this tenant wait already"
            raise ResourceExhausted(Reason.QUEUE_FULL, message, retry_after_s=RETRY_S)
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ring_of(tenant).setdefault(tenant, OrderedDict())[grant] = None
        try:
            await grant
        except asyncio.CancelledError:
            if grant.cancelled():
                self._forget(tenant, grant)
            else:  # the turn was granted before the cancellation arrived
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
        """To whose turn it is; those that are just leaving are passed over."""
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
