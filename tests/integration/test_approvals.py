"""Approvals end to end: a real daemon, tenants, an approver of one of them, and the audit log."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_client import ExecutorClient
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, code_of, daemon_of, running_daemon
from tests.support.leftovers import DAEMON_PREFIX
from tests.support.polling import eventually

POLICY = """\
default = "asks"

[profiles.asks]
tools.ask = ["delete*"]
imports.ask = ["asyncio.*"]
packages.ask = ["six"]
approvals.wait_s = 60
"""
ONCE, SESSION, DENIED = (
    pb.ApprovalDecision.Value(f"APPROVAL_DECISION_{name}") for name in ("ONCE", "SESSION", "DENIED")
)
TRIES = """\
try:
    answer = delete_file(1)
except PermissionError as error:
    answer = str(error)
answer"""


class Approver:
    """Someone with the role, in calls of gRPC."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self.admin, self.metadata = pb_grpc.AdminServiceStub(channel), (("authorization", f"Bearer {token}"),)

    @contextmanager
    def watching(self) -> Iterator[Iterator[pb.WatchApprovalsResponse]]:
        call = self.admin.WatchApprovals(pb.WatchApprovalsRequest(), metadata=self.metadata)
        assert not next(call).approvals
        yield call
        call.cancel()

    def decide(self, approval_id: str, decision: int) -> None:
        request = pb.DecideApprovalRequest(approval_id=approval_id, decision=decision)  # type: ignore[arg-type]
        self.admin.DecideApproval(request, metadata=self.metadata)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def agent(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client_of("a") as client:
        yield client


@pytest.fixture(scope="module")
def anna(daemon: Daemon, channel: grpc.Channel, agent: ExecutorClient) -> Approver:
    found = Approver(channel, daemon.new_token("a", "approver"))
    assert eventually(lambda: code_of(lambda: found.decide("none", ONCE)) == "NOT_FOUND")
    return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def first_of(lists: Iterator[pb.WatchApprovalsResponse]) -> pb.Approval:
    return next(each.approvals[0] for each in lists if each.approvals)


def test_a_tool_is_called_when_its_approver_says_so_and_each_step_is_recorded(
    daemon: Daemon, agent: ExecutorClient, anna: Approver, pool: ThreadPoolExecutor
) -> None:
    deleted: list[int] = []

    def delete_file(number: int) -> str:
        deleted.append(number)
        return "deleted"

    with agent.create_session() as session:
        session.register_tools({"delete_file": delete_file})
        assert "nobody who may approve is connected" in session.execute(TRIES).output
        with anna.watching() as lists:
            run: Future[Any] = pool.submit(session.execute, TRIES)
            waiting = first_of(lists)
            assert (waiting.tenant, waiting.session_id, waiting.kind, waiting.what, waiting.detail, waiting.rule) == (
                *("a", session.session_id, pb.APPROVAL_KIND_TOOL, "delete_file", "1"),
                "profiles.asks.tools.ask",
            )
            assert not deleted
            anna.decide(waiting.approval_id, ONCE)
            assert (run.result().output, deleted) == ("deleted", [1])
            assert code_of(lambda: anna.decide(waiting.approval_id, DENIED)) == "NOT_FOUND"

            run = pool.submit(session.execute, TRIES)
            anna.decide(first_of(lists).approval_id, DENIED)
            assert "the tool 'delete_file' was not called: the approver refused it" in run.result().output
            assert deleted == [1]

            run = pool.submit(session.execute, TRIES)
            first_of(lists)
            session.close()
            assert run.exception() is not None or run.result().outcome is not None
            assert next(each for each in lists if not each.approvals) is not None

    told = [
        (each["kind"], each.get("decision"), each.get("by", "").partition(":")[0], each["what"])
        for each in records(daemon.state_dir / "audit")
        if each["kind"].startswith("approval_") and each.get("session") == session.session_id
    ]
    assert told == [
        ("approval_decided", "denied", "", "delete_file"),
        ("approval_requested", None, "", "delete_file"),
        ("approval_decided", "once", "token", "delete_file"),
        ("approval_requested", None, "", "delete_file"),
        ("approval_decided", "denied", "token", "delete_file"),
        ("approval_requested", None, "", "delete_file"),
        ("approval_decided", "denied", "", "delete_file"),
    ]


@pytest.mark.parametrize(
    "asked", [{"authorized_imports": ["asyncio.*"]}, {"packages": ["six"]}], ids=["import", "package"]
)
def test_a_request_for_a_session_is_repeated_until_it_is_decided(
    daemon: Daemon, channel: grpc.Channel, anna: Approver, asked: dict[str, list[str]], agent: ExecutorClient
) -> None:
    stub = service_grpc.ExecutorServiceStub(channel)
    metadata = (("authorization", f"Bearer {daemon.new_token('a')}"),)
    assert eventually(lambda: code_of(lambda: stub.GetPolicy(service_pb.GetPolicyRequest(), metadata=metadata)) == "OK")

    def create(request_id: str) -> str:
        request = service_pb.CreateSessionRequest(request_id=request_id, **asked)  # type: ignore[arg-type]
        try:
            return str(stub.CreateSession(request, metadata=metadata).session.session_id)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"

    unattended = create("r0")
    assert "PERMISSION_DENIED" in unattended and "nobody who may approve is connected" in unattended
    with anna.watching() as lists:
        assert create("r1").startswith("UNAVAILABLE: waits for an approval")
        waiting = first_of(lists)
        assert (waiting.session_id, waiting.request_id) == ("", "r1")
        assert create("r1").startswith("UNAVAILABLE")
        anna.decide(waiting.approval_id, DENIED)
        denied = create("r1")
        assert "PERMISSION_DENIED" in denied and "the approver refused it" in denied
        if "packages" in asked:
            return  # no index is configured that could serve it
        create("r2")
        anna.decide(first_of(lists).approval_id, ONCE)
        session_id = create("r2")
        assert ":" not in session_id
        assert create("r2") == session_id
        stub.DeleteSession(service_pb.DeleteSessionRequest(session_id=session_id), metadata=metadata)
        create("r3")
        code_of(lambda: stub.DeleteSession(service_pb.DeleteSessionRequest(request_id="r3"), metadata=metadata))
        assert next(each for each in lists if not each.approvals) is not None


def test_only_an_approver_of_the_tenant_decides(
    daemon: Daemon, channel: grpc.Channel, agent: ExecutorClient, anna: Approver, pool: ThreadPoolExecutor
) -> None:
    with daemon.client_of("b"), agent.create_session() as session, anna.watching() as lists:
        session.register_tools({"delete_of_agent": delete_of_agent})
        run = pool.submit(session.execute, "delete_of_agent()")
        waiting = first_of(lists)
        plain, stranger = Approver(channel, daemon.new_token("a")), Approver(channel, daemon.new_token("b", "approver"))
        assert eventually(lambda: code_of(lambda: stranger.decide(waiting.approval_id, ONCE)) == "NOT_FOUND")
        assert eventually(lambda: code_of(lambda: plain.decide(waiting.approval_id, ONCE)) == "PERMISSION_DENIED")
        with stranger.watching():
            pass
        assert (
            code_of(lambda: stranger.admin.Reload(pb.ReloadRequest(), metadata=stranger.metadata))
            == "PERMISSION_DENIED"
        )
        assert code_of(lambda: anna.decide(waiting.approval_id, 0)) == "INVALID_ARGUMENT"
        Approver(channel, daemon.token).decide(waiting.approval_id, SESSION)  # an admin
        assert run.result().output == "deleted"
        assert session.execute("delete_of_agent()").output == "deleted"


def delete_of_agent() -> str:
    """A tool."""
    return "deleted"


def test_a_call_that_waits_outlives_its_daemon_and_a_new_policy() -> None:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    config, policy = directory / "config.toml", directory / "policy.toml"
    policy.write_text(POLICY)
    config.write_text(f'policy.file = "{policy}"\npool.size = 0\n')
    called: list[int] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        first = stack.enter_context(running_daemon(directory, "--config", str(config)))
        client = stack.enter_context(first.client())
        session = client.create_session()
        session.register_tools({"delete_file": called.append})
        with grpc.insecure_channel(first.address) as channel:
            admin = Approver(channel, first.token)
            with admin.watching() as lists:
                run = pool.submit(session.execute, TRIES)
                known = first_of(lists).approval_id
                first.kill()
        second = stack.enter_context(running_daemon(directory, "--config", str(config)))
        with grpc.insecure_channel(second.address) as channel:
            admin = Approver(channel, second.token)
            assert code_of(lambda: admin.decide(known, ONCE)) == "NOT_FOUND"
            lists = admin.admin.WatchApprovals(pb.WatchApprovalsRequest(), metadata=admin.metadata)
            waiting = first_of(lists)
            policy.write_text(POLICY.replace('"delete*"', '"other*"'))
            admin.admin.Reload(pb.ReloadRequest(), metadata=admin.metadata)
            assert not called
            admin.decide(waiting.approval_id, ONCE)
            assert run.result().outcome.value == "succeeded" and called == [1]
            lists.cancel()
        session.close()
    shutil.rmtree(directory)
