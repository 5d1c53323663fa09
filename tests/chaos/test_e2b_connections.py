"""Connections to a sandbox of E2B that break again and again, many sessions at once, a cloud that is away when it is needed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_server.backends.e2b import E2BBackend, access
from executor_server.core.errors import Reason, ResourceExhausted
from executor_server.sessions.session import Session
from tests.contract.harness import PRINCIPAL, Harness
from tests.support.backends import require
from tests.support.e2b import WHY_NOT, Double, Kind, e2b_section
from tests.support.polling import eventually_async

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

BREAKS = 8
ASKED = 40
ROOM = 4
LIFETIME_S = 60.0


@asynccontextmanager
async def sessions(double: Double, **settings: Any) -> AsyncIterator[Harness]:
    directory = Path(tempfile.mkdtemp(prefix="w-"))
    async with Harness(E2BBackend(directory, e2b_section(double, **settings))) as harness:
        yield harness
    shutil.rmtree(directory)


@pytest.fixture
async def cloud() -> AsyncIterator[Double]:
    require("e2b")
    async with Double() as double:
        yield double


def import_functions(cloud: Double) -> int:
    """Processes of the machines that lead to a guest."""
    found = 0
    for sandbox in cloud.sandboxes.values():
        assert sandbox.machine.first_pid is not None
        for process in psutil.Process(sandbox.machine.first_pid).children(recursive=True):
            try:
                found += "relay" in process.cmdline()
            except psutil.NoSuchProcess:
                continue
    return found


async def test_ways_that_broke_leave_no_relay_behind(cloud: Double) -> None:
    async with sessions(cloud) as harness:
        session = await harness.session()
        for number in range(BREAKS):
            cloud.cut_all()
            assert (await harness.run(session, f"{number}")).output == number
        assert await eventually_async(lambda: import_functions(cloud) == 1)
        assert session.generation == 1


async def test_of_many_who_ask_at_once_as_many_are_served_as_there_is_room(cloud: Double) -> None:
    """The others get an error with a time, and find room when a session has ended."""
    async with sessions(cloud, max_sandboxes=ROOM) as harness:
        asked = await asyncio.gather(*(harness.session() for _ in range(ASKED)), return_exceptions=True)
        served = [one for one in asked if isinstance(one, Session)]
        refused = [one for one in asked if isinstance(one, ResourceExhausted)]
        assert (len(served), len(refused)) == (ROOM, ASKED - ROOM)
        assert {one.reason for one in refused} == {Reason.BACKEND_FULL}
        assert all(one.retry_after_s and one.retry_after_s > 0 for one in refused)
        assert len(cloud.sandboxes) == ROOM
        for session in served:
            await harness.manager.delete(PRINCIPAL, session.session_id)
        assert not cloud.sandboxes
        assert (await harness.run(await harness.session(), "1 + 1")).output == 2


async def test_a_sandbox_that_nobody_can_end_ends_by_itself(cloud: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of the daemon are refused from here on; the cloud keeps its own promise about the lifetime."""
    monkeypatch.setattr(access, "E2B_REQUEST_TIMEOUT_S", 1.0)
    async with sessions(cloud, lifetime_s=LIFETIME_S) as harness:
        session = await harness.session()
        refusal = cloud.fault(Kind.STATUS, "/sandboxes/{id}*", status=403, times=None)
        await harness.manager.delete(PRINCIPAL, session.session_id)
        assert refusal.struck
        assert cloud.sandboxes
        cloud.advance(LIFETIME_S + 1)
        assert await eventually_async(lambda: not cloud.sandboxes)
        cloud.clear_faults()
        await harness.backend.sweep()
        assert (await harness.run(await harness.session(), "1 + 1")).output == 2
