"""Each refusal has its status and reason, and internal text stays in the daemon."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from executor_api.v1 import executor_service_pb2 as pb
from executor_server.core import errors
from executor_server.core.errors import Reason, Violation, ViolationKind
from executor_server.core.model import Event, Log, Principal, Queued
from executor_server.core.packages import Progress
from tests.rpc.edge import AUTH, TOKEN, Edge, FakeExecution, FakeSession, refusal, refused, serving
from tests.rpc.raw_http2 import raw_connection


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest(Reason.VALUE_REFUSED, "m"), "INVALID_ARGUMENT"),
        (errors.NotFound(Reason.BLOB_NOT_FOUND, "m"), "NOT_FOUND"),
        (errors.PreconditionFailed(Reason.SESSION_LOST, "m"), "FAILED_PRECONDITION"),
        (errors.OutOfRange(Reason.EVENT_OUT_OF_RANGE, "m"), "OUT_OF_RANGE"),
        (errors.Unauthenticated(Reason.UNAUTHENTICATED, "m"), "UNAUTHENTICATED"),
        (errors.ResourceExhausted(Reason.QUEUE_FULL, "m"), "RESOURCE_EXHAUSTED"),
        (errors.Unavailable(Reason.DRAINING, "m"), "UNAVAILABLE"),
        (errors.PolicyViolation((Violation("f", ViolationKind.DENIED, "a", "b", "profiles.x"),)), "PERMISSION_DENIED"),
    ],
)
async def test_each_refusal_has_its_status(edge: Edge, error: errors.ExecutorError, code: str) -> None:
    session = await edge.session()
    session.raises = error
    found = await refusal(edge.stub.RegisterTools(pb.RegisterToolsRequest(session_id="s1"), metadata=AUTH))
    assert (found.code.name, found.reason) == (code, error.reason.value)
    assert found.message == error.message


async def test_a_refusal_in_the_middle_of_a_stream_arrives(edge: Edge) -> None:
    session = await edge.session()
    session.executions["e1"] = FakeExecution(raises=errors.OutOfRange(Reason.EVENT_OUT_OF_RANGE, "m"))
    request = pb.AttachExecutionRequest(session_id="s1", execution_id="e1", after_event=9)
    assert await refused(edge.stub.AttachExecution(request, metadata=AUTH)) == ("OUT_OF_RANGE", "EVENT_OUT_OF_RANGE")


async def test_a_retry_delay_is_said(edge: Edge) -> None:
    edge.sessions.raises = errors.ResourceExhausted(Reason.TOO_MANY_SESSIONS, "m", retry_after_s=1.5)
    found = await refusal(edge.stub.CreateSession(pb.CreateSessionRequest(request_id="r"), metadata=AUTH))
    assert (found.reason, found.retry_delay_s) == ("TOO_MANY_SESSIONS", 1.5)


async def test_every_violation_of_the_policy_is_a_field_of_the_answer(edge: Edge) -> None:
    request = pb.CreateSessionRequest(request_id="r", authorized_imports=["os"], limits={"wall_time_s": 1e6})
    found = await refusal(edge.stub.CreateSession(request, metadata=AUTH))
    assert (found.code, found.reason) == (grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION")
    assert [(each.field, each.requested, each.allowed, each.rule) for each in found.violations] == [
        ("limits.wall_time_s", "1,000,000", "at most 3,600", "profiles.default.limits.max.wall_time_s"),
        ("authorized_imports", "os", "numpy.*", "profiles.default.imports.allowed"),
    ]


async def test_an_answer_with_very_many_violations_still_arrives(edge: Edge) -> None:
    """A client drops trailers above 8 KiB and reports that instead."""
    request = pb.CreateSessionRequest(request_id="r", authorized_imports=["ä" * 100 + str(n) for n in range(256)])
    found = await refusal(edge.stub.CreateSession(request, metadata=AUTH))
    assert found.code is grpc.StatusCode.PERMISSION_DENIED
    assert found.violations
    assert found.omitted + len(found.violations) == 256


LONG = "ä" * 5000


@pytest.mark.parametrize(
    "error",
    [
        errors.PolicyViolation((Violation(LONG, ViolationKind.DENIED, LONG, LONG, LONG),) * 256),
        errors.ModulesMissing(LONG, (LONG[:100],) * 256),
        errors.InvalidRequest(Reason.VALUE_REFUSED, LONG, LONG),
        errors.Unavailable(Reason.IMAGE_NOT_READY, LONG, 0.5, progress=Progress(LONG, 1, 2, LONG)),
    ],
)
async def test_the_longest_refusals_of_a_session_still_arrive(edge: Edge, error: errors.ExecutorError) -> None:
    (await edge.session()).raises = error
    found = await refusal(edge.stub.SetVariables(pb.SetVariablesRequest(session_id="s1"), metadata=AUTH))
    assert found.reason == error.reason.value
    assert len(found.message.encode()) > 900
    assert found.omitted + len(found.violations) == (256 if isinstance(error, errors.PolicyViolation) else 0)


@pytest.mark.parametrize("method", ["RegisterTools", "GetVariables"])
async def test_our_own_failure_shows_an_incident_and_no_internal_text(edge: Edge, method: str) -> None:
    session = await edge.session()
    session.raises = RuntimeError("/srv/secret/path")
    with capture_logs() as logs:
        found = await refusal(
            getattr(edge.stub, method)(getattr(pb, f"{method}Request")(session_id="s1"), metadata=AUTH)
        )
    assert (found.code, found.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in found.message
    assert found.incident_id in found.message
    assert [(entry["incident_id"], str(entry["exc_info"])) for entry in logs] == [
        (found.incident_id, "/srv/secret/path")
    ]


async def test_text_that_utf8_cannot_carry_does_not_break_the_answer(edge: Edge) -> None:
    session = await edge.session()
    session.raises = errors.InvalidRequest(Reason.VALUE_REFUSED, "bad \ud800 value" + "x" * 5000)
    found = await refusal(edge.stub.SetVariables(pb.SetVariablesRequest(session_id="s1"), metadata=AUTH))
    assert found.code is grpc.StatusCode.INVALID_ARGUMENT
    assert found.message.startswith("bad \\ud800 value")


async def test_a_session_of_another_principal_does_not_exist(edge: Edge) -> None:
    mine = await edge.session("mine")
    edge.sessions.sessions["theirs"] = FakeSession("theirs", Principal("other", "token"), mine.spec)
    listed = await edge.stub.ListSessions(pb.ListSessionsRequest(), metadata=AUTH)
    assert [session.session_id for session in listed.sessions] == ["mine"]
    for method in ("GetSession", "DeleteSession", "KeepAlive", "Execute"):
        fields = {"session_id": "theirs"} | ({"execution_id": "e"} if method == "Execute" else {})
        call = getattr(edge.stub, method)(getattr(pb, f"{method}Request")(**fields), metadata=AUTH)
        assert await refused(call) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_a_caller_who_goes_away_releases_the_stream_and_leaves_the_execution(edge: Edge) -> None:
    session = await edge.session()
    session.next_execution = execution = FakeExecution([Event(1, Queued(0))], stays_open=True)
    call = edge.stub.Execute(pb.ExecuteRequest(session_id="s1", execution_id="e1"), metadata=AUTH)
    await call.read()
    call.cancel()
    await execution.closed.wait()
    assert execution.asked == [("events", 0)]


async def test_a_caller_who_vanishes_while_it_is_written_to_is_no_incident(tmp_path: Path) -> None:
    """grpc.aio raises an error of its own for it, in the middle of a write."""
    request = pb.ExecuteRequest(session_id="s1", execution_id="e").SerializeToString()
    body = b"\0" + len(request).to_bytes(4, "big") + request
    async with serving(tmp_path) as edge:
        session = await edge.session()
        log = Log("stdout", "x" * 60_000)
        session.next_execution = execution = FakeExecution([Event(number, log) for number in range(1, 1000)])
        with capture_logs() as logs:
            async with raw_connection(f"{tmp_path}/s") as connection:
                call = await connection.begin("/executor_api.v1.ExecutorService/Execute", TOKEN, body, ends=True)
                await call.answered.wait()
            await execution.closed.wait()
        assert [entry for entry in logs if entry["log_level"] != "debug"] == []


CONTROLS = "\x1b]0;title\x07 \x9b31m \r\u202eabc"
SHOWN = r"\x1b]0;title\x07 \x9b31m \x0d\u202eabc"


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest(Reason.VALUE_REFUSED, CONTROLS, "f\x1b"),
        errors.ModulesMissing(CONTROLS, (CONTROLS,)),
        errors.PolicyViolation((Violation(CONTROLS, ViolationKind.DENIED, CONTROLS, CONTROLS, CONTROLS),)),
        errors.Unavailable(Reason.BACKEND_UNAVAILABLE, CONTROLS),
    ],
)
async def test_what_could_steer_a_terminal_is_visible_in_every_text_of_a_status(
    edge: Edge, error: errors.ExecutorError
) -> None:
    session = await edge.session()
    session.raises = error
    found = await refusal(edge.stub.SetVariables(pb.SetVariablesRequest(session_id="s1"), metadata=AUTH))
    texts = [
        found.message,
        *(text for field in found.fields.items() for text in field),
        *found.metadata.values(),
        *(text for each in found.violations for text in (each.field, each.requested, each.allowed, each.rule)),
    ]
    assert SHOWN in found.message
    assert not [text for text in texts if set(text) & set("\x1b\x07\x9b\r\u202e")]


async def test_lines_and_tabs_of_a_message_stay(edge: Edge) -> None:
    (await edge.session()).raises = errors.InvalidRequest(Reason.VALUE_REFUSED, "first:\n\tsecond é")
    found = await refusal(edge.stub.SetVariables(pb.SetVariablesRequest(session_id="s1"), metadata=AUTH))
    assert found.message == "first:\n\tsecond é"
