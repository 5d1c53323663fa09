"""Lifetimes are kept up again and again, whatever becomes of one attempt."""

from __future__ import annotations

import asyncio

import pytest

from executor_server.backends.e2b import patience
from executor_server.backends.e2b.failures import CloudFailure
from executor_server.backends.e2b.lifetime import LifetimeKeeper


class Sandbox:
    """Fails as it is told to, and counts."""

    sandbox_id = "0" * 16

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.prolonged = 0
        self.often = asyncio.Event()

    async def prolong(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.prolonged += 1
        if self.prolonged == 3:
            self.often.set()


async def kept(*sandboxes: Sandbox) -> None:
    keeper = LifetimeKeeper(0.01, lambda: sandboxes)  # type: ignore[arg-type,return-value]
    keeper.start()
    try:
        async with asyncio.timeout(10):
            for each in sandboxes:
                await each.often.wait()
    finally:
        await keeper.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 1e-4)


async def test_all_are_kept_again_and_again() -> None:
    await kept(Sandbox(), Sandbox())


async def test_a_cloud_that_fails_for_a_while_ends_nothing() -> None:
    await kept(Sandbox(*[CloudFailure("no")] * 20), Sandbox())


async def test_one_that_hangs_keeps_nobody_else_waiting() -> None:
    class Hanging(Sandbox):
        async def prolong(self) -> None:
            await super().prolong()
            await asyncio.Event().wait()

    await kept(Hanging(), Sandbox())


async def test_a_bug_of_ours_ends_nothing() -> None:
    await kept(Sandbox(RuntimeError("bug")), Sandbox())


async def test_closing_ends_it_at_once() -> None:
    keeper = LifetimeKeeper(3600.0, list)
    keeper.start()
    async with asyncio.timeout(5):
        await keeper.close()
