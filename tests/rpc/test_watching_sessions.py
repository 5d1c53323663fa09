"""Sessions as consoles and viewers see them: as they change, after their end and a restart, and of which tenants."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_api.v1 import types_pb2
from executor_client import SessionGone
from executor_server.api.ended_sessions import KEPT_S, MAX_ENDED, EndedSessions
from tests.chaos.observe import only_sandbox
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, code_of, daemon_of, running_daemon
from tests.support.fleet_daemon import fleet_daemon, wanted
from tests.support.leftovers import DAEMON_PREFIX
from tests.support.machines import Fleet
from tests.support.polling import eventually

POLICY = """\
version = "7"
default = "plain"

[profiles.plain]
[profiles.open]
audit.view = "content"

[tenants.acme]
profile = "open"
"""
WATCH_TIMEOUT_S = 20.0


class Admin:
    """The calls of one credential."""

    def __init__(self, daemon: Daemon | Fleet, channel: grpc.Channel, token: str = "") -> None:
        self._stub = pb_grpc.AdminServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token or daemon.token}"),)

    def call(self, method: str, request: Message, **options: Any) -> Any:
        return getattr(self._stub, method)(request, metadata=self._metadata, **options)

    def inspect(self, session_id: str) -> pb.InspectSessionResponse:
        found: pb.InspectSessionResponse = self.call("InspectSession", pb.InspectSessionRequest(session_id=session_id))
        return found

    @contextmanager
    def watching(self, tenant: str = "") -> Iterator[Watch]:
        call = self.call("WatchSessions", pb.WatchSessionsRequest(tenant=tenant), timeout=WATCH_TIMEOUT_S)
        try:
            yield Watch(call)
        finally:
            call.cancel()


class Watch:
    """The state of all sessions as a watcher knows it."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.views: dict[str, pb.SessionView] = {}
        self._read()

    def _read(self) -> None:
        for message in self._call:
            self.views.update({view.owned.session.session_id: view for view in message.sessions})
            for forgotten in message.forgotten_ids:
                self.views.pop(forgotten, None)
            if message.complete:
                return

    def until(self, session_id: str, fits: Any) -> pb.SessionView:
        """Reads changes until the session's view fits."""
        while session_id not in self.views or not fits(self.views[session_id]):
            self._read()
        return self.views[session_id]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with (fleet_daemon if wanted() else daemon_of)("[pool]\nsize = 0\n", policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.address) as channel:
        yield channel


@pytest.fixture
def admin(daemon: Daemon, channel: grpc.Channel) -> Admin:
    return Admin(daemon, channel)


def test_a_session_is_watched_from_its_creation_past_its_end(daemon: Daemon, admin: Admin) -> None:
    with admin.watching() as watch, daemon.client() as client:
        with client.create_session(labels={"job": "nightly"}) as session:
            created = watch.until(session.session_id, lambda view: True)
            assert (created.owned.tenant, created.owned.session.labels["job"]) == ("local", "nightly")
            assert not created.HasField("end_time")
            session.execute("print('x' * 100)\nsum(range(1000))")
            used = watch.until(session.session_id, lambda view: view.use.executions == 1)
            assert used.last_outcome == types_pb2.OUTCOME_SUCCEEDED
            assert used.use.output_bytes >= 100
            assert used.use.peak_memory_bytes > 0
            session.execute("1 / 0")
            failed = watch.until(session.session_id, lambda view: view.use.executions == 2)
            assert failed.last_outcome == types_pb2.OUTCOME_EXCEPTION
        ended = watch.until(session.session_id, lambda view: view.HasField("end_time"))
        assert ended.end_reason == "the session was deleted"
        assert ended.owned.session.state == types_pb2.SESSION_STATE_UNSPECIFIED
        assert not ended.owned.session.lost_reason
        assert (ended.use.executions, ended.last_outcome) == (2, types_pb2.OUTCOME_EXCEPTION)
    with admin.watching() as later:
        assert later.views[session.session_id] == ended == admin.inspect(session.session_id).session
    with daemon.client() as client, pytest.raises(SessionGone, match="has ended: the session was deleted"):
        client.get_session(session.session_id)


