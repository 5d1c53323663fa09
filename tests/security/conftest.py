"""The attacks run against the real thing: sessions of every backend in this process, and one daemon with its wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.contract.harness import Harness, open_harness
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of

FEW_SESSIONS = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "docker"])
async def shared_harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    require(request.param)
    async with open_harness(request.param) as ready:
        yield ready
        assert await ready.probe.existing() == set()


@pytest_asyncio.fixture(loop_scope="module")
async def harness(shared_harness: Harness) -> AsyncIterator[Harness]:
    """Sessions as in the contract: each test's own, on a backend that they share."""
    yield shared_harness
    await shared_harness.end_sessions()


@pytest.fixture(scope="package")
def daemon() -> Iterator[Daemon]:
    """A daemon of which a flood soon has too much."""
    require("local")
    with daemon_of(f"[sessions]\nmax_sessions = {FEW_SESSIONS}\n[pool]\nsize = 1\n") as running:
        yield running
