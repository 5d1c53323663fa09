"""Claims about nodes that are full, slow, silent or lying, and about what their sessions' clients read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import Principal, Reason, ResourceExhausted, Unavailable
from executor_server.fleet.api import session_creator
from executor_server.fleet.api.front_link import FrontLink
from executor_server.fleet.membership import NodeReport, NodeSession
from tests.rpc.edge import refusal, refused
from tests.rpc.fleet.conftest import Fleet
from tests.rpc.fleet.fake_node import FakeNode, serving
from tests.rpc.fleet.front import LOSES_QUICKLY, TestedFront, fronting
from tests.support.polling import eventually_async, eventually_awaited


async def full(node: FakeNode, request: Any, principal: Principal) -> pb.Session:
    raise ResourceExhausted(Reason.BACKEND_FULL, "no place", retry_after_s=3.0)


async def test_a_full_node_is_followed_by_the_next(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha", create=full), await fleet.node("beta")
    front = await fleet.front(alpha, beta)
    for number in range(8):
        assert (await front.create(f"r{number}")).node == "beta"
    assert alpha.created  # it was asked


async def test_all_nodes_full_names_the_shortest_wait(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha", create=full))
    request = service_pb.CreateSessionRequest(request_id="r1")
    found = await refusal(front.service.CreateSession(request, metadata=front.auth))
    assert (found.code.name, found.reason) == ("RESOURCE_EXHAUSTED", "BACKEND_FULL")
    assert found.retry_delay_s == pytest.approx(3.0, abs=0.5)


async def test_a_parked_request_gets_the_place_that_becomes_free(fleet: Fleet) -> None:
    node = await fleet.node("alpha", max_sessions=1)
    front = await fleet.front(node, park_s=30.0)
    first = await front.create("r1")
    second = asyncio.create_task(front.create("r2"))
    parked = await eventually_awaited(lambda: _parked(front))
    assert parked == 1
    node.end(first.session_id)
    assert (await second).session_id in node.sessions


async def _parked(front: TestedFront) -> int:
    return int((await front.fleet()).parked)


async def test_no_node_is_unavailable(fleet: Fleet) -> None:
    front = await fleet.stack.enter_async_context(fronting(fleet.directory, ["127.0.0.1:1"]))
    request = service_pb.CreateSessionRequest(request_id="r1")
    assert await refused(front.service.CreateSession(request, metadata=front.auth)) == ("UNAVAILABLE", "NO_NODE")


async def test_labels_that_no_node_has_are_refused_with_what_there_is(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha", labels={"zone": "a"}))
    assert (await front.create("r1", node_labels={"zone": "a"})).node == "alpha"
    request = service_pb.CreateSessionRequest(request_id="r2", node_labels={"zone": "b"})
    found = await refusal(front.service.CreateSession(request, metadata=front.auth))
    assert (found.code.name, found.reason) == ("FAILED_PRECONDITION", "NO_NODE")
    assert "zone=a" in found.message


async def test_a_draining_node_gets_no_session(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha", draining=True), await fleet.node("beta")
    front = await fleet.front(alpha, beta)
    for number in range(5):
        assert (await front.create(f"r{number}")).node == "beta"


async def test_a_node_without_the_fleets_control_gets_no_session(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha", takes_control=False), await fleet.node("beta")
    front = await fleet.front(alpha, beta)
    for number in range(5):
        assert (await front.create(f"r{number}")).node == "beta"


async def test_a_node_that_dies_in_the_middle_of_a_creation_is_asked_again_and_no_other(fleet: Fleet) -> None:
    """Its second process has the session that the first one had made before the connection broke."""
    beta = await fleet.node("beta", load=1.0, labels={"zone": "b"})
    async with AsyncExitStack() as first:
        begun = asyncio.Event()

        async def hang(node: FakeNode, request: Any, principal: Principal) -> pb.Session:
            node.add(principal.tenant, request.request_id)
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        alpha = FakeNode("alpha", fleet.directory / "certificates", create=hang, labels={"zone": "a"})
        await first.enter_async_context(serving(alpha))
        front = await fleet.front(alpha, beta, lease_s=3.0, fence_s=3.0)
        creation = asyncio.create_task(front.create("r1", node_labels={"zone": "a"}))
        await begun.wait()
        address = alpha.link_address
    alpha.create = None
    async with serving(alpha, address):
        session = await creation
        assert session.session_id in alpha.sessions
        assert len(alpha.sessions) == 1
        assert not beta.created


@pytest.mark.parametrize("withdrawn", [False, True])
async def test_a_request_that_is_repeated_in_vain_names_the_node(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, withdrawn: bool
) -> None:
    """The client read the id of its request in place of the node. A withdrawn request waits for its node, too."""
    monkeypatch.setattr(session_creator, "SILENCE_S", 0.05)
    begun = asyncio.Event()

    async def hang(node: FakeNode, request: Any, principal: Principal) -> pb.Session:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncExitStack() as up:
        alpha = FakeNode("alpha", fleet.directory / "certificates", create=hang if withdrawn else None)
        await up.enter_async_context(serving(alpha))
        front = await fleet.front(alpha)
        creation = asyncio.create_task(front.create("r1"))
        if withdrawn:
            await begun.wait()
        else:
            await creation
    if withdrawn:
        delete = service_pb.DeleteSessionRequest(request_id="r1")
        await front.service.DeleteSession(delete, metadata=front.auth)
        await asyncio.wait({creation})
        assert creation.exception() is not None
    request = service_pb.CreateSessionRequest(request_id="r1")
    found = await refusal(front.service.CreateSession(request, metadata=front.auth))
    assert (found.code.name, found.reason) == ("UNAVAILABLE", "NODE_FENCED")
    assert "the node alpha did not answer" in found.message


async def test_a_creation_goes_to_another_node_when_its_node_is_lost(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta", load=4.0)
    begun = asyncio.Event()

    async def hang(node: FakeNode, request: Any, principal: Principal) -> pb.Session:
        begun.set()
        node.reports = False
        await asyncio.Event().wait()
        raise AssertionError

    alpha.create = hang
    front = await fleet.front(alpha, beta, **LOSES_QUICKLY)
    creation = asyncio.create_task(front.create("r1"))
    await begun.wait()
    assert (await creation).node == "beta"
    state = (await front.states())["alpha"]
    assert state == "lost" or alpha.epoch == 2  # it may be back by now, as one that has ended what it had


async def test_a_call_to_a_lost_node_ends_though_its_connection_is_well(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is lost while the front sends it a large policy over a slow link, and reads none of its reports."""

    async def slowly(_link: FrontLink, _call: Any, _report: NodeReport) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FrontLink, "_control", slowly)
    alpha = await fleet.node("alpha", takes_control=False)
    session = alpha.add("local", "r1")
    front = await fleet.front(alpha, **LOSES_QUICKLY)
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="forever")
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async with asyncio.timeout(10.0):
            async for _ in front.service.Execute(request, metadata=front.auth):
                pass
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await front.get(session.session_id)).state == pb.SESSION_STATE_LOST


