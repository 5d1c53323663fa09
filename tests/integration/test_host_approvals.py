"""Hosts that a person approves while the program waits: a real daemon, its proxy, and programs in its sandboxes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_client import ExecutionResult, Outcome, Session
from tests.support.audit import records
from tests.support.daemon import Daemon, running_daemon
from tests.support.internet.world import SUFFIX, Internet
from tests.support.network import FETCH, networked_daemon, networked_session, policy, proxies

WALL_S = 1.0
RULE = "profiles.networked.network.ask"


@pytest.fixture(scope="module", params=["local", "docker"])
def daemon(request: pytest.FixtureRequest, internet: Internet) -> Iterator[Daemon]:
    rules = policy(allowed=(), ask=[f"*.{SUFFIX}"])
    with networked_daemon(internet, str(request.param), rules) as daemon:
        yield daemon


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    """A session whose network has nothing but hosts to ask for."""
    limits = {"wall_time_s": WALL_S, "operations": 10**9}
    with daemon.client() as client, networked_session(client, limits=limits) as session:
        assert session.execute(FETCH).outcome is Outcome.SUCCEEDED
        yield session


class Approver:
    """A person who sees what waits, and decides it."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._stub: Any = admin_grpc.AdminServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._lists = self._stub.WatchApprovals(admin_pb.WatchApprovalsRequest(), metadata=self._metadata)
        next(self._lists)  # connected from here on

    def next(self) -> Any:
        """Returns the one approval that is waited for, once there is one."""
        while not (waiting := next(self._lists).approvals):
            pass
        (approval,) = waiting
        return approval

    def decide(self, approval: Any, decision: Any) -> None:
        request = admin_pb.DecideApprovalRequest(approval_id=approval.approval_id, decision=decision)
        self._stub.DecideApproval(request, metadata=self._metadata)

    def leave(self) -> None:
        self._lists.cancel()


@contextmanager
def approver(daemon: Daemon) -> Iterator[Approver]:
    with grpc.insecure_channel(daemon.address) as channel:
        made = Approver(channel, daemon.token)
        yield made
        made.leave()


@contextmanager
def fetching(session: Session, *hosts: str) -> Iterator[Future[ExecutionResult]]:
    """An execution that asks hosts one after the other, in a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(session.execute, f"[fetch('http://' + host) for host in {list(hosts)}]")


def test_a_connection_waits_for_a_person_and_the_clock_of_its_program_stands_still(
    daemon: Daemon, session: Session, internet: Internet
) -> None:
    host = internet.name("www")
    with approver(daemon) as person, fetching(session, host, host) as running:
        approval = person.next()
        assert (approval.session_id, approval.what, approval.rule) == (session.session_id, f"{host}:80", RULE)
        assert approval.execution_id
        began_s = time.monotonic()
        person.decide(_slow(approval, began_s), admin_pb.APPROVAL_DECISION_ONCE)
        person.decide(_slow(person.next(), time.monotonic()), admin_pb.APPROVAL_DECISION_SESSION)
        result = running.result()
    assert [status for status, _ in result.output or ()] == [200, 200], result.error
    assert result.usage.wall_time_s < WALL_S
    assert session.execute(f"fetch('http://{host}')[0]").output == 200, "it is approved for the session"
    kinds = [each["kind"] for each in records(daemon.state_dir / "audit") if each.get("session") == session.session_id]
    assert [kind for kind in kinds if kind.startswith("approval")] == ["approval_requested", "approval_decided"] * 2


def _slow(approval: Any, since_s: float) -> Any:
    """Returns the approval, after longer than the program may run."""
    while time.monotonic() - since_s < 1.5 * WALL_S:
        time.sleep(0.05)
    return approval


def test_a_refusal_and_a_missing_person_tell_the_program_what_to_do(
    daemon: Daemon, session: Session, internet: Internet
) -> None:
    absent, refused = internet.name("www"), internet.name("www")
    alone = session.execute(f"fetch('http://{absent}')")
    sentence = f"{absent}:80 is not reached: it needs an approval, and nobody who may approve is connected"
    assert alone.output[0] == 403 and sentence in alone.output[1]
    assert f"network: {sentence} (network.ask of the policy); go on without this host" in alone.logs
    with approver(daemon) as person, fetching(session, refused) as running:
        person.decide(person.next(), admin_pb.APPROVAL_DECISION_DENIED)
        result = running.result()
    assert result.output[0][0] == 403
    assert f"{refused}:80 is not reached: the approver refused it" in result.logs


def test_what_waits_ends_with_the_proxy_and_with_its_session(
    daemon: Daemon, session: Session, internet: Internet
) -> None:
    with approver(daemon) as person:
        with fetching(session, internet.name("www")) as running:
            person.next()
            for proxy in proxies(daemon):
                proxy.kill()
            assert "the egress proxy was restarted while it waited" in running.result().logs
        with fetching(session, internet.name("www")) as running:
            approval = person.next()
            session.close()
            with pytest.raises(grpc.RpcError, match="no request with this id waits"):
                person.decide(approval, admin_pb.APPROVAL_DECISION_ONCE)
            assert running.result().outcome is not Outcome.SUCCEEDED


def test_what_waits_ends_with_a_killed_daemon_and_the_clock_goes_on(internet: Internet) -> None:
    host = internet.name("www")
    code = f"""
import http.client, time
try:
    status = fetch("http://{host}")[0]
except (OSError, http.client.HTTPException):
    status = 0  # the proxy died before it could answer
while True:
    time.sleep(0.01)
"""
    limits = {"wall_time_s": WALL_S, "operations": 10**9}
    with networked_daemon(internet, "local", policy(allowed=(), ask=[host])) as daemon, daemon.client() as client:
        session = networked_session(client, limits=limits)
        session.execute(FETCH)
        with approver(daemon) as person, ThreadPoolExecutor(1) as pool:
            running = pool.submit(session.execute, code)
            person.next()
            daemon.kill()
            directory = daemon.state_dir.parent
            with running_daemon(directory, "--config", str(directory / "config.toml"), "--backend", "local"):
                assert running.result().outcome is Outcome.TIMEOUT
                assert session.execute("status").output in (0, 403)
                session.close()
