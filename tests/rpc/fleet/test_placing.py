"""Claims about how a front places sessions on nodes, and where it says that they are."""

from __future__ import annotations

from executor_api.v1 import executor_service_pb2 as service_pb
from tests.rpc.edge import refused
from tests.rpc.fleet.conftest import Fleet


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


async def test_an_id_without_a_node_is_not_found(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    for session_id in ("s1", "0" * 32, "-" + "0" * 32, "alpha-" + "0" * 31):
        request = service_pb.KeepAliveRequest(session_id=session_id)
        assert await refused(front.service.KeepAlive(request, metadata=front.auth)) == (
            "NOT_FOUND",
            "SESSION_NOT_FOUND",
        )