def test_a_change_is_sent_within_300_ms(daemon: Daemon, admin: Admin) -> None:
    with admin.watching() as watch, daemon.client() as client, client.create_session() as session:
        watch.until(session.session_id, lambda view: True)
        took_s = []
        for count in range(1, 6):
            session.execute("1")
            ended_s = time.monotonic()
            watch.until(session.session_id, lambda view, count=count: view.use.executions == count)
            took_s.append(time.monotonic() - ended_s)
        assert sorted(took_s)[2] < 0.3


def test_a_lost_session_says_later_why(daemon: Daemon, admin: Admin) -> None:
    with daemon.client() as client, admin.watching() as watch:
        session = client.create_session()
        only_sandbox(daemon).supervisor.kill()
        lost = watch.until(
            session.session_id, lambda view: view.owned.session.state == types_pb2.SESSION_STATE_LOST
        ).owned.session
        session.close()
        ended = watch.until(session.session_id, lambda view: view.HasField("end_time"))
    assert lost.lost_reason
    assert (ended.owned.session.state, ended.end_reason) == (types_pb2.SESSION_STATE_LOST, lost.lost_reason)


def test_viewers_see_their_own_tenant_only(daemon: Daemon, channel: grpc.Channel, admin: Admin) -> None:
    with daemon.client_of("acme") as theirs, daemon.client_of("globex") as others:
        viewer = Admin(daemon, channel, daemon.new_token("acme", "viewer"))
        agent = Admin(daemon, channel, daemon.new_token("acme"))
        own, foreign = theirs.create_session(), others.create_session()
        assert eventually(lambda: code_of(lambda: viewer.inspect(own.session_id)) == "OK")
        with viewer.watching() as watch, viewer.watching("globex") as none:
            assert (set(watch.views), none.views) == ({own.session_id}, {})
            foreign.close()
            own.close()
            watch.until(own.session_id, lambda view: view.HasField("end_time"))
            assert (set(watch.views), none.views) == ({own.session_id}, {})
        with admin.watching() as everything:
            assert {own.session_id, foreign.session_id} <= set(everything.views)
        usage = viewer.call("GetUsage", pb.GetUsageRequest())
        assert [each.tenant for each in usage.tenants] == ["acme"]
        assert not viewer.call("GetUsage", pb.GetUsageRequest(tenant="globex")).tenants
        missing = "0" * 32
        foreign_calls = [
            ("InspectSession", pb.InspectSessionRequest),
            ("GetSessionNetwork", pb.GetSessionNetworkRequest),
            ("ListExecutions", pb.ListExecutionsRequest),
        ]
        for method, request in foreign_calls:
            refusals = {
                str(refused.details()).replace(session_id, "ID")
                for session_id in (foreign.session_id, missing)
                for refused in (_refusal(viewer, method, request(session_id=session_id)),)
            }
            assert len(refusals) == 1, "an existing session of another tenant looks different"
        assert code_of(lambda: viewer.inspect(foreign.session_id)) == "NOT_FOUND"
        changing: tuple[tuple[str, Message], ...] = (
            ("KillSession", pb.KillSessionRequest(session_id=own.session_id)),
            ("Drain", pb.DrainRequest()),
            ("GetStatus", pb.GetStatusRequest()),
            ("ListAllSessions", pb.ListAllSessionsRequest()),
            ("WatchApprovals", pb.WatchApprovalsRequest()),
        )
        for method, message in changing:
            assert _refusal(viewer, method, message).code().name == "PERMISSION_DENIED"
        refusal = _refusal(agent, "InspectSession", pb.InspectSessionRequest(session_id=own.session_id))
        assert refusal.code().name == "PERMISSION_DENIED"
        assert "--role viewer" in refusal.details()