async def test_sessions_of_a_lost_node_are_lost_with_the_reason_and_stay_lost(fleet: Fleet) -> None:
    alpha = await fleet.node("alpha")
    front = await fleet.front(alpha, **LOSES_QUICKLY)
    session = await front.create()
    alpha.reports = False
    await front.until(alpha="lost")
    lost = await front.get(session.session_id)
    assert lost.state == pb.SESSION_STATE_LOST
    assert "alpha" in lost.lost_reason
    keep = service_pb.KeepAliveRequest(session_id=session.session_id)
    assert await refused(front.service.KeepAlive(keep, metadata=front.auth)) == ("FAILED_PRECONDITION", "SESSION_LOST")
    alpha.reports = True
    await front.until(alpha="serving")
    assert alpha.epoch == 2
    assert not alpha.sessions  # the node has ended what was lost
    assert (await front.get(session.session_id)).state == pb.SESSION_STATE_LOST
    listed = await front.service.ListSessions(service_pb.ListSessionsRequest(), metadata=front.auth)
    assert [each.session_id for each in listed.sessions] == [session.session_id]
    delete = service_pb.DeleteSessionRequest(session_id=session.session_id)
    await front.service.DeleteSession(delete, metadata=front.auth)
    listed = await front.service.ListSessions(service_pb.ListSessionsRequest(), metadata=front.auth)
    assert not listed.sessions


