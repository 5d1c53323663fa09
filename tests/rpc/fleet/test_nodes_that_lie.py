"""A front over nodes that lie about approvals and sessions: they deceive about their own sessions at most."""

from __future__ import annotations

import math
from typing import Any

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_server.core import Principal, Reason, ResourceExhausted
from tests.rpc.fleet.conftest import Fleet
from tests.rpc.fleet.fake_node import FakeNode
from tests.rpc.fleet.front import TestedFront
from tests.support.polling import eventually_async


def approval(session_id: str, **fields: Any) -> pb.Approval:
    usual = {"approval_id": "a1", "kind": pb.APPROVAL_KIND_TOOL, "what": "rm", "rule": "r", "wait_s": 60.0}
    return pb.Approval(session_id=session_id, **{**usual, **fields})


async def watching(front: TestedFront, tenant: str = "local") -> Any:
    call = front.admin.WatchApprovals(pb.WatchApprovalsRequest(), metadata=front.metadata(tenant))
    assert not (await call.read()).approvals
    return call


def decisions(node: FakeNode) -> list[tuple[Principal, pb.DecideApprovalRequest]]:
    return [(principal, request) for method, principal, request in node.calls if method == "DecideApproval"]


async def test_a_decision_comes_to_the_node_in_the_name_of_the_approver(fleet: Fleet) -> None:
    alpha = await fleet.node("alpha")
    session = alpha.add("local", "r1")
    front = await fleet.front(alpha)
    call = await watching(front)
    alpha.approvals = [approval(session.session_id, tenant="other", detail="1", approval_id="a7")]
    alpha.decided.set()
    (shown,) = (await call.read()).approvals
    assert (shown.tenant, shown.session_id, shown.what, shown.detail) == ("local", session.session_id, "rm", "1")
    request = pb.DecideApprovalRequest(
        approval_id=shown.approval_id, decision=pb.APPROVAL_DECISION_DENIED, reason="use the copy"
    )
    await front.admin.DecideApproval(request, metadata=front.auth)
    assert await eventually_async(lambda: bool(decisions(alpha)))
    ((by, decided),) = decisions(alpha)
    assert (by.tenant, by.is_admin, decided.approval_id, decided.reason) == ("local", True, "a7", "use the copy")
    assert not (await call.read()).approvals


async def test_malformed_requests_are_not_shown_and_do_not_hide_another(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    own, others = alpha.add("local", "r1"), beta.add("local", "r2")
    front = await fleet.front(alpha, beta)
    call = await watching(front)
    lies: list[dict[str, Any]] = [
        {"what": "rm\x1b[2J"},
        {"what": "x" * 513},
        {"detail": "\u202e"},
        {"detail": "x" * 1025},
        {"rule": "\n"},
        {"kind": 0},
        {"wait_s": math.nan},
        {"wait_s": 1e9},
        {"execution_id": "a b"},
    ]
    alpha.approvals = [
        *(approval(own.session_id, **{"approval_id": f"lie{number}", **lie}) for number, lie in enumerate(lies)),
        approval(own.session_id, approval_id="../a"),
        approval(others.session_id, approval_id="a2", what="stolen"),
        approval(own.session_id, approval_id="a3", what="good"),
    ]
    alpha.decided.set()
    assert [each.what for each in (await call.read()).approvals] == ["good"]


async def test_sessions_are_described_by_their_own_node_and_for_their_own_tenant(fleet: Fleet) -> None:
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    own, others = alpha.add("local", "r1"), beta.add("local", "r2")
    alpha.views = [
        described(own, "other"),
        described(others, "local"),
        described(types_pb2.Session(session_id="x"), ""),
    ]
    beta.views = [described(others, "local", "true")]
    front = await fleet.front(alpha, beta)
    call = front.admin.WatchSessions(pb.WatchSessionsRequest(), metadata=front.auth)
    (view,) = (await call.read()).sessions
    assert (view.owned.session.session_id, view.owned.session.image) == (others.session_id, "true")


async def test_a_node_that_reports_a_session_and_then_refuses_it_does_not_end_that_of_another_node(
    fleet: Fleet,
) -> None:
    """The liar's report came first and counted as the answer, so the front killed the session of the other node."""
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta", load=4.0)

    async def lie(node: FakeNode, request: Any, principal: Principal) -> Any:
        node.add(principal.tenant, request.request_id)
        await reports_were_read(node)
        raise ResourceExhausted(Reason.BACKEND_FULL, "full", 1.0)

    alpha.create = lie
    front = await fleet.front(alpha, beta)
    made = await front.create("r1")
    assert made.node == "beta"
    assert await eventually_async(lambda: not alpha.sessions), "the liar's session is the surplus one"
    assert list(beta.sessions) == [made.session_id]
    assert (await front.create("r1")).session_id == made.session_id


async def test_of_two_nodes_that_report_one_request_to_a_new_front_none_ends_the_others_session(fleet: Fleet) -> None:
    """A new front does not know which of them its predecessor has asked."""
    alpha, beta = await fleet.node("alpha"), await fleet.node("beta")
    sessions = {node.add("local", "r1").session_id for node in (alpha, beta)}
    await fleet.front(alpha, beta)
    await reports_were_read(alpha)
    await reports_were_read(beta)
    assert {*alpha.sessions, *beta.sessions} == sessions


async def reports_were_read(node: FakeNode) -> None:
    """Returns when the front has read a report that was built after the call."""
    before = node.renewals[-1].sequence
    assert await eventually_async(lambda: node.renewals[-1].sequence >= before + 2)


def described(session: Any, tenant: str, image: str = "false") -> pb.SessionView:
    view = pb.SessionView(owned=pb.OwnedSession(tenant=tenant, session=session))
    view.owned.session.image = image
    return view
