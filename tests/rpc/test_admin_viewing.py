"""What viewers and consoles read: sessions as they change, those that ended, and the state of the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_api.v1 import types_pb2
from tests.rpc.edge import AUTH
from tests.rpc.test_admin import World, serving


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def stub(world: World, tmp_path: Path) -> AsyncIterator[Any]:
    async with serving(world, tmp_path) as address, grpc.aio.insecure_channel(address) as channel:
        yield pb_grpc.AdminServiceStub(channel)


async def whole(call: Any) -> list[pb.SessionView]:
    """Reads messages until a complete one; at most 3 s."""
    views: list[pb.SessionView] = []
    async with asyncio.timeout(3):
        while True:
            message = await call.read()
            views += message.sessions
            if message.complete:
                return views


async def test_a_watcher_gets_all_sessions_then_the_changes(world: World, stub: Any) -> None:
    call = stub.WatchSessions(pb.WatchSessionsRequest(), metadata=AUTH)
    first = await whole(call)
    assert {view.owned.session.session_id for view in first} == {"s0", "s1"}
    world.manager.sessions["s1"].state = "busy"
    (changed,) = await whole(call)
    assert changed.owned.session.session_id == "s1"
    assert changed.owned.session.state == types_pb2.SESSION_STATE_BUSY


async def test_the_state_of_the_daemon_is_shown(stub: Any) -> None:
    status = await stub.GetStatus(pb.GetStatusRequest(), metadata=AUTH)
    assert (status.version, status.sessions, status.max_sessions) == ("1", 2, 64)
    assert status.memory_bytes > status.available_memory_bytes > 0
