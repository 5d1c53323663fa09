"""Approvals and views through a real front over two real nodes, and what becomes of them when one of these is killed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as pb
from executor_client import Approval, ExecutorClient, PolicyViolationError, Session
from tests.rpc.test_watching_sessions import Admin
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import code_of
from tests.support.machines import Fleet, fleet_without_cables

POLICY = """\
default = "asks"
[profiles.asks]
tools.ask = ["delete*"]
imports.ask = ["asyncio.*"]
approvals.wait_s = 60
"""
TRIES = """\
try:
    answer = delete_file(1)
except PermissionError as error:
    answer = str(error)
answer"""
DOES = "delete_file(1)"


@pytest.fixture
def machines() -> Iterator[Fleet]:
    require("local")
    node = "[pool]\nsize = 0\n[sessions]\nmax_sessions = 2"
    with fleet_without_cables("n1", "n2", policy=POLICY, node_config=node) as made:
        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def with_tool(client: ExecutorClient) -> Session:
    session = client.create_session(detached=True)
    session.register_tools({"delete_file": lambda number: f"deleted {number}"})
    return session


def decided(machines: Fleet, place: str) -> list[tuple[str, str, str]]:
    directory = machines.front.state_dir if place == "front" else machines.nodes[place].state_dir
    return [
        (each["what"], each["decision"], each.get("by", "").partition(":")[0])
        for each in records(directory / "audit")
        if each["kind"] == "approval_decided"
    ]


def test_requests_of_nodes_and_for_sessions_wait_at_the_front(machines: Fleet) -> None:
    with machines.client() as client:
        session = with_tool(client)
        assert "nobody who may approve is connected" in session.execute(TRIES).output
        with pytest.raises(PolicyViolationError, match="nobody who may approve is connected"):
            client.create_session(authorized_imports=["asyncio.events"])

        answers = iter(["once", "session", "deny", "once"])
        seen: list[Approval] = []

        def answer(approval: Approval) -> str:
            seen.append(approval)
            return next(answers)

        with machines.client(on_approval=answer) as asking:
            watched = asking.get_session(session.session_id)
            watched.register_tools({"delete_file": lambda number: f"deleted {number}"})
            assert [watched.execute(DOES).output for _ in range(3)] == ["deleted 1"] * 3
            with pytest.raises(PolicyViolationError, match="the approver refused it"):
                asking.create_session(authorized_imports=["asyncio.events"])
            with asking.create_session(authorized_imports=["asyncio.events"]) as allowed:
                assert allowed.execute("import asyncio.events").error is None
        assert [(each.what, each.detail, each.rule) for each in seen[:2]] == [
            ("delete_file", "1", "profiles.asks.tools.ask")
        ] * 2
        assert [each.what for each in seen[2:]] == ["asyncio.events"] * 2
        with grpc.insecure_channel(machines.front.address) as channel:
            admin = Admin(machines, channel)
            (read,) = admin.call("TailAudit", pb.TailAuditRequest(session_id=session.session_id, kinds=["tool_called"]))
            assert len(read.records) == 3
            (named,) = admin.call("TailAudit", pb.TailAuditRequest(node=session.info.node, kinds=["tool_called"]))
            assert list(named.records) == list(read.records)
            assert code_of(lambda: list(admin.call("TailAudit", pb.TailAuditRequest(node="n9")))) == "NOT_FOUND"
        session.close()
    assert decided(machines, session.info.node) == [
        ("delete_file", "denied", "front"),
        ("delete_file", "once", "token"),
        ("delete_file", "session", "token"),
    ]
    assert [each[:2] for each in decided(machines, "front")] == [
        *(("delete_file", "denied"), ("asyncio.events", "denied"), ("delete_file", "once"), ("delete_file", "session")),
        *(("asyncio.events", "denied"), ("asyncio.events", "once")),
    ]


def test_a_request_is_asked_again_by_the_next_front_and_withdrawn_with_its_node(
    machines: Fleet, pool: ThreadPoolExecutor
) -> None:
    with machines.client() as client:
        first, second = with_tool(client), with_tool(client)
        assert {first.info.node, second.info.node} == {"n1", "n2"}
        with machines.client() as approver:
            lists = approver.watch_approvals()
            assert next(lists) == ()
            kept = pool.submit(first.execute, DOES)
            pool.submit(second.execute, DOES)
            before = next(each for each in lists if len(each) == 2)
            machines.front.kill()
        machines.start()
        with (
            machines.client() as approver,
            grpc.insecure_channel(machines.front.address) as channel,
            Admin(machines, channel).watching() as watch,
        ):
            status = Admin(machines, channel).call("GetStatus", pb.GetStatusRequest())
            assert (status.is_front, status.sessions, status.max_sessions, status.approvals) == (True, 2, 4, 2)
            assert watch.views.keys() == {first.session_id, second.session_id}
            lists = approver.watch_approvals()
            again = next(each for each in lists if len(each) == 2)
            assert {each.session_id for each in again} == {each.session_id for each in before}
            machines.nodes[second.info.node].kill()
            (left,) = next(each for each in lists if len(each) == 1)
            assert left.session_id == first.session_id
            approver.decide_approval(left.approval_id, "once")
            assert kept.result().output == "deleted 1"
            lost = watch.until(second.session_id, lambda view: view.HasField("end_time"))
            assert "could not be reached" in lost.end_reason and lost.owned.session.image == "base"
            with Admin(machines, channel).watching() as later:
                assert later.views[second.session_id].end_reason == lost.end_reason
        first.close()
