"""Executions as operators see them: a real daemon, with a profile for each value of audit.view."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_client import Session
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, code_of, daemon_of

POLICY = """\
version = "7"
default = "metadata"

[profiles.metadata]
[profiles.content]
audit.view = "content"
[profiles.none]
audit.view = "none"

[tenants.seen]
profile = "content"
[tenants.unseen]
profile = "none"
"""
CODE = """\
print("secret text")
open("made.txt", "w").write("x")
ask("secret question")
1 / 0  # secret line
"""


class Admin:
    """An admin's calls."""

    def __init__(self, daemon: Daemon, channel: grpc.Channel) -> None:
        self._stub, self._metadata = pb_grpc.AdminServiceStub(channel), (("authorization", f"Bearer {daemon.token}"),)

    def list(self, session: Session) -> list[pb.ExecutionView]:
        request = pb.ListExecutionsRequest(session_id=session.session_id)
        return list(self._stub.ListExecutions(request, metadata=self._metadata).executions)

    def follow(self, session: Session, execution_id: str, after: int = 0) -> Any:
        request = pb.FollowExecutionRequest(session_id=session.session_id, execution_id=execution_id, after_event=after)
        return self._stub.FollowExecution(request, metadata=self._metadata)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def admin(daemon: Daemon) -> Iterator[Admin]:
    with grpc.insecure_channel(daemon.address) as channel:
        yield Admin(daemon, channel)


def run(session: Session) -> str:
    session.register_tools({"ask": lambda question: f"answer to {question}"})
    result = session.execute(CODE)
    assert result.error is not None
    return result.execution_id


def test_a_viewer_sees_as_much_as_the_profile_allows(daemon: Daemon, admin: Admin) -> None:
    with daemon.client_of("seen") as client, client.create_session() as session:
        execution_id = run(session)
        (listed,) = admin.list(session)
        assert (listed.execution_id, listed.state, listed.code) == (execution_id, pb.EXECUTION_STATE_ENDED, "")
        (part,) = admin.follow(session, execution_id)
        assert (part.has_content, part.execution.code, part.missed_events) == (True, CODE, 0)
        printed, called, ended = (each.event for each in part.events)
        assert printed.log.text == "secret text\n"
        assert b"secret question" in called.tool_call.arguments.packed.inline
        assert "secret line" in ended.result.error.traceback
        assert not any(each.withheld_bytes for each in part.events)
    with daemon.client_of("metadata") as client, client.create_session() as session:
        (part,) = admin.follow(session, run(session))
        assert "secret" not in str((part, admin.list(session)))
        printed, called, ended = (each.event for each in part.events)
        assert (part.has_content, part.execution.code_bytes, called.tool_call.name) == (False, len(CODE), "ask")
        assert ended.result.error.type == "ZeroDivisionError"
        assert [file.path for file in ended.result.artifacts] == ["made.txt"]
        assert all(each.withheld_bytes > len("secret") for each in part.events)
    with daemon.client_of("unseen") as client, client.create_session() as session:
        execution_id = run(session)
        assert code_of(lambda: list(admin.follow(session, execution_id))) == "PERMISSION_DENIED"
        assert code_of(lambda: admin.list(session)) == "PERMISSION_DENIED"
    seen = [each for each in records(daemon.state_dir / "audit") if each["kind"] == "content_viewed"]
    assert [(each["tenant"], each["by_tenant"]) for each in seen] == [("seen", "local")]
