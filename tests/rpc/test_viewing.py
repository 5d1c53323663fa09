"""Executions as operators see them: a real daemon, with a profile for each value of audit.view."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as pb
from executor_api.v1 import admin_service_pb2_grpc as pb_grpc
from executor_api.v1 import types_pb2
from executor_client import Session
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, code_of, daemon_of
from tests.support.fleet_daemon import fleet_daemon, wanted
from tests.support.polling import eventually

POLICY = """\
version = "7"
default = "metadata"

[profiles.metadata]
[profiles.content]
audit.view = "content"
audit.code = "full"
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
    """Calls of an admin, or of a viewer."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._stub, self._metadata = pb_grpc.AdminServiceStub(channel), (("authorization", f"Bearer {token}"),)

    def follow_session(self, session: Session, after: str = "") -> Any:
        request = pb.FollowSessionRequest(session_id=session.session_id, after_execution_id=after)
        return self._stub.FollowSession(request, metadata=self._metadata)

    def tail(self, **request: Any) -> Any:
        return self._stub.TailAudit(pb.TailAuditRequest(**request), metadata=self._metadata)

    def policy(self) -> Any:
        return self._stub.ShowPolicy(pb.ShowPolicyRequest(), metadata=self._metadata)

    def explain(self, tenant: str, question: str) -> Any:
        request = pb.ExplainPolicyRequest(tenant=tenant, question=question)
        return self._stub.ExplainPolicy(request, metadata=self._metadata)

    def reload(self) -> None:
        self._stub.Reload(pb.ReloadRequest(), metadata=self._metadata)

    def list(self, session: Session) -> list[pb.ExecutionView]:
        request = pb.ListExecutionsRequest(session_id=session.session_id)
        return list(self._stub.ListExecutions(request, metadata=self._metadata).executions)

    def follow(self, session: Session, execution_id: str, after: int = 0) -> Any:
        request = pb.FollowExecutionRequest(session_id=session.session_id, execution_id=execution_id, after_event=after)
        return self._stub.FollowExecution(request, metadata=self._metadata)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    settings = "[pool]\nsize = 0\n[sessions]\njournal_bytes = 200_000\n"
    with (fleet_daemon if wanted() else daemon_of)(settings, policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def admin(daemon: Daemon) -> Iterator[Admin]:
    with grpc.insecure_channel(daemon.address) as channel:
        yield Admin(channel, daemon.token)


@pytest.fixture(scope="module")
def viewer(daemon: Daemon) -> Iterator[Admin]:
    """A viewer of the tenant `seen`."""
    with grpc.insecure_channel(daemon.address) as channel:
        made = Admin(channel, daemon.new_token("seen", "viewer"))
        assert eventually(lambda: code_of(lambda: made.explain("", "{}")) == "OK")
        yield made


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
        (answer,) = part.answers
        assert answer.call_id == called.tool_call.call_id
        assert 0 < answer.wait_s < 60
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


def test_an_answer_comes_with_its_call_and_not_before(daemon: Daemon, admin: Admin) -> None:
    """A viewer that gets an answer before its call never learns how long the call took.

    Answers that wait until the viewer has all events are lost when a program makes events faster than it gets them.
    """
    with daemon.client_of("seen") as client, client.create_session() as session:
        session.register_tools({"ask": lambda number: number})
        execution_id = session.execute("for number in range(200): ask(number)").execution_id
        parts = list(admin.follow(session, execution_id))
    for part in parts:
        called = [each.event.tool_call.call_id for each in part.events if each.event.HasField("tool_call")]
        assert [answer.call_id for answer in part.answers] == called
    assert len(parts) > 1 and sum(len(part.answers) for part in parts) == 200


def test_a_session_is_followed_through_its_executions_until_its_end(daemon: Daemon, admin: Admin) -> None:
    with daemon.client_of("metadata") as client, client.create_session() as session, ThreadPoolExecutor(1) as pool:
        ids = [session.execute(str(number)).execution_id for number in range(6)]
        call = admin.follow_session(session, after=ids[0])
        first, second = next(call), next(call)
        assert ([part.execution.execution_id for part in first.parts], first.complete) == (ids[1:5], False)
        assert ([part.execution.execution_id for part in second.parts], second.complete) == (ids[5:], True)
        assert all(part.events[-1].event.HasField("result") for part in first.parts)

        run = pool.submit(session.execute, "print(1)\nimport time\ntime.sleep(60)")
        (begun,) = next(call).parts
        assert begun.execution.state == pb.EXECUTION_STATE_RUNNING
        assert begun.execution.number == 7
        while not begun.events:
            (begun,) = next(call).parts
        assert begun.events[0].event.HasField("log")
        session.close()
        (ended,) = next(call).parts
        assert not ended.HasField("execution")
        assert ended.events[-1].event.result.outcome == types_pb2.OUTCOME_CANCELLED
        assert list(call) == []
        assert run.exception() is not None or run.result().error is not None


def test_a_viewer_sees_what_a_program_waits_for_and_keeps_nothing_for_itself(daemon: Daemon, admin: Admin) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def ask(question: str) -> str:
        asked.set()
        assert may_answer.wait(60)
        return question

    with daemon.client_of("metadata") as client, ThreadPoolExecutor(1) as pool:
        session = client.create_session(limits={"idle_time_s": 1.0}, detached=True)
        session.register_tools({"ask": ask})
        call = admin.follow_session(session)
        assert next(call).complete
        run = pool.submit(session.execute, "ask('')\nfor _ in range(90):\n    print('x' * 10_000)")
        assert asked.wait(60)
        while (part := next(call).parts[-1]).state != pb.EXECUTION_STATE_WAITING:
            pass
        may_answer.set()
        execution_id = run.result().execution_id
        (part,) = admin.follow(session, execution_id)
        assert part.missed_events > 0
        assert part.events[-1].event.HasField("result")
        *_, last = call  # ends with the session, which nobody uses
        assert last.parts[-1].state == pb.EXECUTION_STATE_ENDED
        assert code_of(lambda: admin.list(session)) == "NOT_FOUND"


def test_the_audit_log_is_read_page_by_page_and_then_as_it_grows(daemon: Daemon, admin: Admin, viewer: Admin) -> None:
    with daemon.client_of("seen") as client, client.create_session() as session:
        ids = [session.execute(f"{number}  # secret").execution_id for number in range(5)]
        wanted = {"session_id": session.session_id, "kinds": ["execution_requested"], "max_records": 2}
        pages: list[Any] = [*admin.tail(**wanted)]
        while pages[-1].continue_before_seq:
            pages += admin.tail(**wanted, before_seq=pages[-1].continue_before_seq)
        found = [record for page in reversed(pages) for record in page.records]
        assert [json.loads(record.json)["execution"] for record in found] == ids
        assert all(record.is_sound and json.loads(record.json)["code_withheld"] for record in found)
        assert not any("secret" in record.json for record in found)
        assert [message.records for message in admin.tail(**{**wanted, "text": "secret"})] == [[]]

        call = viewer.tail(session_id=session.session_id, text='"KIND":"execution_ENDED"', max_records=1, follow=True)
        assert [len(next(call).records)] == [1]
        last = session.execute("6").execution_id
        (ended,) = next(call).records
        assert json.loads(ended.json)["execution"] == last
        call.cancel()
        ending = viewer.tail(session_id=session.session_id, kinds=["session_ended"], follow=True)
        assert not next(ending).records
    assert len(next(ending).records) == 1
    ending.cancel()
    with daemon.client_of("metadata") as client, client.create_session() as session:
        assert session.execute("1").output == 1
    (own,) = viewer.tail(kinds=["execution_requested", "admin_called"])
    assert {json.loads(record.json)["tenant"] for record in own.records} == {"seen"}
    (others,) = viewer.tail(tenant="metadata")
    assert not others.records
    for wrong in ({"kinds": ["x"] * 65}, {"text": "x" * 257}, {"max_records": 1001}, {"session_id": "\x1b"}):
        assert code_of(lambda: list(viewer.tail(**wrong))) == "INVALID_ARGUMENT"  # noqa: B023 - called at once


def test_the_policy_is_shown_with_its_last_change_and_explained(daemon: Daemon, admin: Admin, viewer: Admin) -> None:
    question = '{"network": ["x.example"]}'
    shown, explained = admin.policy(), viewer.explain("", question)
    assert (shown.content, shown.policy.version, shown.HasField("before")) == (POLICY, "7", False)
    assert not explained.granted
    assert explained.text.startswith("refused to tenant seen, profile content\n  network: asked for x.example")
    assert "policy.toml:5: [profiles.content]" in explained.text
    assert not {str(daemon.state_dir.parent), "/tmp"} & set(explained.text.split(":"))
    assert admin.explain("unseen", "").granted
    assert code_of(lambda: viewer.explain("unseen", question)) == "PERMISSION_DENIED"
    assert code_of(viewer.policy) == "PERMISSION_DENIED"
    for wrong in ("[", "[]", '{"x": 1}', '{"prelude": "%s"}' % ("x" * 2**16)):
        assert code_of(lambda: viewer.explain("", wrong)) == "INVALID_ARGUMENT"  # noqa: B023 - called at once

    changed = POLICY.replace('view = "content"', 'view = "metadata"').replace('"7"', '"8"')
    Path(shown.path).write_text(changed)
    admin.reload()
    now = admin.policy()
    assert (now.content, now.before) == (changed, shown.policy)
    assert list(now.changes) == ["version: 7 → 8", "profiles.content.audit.view: content → metadata    tighter"]
    Path(shown.path).write_text(POLICY)
    admin.reload()
