"""Claims about how a front places sessions on nodes, and where it says that they are."""

from __future__ import annotations

import asyncio
from typing import Any

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.core import Principal
from tests.rpc.edge import refused
from tests.rpc.fleet.conftest import Fleet
from tests.rpc.fleet.fake_node import FakeNode
from tests.rpc.fleet.front import TestedFront
from tests.support.polling import eventually_async, eventually_awaited


async def test_a_session_is_made_on_a_node_that_names_itself(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    session = await front.create()
    assert session.node == "alpha"
    assert session.session_id in node.sessions


async def test_the_node_learns_the_caller_from_the_front(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node, tenants=["acme"])
    await front.create(tenant="acme")
    (principal,) = [principal for method, principal, _ in node.calls if method == "CreateSession"]
    assert (principal.tenant, principal.is_admin) == ("acme", False)


async def test_the_same_request_finds_its_session(fleet: Fleet) -> None:
    nodes = [await fleet.node("alpha"), await fleet.node("beta")]
    front = await fleet.front(*nodes)
    first = await front.create("r1")
    again = await front.create("r1")
    assert again.session_id == first.session_id
    assert sum(len(node.sessions) for node in nodes) == 1


async def test_the_same_request_finds_its_session_though_that_has_the_name_already(fleet: Fleet) -> None:
    """The front looked for the name first, and refused the request for its own session."""
    nodes = [await fleet.node("alpha"), await fleet.node("beta")]
    front = await fleet.front(*nodes)
    first = await front.create("r1", name="work")
    assert (await front.create("r1", name="work")).session_id == first.session_id
    other = service_pb.CreateSessionRequest(request_id="r2", name="work")
    assert await refused(front.service.CreateSession(other, metadata=front.auth)) == (
        "FAILED_PRECONDITION",
        "NAME_TAKEN",
    )
    assert sum(len(node.sessions) for node in nodes) == 1


async def test_the_same_request_joins_the_one_that_waits_for_the_name(fleet: Fleet) -> None:
    may_end, node = asyncio.Event(), await fleet.node("alpha")

    async def create(node: FakeNode, request: Any, principal: Principal) -> Any:
        if request.request_id == "r0":
            await may_end.wait()
        return node.add(principal.tenant, request.request_id)

    node.create = create
    front = await fleet.front(node)
    async with asyncio.TaskGroup() as calls:
        before = calls.create_task(front.create("r0", name="play"))  # gives a name, and holds up all others
        assert await eventually_async(lambda: "r0" in node.created)
        both = [calls.create_task(front.create("r1", name="work")) for _ in range(2)]
        asked = await eventually_awaited(lambda: _creations_of(front, 2))
        may_end.set()
    assert asked
    assert both[0].result().session_id == both[1].result().session_id != before.result().session_id
    assert node.created == ["r0", "r1"]


async def _creations_of(front: TestedFront, number: int) -> bool:
    usage = (await front.admin.GetUsage(admin_pb.GetUsageRequest(), metadata=front.auth)).tenants
    return any(each.sessions == number for each in usage)


async def test_an_id_without_a_node_is_not_found(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    for session_id in ("s1", "0" * 32, "-" + "0" * 32, "alpha-" + "0" * 31):
        request = service_pb.KeepAliveRequest(session_id=session_id)
        assert await refused(front.service.KeepAlive(request, metadata=front.auth)) == (
            "NOT_FOUND",
            "SESSION_NOT_FOUND",
        )
