"""What a front reserves for a session it gives back, whatever becomes of the request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.asking import Asking
from executor_server.core import NotFound, Principal
from executor_server.core.config import Config
from executor_server.fleet.api.fleet_news import FleetNews
from executor_server.fleet.api.front_sessions import SessionNames
from executor_server.fleet.api.session_creator import SessionCreator
from executor_server.fleet.membership import FleetStore, Members, Reservations, Timing
from executor_server.policy import QuotasTable, policy_for
from executor_server.policy.approvals import Approvals
from executor_server.policy.file import built_in_policy


async def settled() -> None:
    """All nodes of an earlier front have reported."""


async def test_a_creation_that_is_withdrawn_before_it_begins_gives_its_place_back(tmp_path: Path) -> None:
    """A task that is cancelled before its first step runs nothing, and no `finally` either."""
    store = FleetStore(tmp_path / "fleet.db")
    members = Members(store, Timing(), 0.0, 0.0)
    reservations = Reservations(members, lambda tenant: QuotasTable(sessions=1))
    policy = policy_for(built_in_policy(), Config())
    nothing = cast("Any", None)
    fleet = cast("Any", SimpleNamespace(settled=settled))
    news, asking = FleetNews(None, None, lambda: 0), Asking(Approvals())
    names = SessionNames(fleet)
    creator = SessionCreator(lambda: policy, fleet, names, reservations, nothing, nothing, asking, news)
    request = service_pb.CreateSessionRequest(request_id="r1", lease_id="a" * 32)
    creating = asyncio.create_task(creator.create(Principal("local", "p"), request))
    await asyncio.sleep(0)
    assert members.sessions.count("local") == 1
    assert creator.end_of_lease("local", "a" * 32) == 1
    with pytest.raises(NotFound):
        await creating
    assert members.sessions.count("local") == 0
    assert reservations.find("local", "r1") is None
    store.close()