def _refusal(caller: Admin, method: str, request: Message) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        answer = caller.call(method, request)
        if hasattr(answer, "__next__"):
            next(answer)
    return raised.value


def test_a_session_is_inspected_with_what_is_in_it(daemon: Daemon, admin: Admin) -> None:
    with daemon.client_of("acme") as client, client.create_session() as session:
        session.register_tools({"search": lambda query: query})
        session.savepoint()
        session.execute("x = 1", savepoint=True)
        process = session.processes.start(["sleep", "60"])
        found = admin.inspect(session.session_id)
        assert list(found.tools) == ["search"]
        assert [each.number for each in found.savepoints] == [1, 2]
        assert [list(each.argv) for each in found.processes] == [["sleep", "60"]]
        session.rollback(1)
        assert [each.number for each in admin.inspect(session.session_id).savepoints] == [1]
        process.kill()
    with daemon.client_of("globex") as client, client.create_session() as session:
        session.processes.run(["echo", "secret"])
        (hidden,) = admin.inspect(session.session_id).processes
        assert (hidden.has_pty, list(hidden.argv), hidden.cwd) == (False, [], "")
    looks = [each["tenant"] for each in records(daemon.state_dir / "audit") if each["kind"] == "content_viewed"]
    assert set(looks) == {"acme"}


def test_the_state_of_the_daemon_is_described(daemon: Daemon, admin: Admin) -> None:
    with daemon.client() as client, client.create_session():
        status = admin.call("GetStatus", pb.GetStatusRequest())
    assert (status.sessions, status.busy, status.draining, status.is_front) == (1, 0, False, False)
    assert status.memory_bytes > status.available_memory_bytes > 0
    (backend,) = status.backends
    assert (backend.backend, backend.state, backend.sessions) == ("local", "up", 1)
    assert "base" in backend.images
    assert status.policy.version == "7"
    assert status.audit.is_configured
    audit = records(daemon.state_dir / "audit")
    assert len(audit) >= status.audit.last_seq > 0
    assert "GetStatus" not in {each.get("method") for each in audit}


def test_watchers_that_came_before_a_restart_learn_what_ended_then(daemon: Daemon) -> None:
    """Also after the daemon was killed; a damaged file is begun anew."""
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    with running_daemon(directory) as first, first.client() as client:
        deleted, kept = client.create_session(), client.create_session(detached=True)
        deleted.close()
    stopped = directory / "s" / "ended.db"
    with running_daemon(directory) as second, grpc.insecure_channel(second.address) as channel:
        reasons = {
            view.end_reason
            for view in (Admin(second, channel).inspect(each.session_id).session for each in (deleted, kept))
        }
        assert reasons == {"the session was deleted", "the daemon stopped"}
    stopped.write_bytes(b"damaged" * 1000)
    with running_daemon(directory) as third, grpc.insecure_channel(third.address) as channel:
        assert code_of(lambda: Admin(third, channel).inspect(deleted.session_id)) == "NOT_FOUND"
    shutil.rmtree(directory)


def test_ended_sessions_are_bounded_and_one_tenant_does_not_push_out_others(tmp_path: Path) -> None:
    now_s = 1_800_000_000.0
    with closing(EndedSessions(tmp_path / "ended.db", lambda: now_s)) as ended:
        ended.add(_view("quiet", "acme"))
        for number in range(MAX_ENDED + 5):
            ended.add(_view(f"flood{number}", "globex"))
        assert [view.owned.session.session_id for view in ended.forget()] == [f"flood{number}" for number in range(6)]
    with closing(EndedSessions(tmp_path / "ended.db", lambda: now_s + KEPT_S + 1)) as later:
        assert len(list(later)) == len(later.forget()) == MAX_ENDED


def _view(session_id: str, tenant: str) -> pb.SessionView:
    session = types_pb2.Session(session_id=session_id)
    return pb.SessionView(owned=pb.OwnedSession(tenant=tenant, session=session), end_reason="the session was deleted")
