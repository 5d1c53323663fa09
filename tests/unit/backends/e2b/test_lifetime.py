"""Lifetimes are renewed again and again, whether or not one attempt fails."""

from __future__ import annotations

import asyncio

import pytest

from executor_server.backends.e2b import retry
from executor_server.backends.e2b.failures import CloudFailure
from executor_server.backends.e2b.lifetime import LifetimeRenewer


class Sandbox:
    """Fails as the test asks, and counts its renewals."""

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
    renewer = LifetimeRenewer(0.01, lambda: sandboxes)  # type: ignore[arg-type,return-value]
    renewer.start()
    try:
        async with asyncio.timeout(10):
            for each in sandboxes:
                await each.often.wait()
    finally:
        await renewer.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 1e-4)


async def test_all_sandboxes_are_renewed_again_and_again() -> None:
    await kept(Sandbox(), Sandbox())


async def test_a_cloud_that_fails_for_a_while_ends_no_sandbox() -> None:
    await kept(Sandbox(*[CloudFailure("no")] * 20), Sandbox())


async def test_a_renewal_that_hangs_delays_no_other() -> None:
    class Hanging(Sandbox):
        async def prolong(self) -> None:
            await super().prolong()
            await asyncio.Event().wait()

    await kept(Hanging(), Sandbox())


async def test_an_unexpected_error_does_not_end_the_renewals() -> None:
    await kept(Sandbox(RuntimeError("bug")), Sandbox())


async def test_closing_ends_the_task_at_once() -> None:
    renewer = LifetimeRenewer(3600.0, list)
    renewer.start()
    async with asyncio.timeout(5):
        await renewer.close()
