"""Runs callers' work in a thread, one piece at a time, even if the callers leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from executor_server.core.fairness import FairSemaphore

T = TypeVar("T")


class OneAtATime:
    """Runs functions in a thread, one at a time, tenants in turn."""

    def __init__(self) -> None:
        self._turns = FairSemaphore(1)

    async def run(self, tenant: str, function: Callable[[], T]) -> T:
        """Returns or raises what the function does. Raises ResourceExhausted when too many calls wait already.

        The function goes on when its caller leaves, and keeps its turn: no caller can run many by leaving early.
        """
        async with self._turns.hold(tenant):
            work = asyncio.ensure_future(asyncio.to_thread(function))
            try:
                return await asyncio.shield(work)
            finally:
                await asyncio.gather(work, return_exceptions=True)
