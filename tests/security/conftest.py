"""The attacks run against the real thing: sessions of every backend in this process, and one daemon with its wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contract.harness import Harness, open_harness
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of

FEW_SESSIONS = 6


@pytest.fixture(params=["local", "docker"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """Sessions as in the contract."""
    require(request.param)
    async with open_harness(request.param) as ready:
        yield ready


@pytest.fixture(scope="package")
def daemon() -> Iterator[Daemon]:
    """A daemon of which a flood soon has too much."""
    require("local")
    with daemon_of(f"[sessions]\nmax_sessions = {FEW_SESSIONS}\n[pool]\nsize = 1\n") as running:
        yield running