async def test_a_lost_session_of_another_tenant_is_not_found(fleet: Fleet) -> None:
    alpha = await fleet.node("alpha")
    front = await fleet.front(alpha, tenants=["acme", "other"], **LOSES_QUICKLY)
    session = await front.create(tenant="acme")
    alpha.reports = False
    await front.until(alpha="lost")
    get = service_pb.GetSessionRequest(session_id=session.session_id)
    call = front.service.GetSession(get, metadata=front.metadata("other"))
    assert await refused(call) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_a_node_that_claims_another_ones_session_is_refused(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    front = await fleet.front(alpha, beta, **LOSES_QUICKLY)
    session = await front.create("r1", node_labels={})
    other = beta if session.node == "alpha" else alpha
    stolen = NodeSession(session.session_id, "local", "r1")

    def lie(report: NodeReport) -> NodeReport:
        return replace(report, opened=(*report.opened, stolen))

    other.report = lie
    assert await eventually_awaited(lambda: _is(front, other.name, "lost"))
    assert (await front.get(session.session_id)).state == pb.SESSION_STATE_IDLE


async def _is(front: TestedFront, node: str, state: str) -> bool:
    return (await front.states())[node] == state


async def test_a_silent_node_does_not_delay_the_list_of_sessions(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    front = await fleet.front(alpha, beta, **LOSES_QUICKLY)
    for number in range(6):
        await front.create(f"r{number}")
    alpha.reports = False
    await front.until(alpha="lost", beta="serving")
    listed = await front.service.ListSessions(service_pb.ListSessionsRequest(), metadata=front.auth)
    assert len(listed.sessions) == 6


async def test_a_withdrawn_request_is_ended_on_its_node(fleet: Fleet) -> None:
    begun = asyncio.Event()

    async def slow(node: FakeNode, request: Any, principal: Principal) -> pb.Session:
        begun.set()
        node.add(principal.tenant, request.request_id)
        await asyncio.Event().wait()
        raise AssertionError

    alpha = await fleet.node("alpha", create=slow)
    front = await fleet.front(alpha)
    creation = asyncio.create_task(front.create("r1"))
    await begun.wait()
    delete = service_pb.DeleteSessionRequest(request_id="r1")
    await front.service.DeleteSession(delete, metadata=front.auth)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await creation
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert await eventually_async(lambda: not alpha.sessions)


async def test_quotas_of_sessions_hold_over_all_nodes(fleet: Fleet) -> None:
    nodes = [await fleet.node("alpha"), await fleet.node("beta"), await fleet.node("gamma")]
    policy = 'default = "default"\n[profiles.default.quotas]\nsessions = 4\n'
    front = await fleet.front(*nodes, policy=policy)
    requests = [front.create(f"r{number}") for number in range(10)]
    ended = await asyncio.gather(*requests, return_exceptions=True)
    made = [each for each in ended if isinstance(each, pb.Session)]
    assert len(made) == 4
    assert sum(len(node.sessions) for node in nodes) == 4


async def test_a_fenced_node_is_followed_by_the_next(fleet: Fleet) -> None:
    async def fenced(node: FakeNode, request: Any, principal: Principal) -> pb.Session:
        raise Unavailable(Reason.NODE_FENCED, "no lease", retry_after_s=1.0)

    alpha, beta = await fleet.node("alpha", create=fenced), await fleet.node("beta", load=4.0)
    front = await fleet.front(alpha, beta)
    assert (await front.create("r1")).node == "beta"


async def test_an_environment_is_not_declared_missing_while_a_node_does_not_answer(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    front = await fleet.front(alpha, beta)
    request = admin_pb.GetEnvironmentRequest(environment_id="e1")
    assert await refused(front.admin.GetEnvironment(request, metadata=front.auth)) == (
        "NOT_FOUND",
        "ENVIRONMENT_NOT_FOUND",
    )
    beta.answers_admins = False
    assert await refused(front.admin.GetEnvironment(request, metadata=front.auth)) == ("UNAVAILABLE", "NODE_FENCED")


async def test_a_node_that_the_operator_refuses_is_unlinked_at_once_and_its_sessions_are_lost(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta", load=0.9)
    front = await fleet.front(alpha, beta, **LOSES_QUICKLY)
    session = await front.create()
    assert session.node == "alpha"
    front.refuse("alpha")
    await front.until(alpha="refused", beta="serving")
    assert (await front.create("r2")).node == "beta"
    assert await eventually_awaited(partial(_is_lost, front, session.session_id))
    assert "refused_nodes" in (await front.fleet()).nodes[0].problem


async def test_a_node_that_is_allowed_again_is_linked_at_once(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"), refused_nodes=[])
    front.refuse("alpha")
    await front.until(alpha="refused")
    front.refuse()
    await front.until(alpha="serving")


async def test_a_refusal_that_can_not_be_read_changes_nothing(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    front.refuse("alpha")
    await front.until(alpha="refused")
    front.refuse("NOT A NAME")
    await front.until(alpha="refused")


async def _is_lost(front: TestedFront, session_id: str) -> bool:
    try:
        return bool((await front.get(session_id)).state == pb.SESSION_STATE_LOST)
    except grpc.aio.AioRpcError as error:  # not linked, and not declared lost yet
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return False


async def test_a_front_is_superseded_when_all_its_nodes_obey_another_and_not_when_one_says_so(fleet: Fleet) -> None:
    """One node that was broken into must not be able to end the front of the others."""
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    front = await fleet.front(alpha, beta, **LOSES_QUICKLY)
    alpha.obeys_another = True
    await front.until(alpha="refused", beta="serving")
    assert not await eventually_async(front.is_superseded.is_set, timeout_s=2.0)
    beta.obeys_another = True
    assert await eventually_async(front.is_superseded.is_set)
