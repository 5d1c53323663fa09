"""Sessions in the double of E2B's cloud are paused and woken, and survive a network that breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.e2b import E2BBackend
from executor_server.core.config.state_dir import StateDir
from executor_server.core.model import Log, Outcome, OutputMode, Principal, Result, SandboxSpec
from executor_server.policy.requested import RequestedLimits
from executor_server.sessions import Session, SessionManager, SessionRequest, SessionSettings
from executor_server.sessions.journal.registry import Registry
from executor_server.sessions.pool.pool import PoolSettings, WarmPool
from tests.support.e2b import WHY_NOT, Double, Kind, e2b_section
from tests.support.polling import eventually_async
from tests.support.specs import LIMITS, session_spec

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

OWNER = Principal("tenant", "test")
SPEC = SandboxSpec(image="base", memory_bytes=2**28, processes=32, disk_bytes=2**24, orphan_time_s=60.0)
WAIT_S = 30.0
BOUNDS = replace(LIMITS, wall_time_s=WAIT_S, cpu_time_s=WAIT_S, operations=10**6, output_bytes=10**6)

COUNT = """
import time
for number in range(100):
    print(number)
    time.sleep(0.02)
"""


class Bench:
    """A daemon's sessions, in a cloud of our own."""

    def __init__(self, double: Double, manager: SessionManager) -> None:
        self.double = double
        self.manager = manager

    async def session(self) -> Session:
        return await self.manager.create(OWNER, SessionRequest("r", session_spec(SPEC, BOUNDS, ("*",))))


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:
        double = await stack.enter_async_context(Double())

        async def start(**section: Any) -> Bench:
            backend = E2BBackend(tmp_path, e2b_section(double, **section))
            await backend.start()
            stack.push_async_callback(backend.close)
            registry = Registry(StateDir(tmp_path))
            stack.callback(registry.close)
            settings = SessionSettings(sweep_interval_s=0.05, ping_interval_s=0.2)
            manager = SessionManager(backend, WarmPool(backend, PoolSettings()), registry, settings)
            await manager.recover()
            await manager.start()
            stack.push_async_callback(manager.close)
            return Bench(double, manager)

        yield start


async def run(session: Session, name: str, code: str) -> tuple[str, Result]:
    execution = await session.execute(name, code, OutputMode.TRAILING_EXPRESSION, RequestedLimits())
    kinds = [event.kind async for event in execution.events()]
    assert isinstance(kinds[-1], Result)
    return "".join(kind.text for kind in kinds if isinstance(kind, Log)), kinds[-1]


async def test_a_paused_session_has_its_variables_when_it_is_woken(start: Any) -> None:
    bench = await start(pause_idle_s=0.3)
    session = await bench.session()
    assert (await run(session, "one", "x = 41"))[1].outcome is Outcome.SUCCEEDED
    for name in ("two", "three"):
        assert await eventually_async(lambda: session.state == "paused")
        printed, result = await run(session, name, "x += 1; print(x)")
        assert result.outcome is Outcome.SUCCEEDED
    assert printed == "43\n"


async def test_a_network_that_is_cut_in_mid_execution_costs_nothing(start: Any) -> None:
    bench = await start(reconnect_s=WAIT_S)
    session = await bench.session()
    running = asyncio.create_task(run(session, "one", COUNT))
    assert await eventually_async(lambda: session.state == "busy" and session.execution("one").last_number > 10)
    for _ in range(3):
        before = session.execution("one").last_number
        bench.double.go_down()
        bench.double.cut_all()
        assert await eventually_async(lambda: not session._channel.connected)
        bench.double.come_up()
        assert await eventually_async(lambda before=before: session.execution("one").last_number > before)  # type: ignore[misc]
    printed, result = await running
    assert result.outcome is Outcome.SUCCEEDED
    assert printed == "".join(f"{number}\n" for number in range(100))


async def test_a_network_that_stays_cut_loses_the_session_with_the_reason(start: Any) -> None:
    bench = await start(reconnect_s=0.5)
    session = await bench.session()
    running = asyncio.create_task(run(session, "one", COUNT))
    assert await eventually_async(lambda: session.state == "busy" and session.execution("one").last_number > 10)
    bench.double.go_down()
    bench.double.cut_all()
    assert (await running)[1].outcome is Outcome.LOST
    assert session.lost_reason
    bench.double.come_up()


async def test_a_stream_that_is_damaged_at_each_start_is_made_again(start: Any) -> None:
    bench = await start(reconnect_s=WAIT_S)
    session = await bench.session()
    for kind in (Kind.STREAM_CUT, Kind.STREAM_GARBAGE, Kind.STREAM_NO_END):
        bench.double.fault(kind, "*/process.Process/Start", at_byte=100)
        bench.double.cut_all()
        printed, result = await run(session, kind.value, "print('here')")
        assert (printed, result.outcome) == ("here\n", Outcome.SUCCEEDED)
