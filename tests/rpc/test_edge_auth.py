"""Every method needs a valid token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_server.core.errors import ExecutorError
from executor_server.core.lifecycle.observer import Observer
from executor_server.core.model import Event, Log, Principal
from executor_server.policy.identity import Role
from executor_server.policy.identity.token_file import TokenFile
from executor_server.policy.identity.tokens import Tokens
from tests.rpc.edge import AUTH, TOKEN, Edge, FakeExecution, refusal, refused, serving

DENIED = ("UNAUTHENTICATED", "UNAUTHENTICATED")
METHODS = pb.DESCRIPTOR.services_by_name["ExecutorService"].methods


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer " + "x" * 43),),
        (("authorization", "Bearer " + TOKEN[:-1]),),
        (("authorization", "Bearer " + TOKEN + "t"),),
        (("authorization", "Basic " + TOKEN),),
        (("authorization", TOKEN),),
        (("authorization", "Bearer  " + TOKEN),),
        (("authorization", "Bearer " + TOKEN), ("authorization", "Bearer " + TOKEN)),
        (("x-authorization", "Bearer " + TOKEN),),
    ],
)
async def test_a_call_without_the_token_is_denied(edge: Edge, metadata: Any) -> None:
    assert await refused(edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=metadata)) == DENIED


@pytest.mark.parametrize("method", [method.name for method in METHODS])
async def test_every_method_denies_strangers_before_it_reads_what_they_send(edge: Edge, method: str) -> None:
    assert await refused(edge.raw(method, "stream_stream")()) == DENIED


async def test_a_flood_of_strangers_leaves_nothing_open(edge: Edge) -> None:
    """They send nothing and never close their calls, and are answered all the same."""
    silent = [edge.raw("PutFile", "stream_stream")() for _ in range(200)]
    assert {await refused(call) for call in silent} == {DENIED}
    await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH)


async def test_a_stranger_does_not_learn_which_methods_exist(edge: Edge) -> None:
    call = edge.raw("Secret")
    assert await refused(call(b"")) == DENIED
    assert (await refused(call(b"", metadata=AUTH)))[0] == "UNIMPLEMENTED"


async def test_the_scheme_may_be_written_in_any_case(edge: Edge) -> None:
    await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=(("authorization", f"bearer {TOKEN}"),))


async def test_a_probe_needs_no_token_and_sees_the_daemon_going(edge: Edge) -> None:
    health: Any = health_pb2_grpc.HealthStub(edge.channel)
    request = health_pb2.HealthCheckRequest(service="executor_api.v1.ExecutorService")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    await edge.server.announce_end()
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await refused(health.Watch(request)) == DENIED


async def test_reflection_lists_the_services_to_those_who_have_the_token(edge: Edge) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
    # Without a request: if the refusal comes while gRPC's client still writes, it may report INTERNAL instead.
    assert await refused(reflection.ServerReflectionInfo()) == DENIED
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async for answer in reflection.ServerReflectionInfo(requests, metadata=AUTH):
        names = {service.name for service in answer.list_services_response.service}
    assert "executor_api.v1.ExecutorService" in names


async def test_oversized_metadata_does_not_reach_us(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=(*AUTH, ("x", "y" * 65_536)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# -- tenants' tokens


def bearer(token: str) -> Any:
    return (("authorization", f"Bearer {token}"),)


@dataclass
class Recorder(Observer):
    refusals: list[tuple[Principal | None, str, str]] = field(default_factory=list)

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        self.refusals.append((principal, method, error.reason.value))


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


async def test_a_tenants_token_makes_sessions_of_the_tenant(tmp_path: Path, file: TokenFile) -> None:
    record, token = file.new("acme", "ci")
    async with serving(tmp_path, tokens=Tokens(TOKEN, file)) as edge:
        await edge.stub.CreateSession(pb.CreateSessionRequest(request_id="r"), metadata=bearer(token))
        assert edge.sessions.sessions["r"].owner == Principal("acme", f"token:ci:{record.id}")


async def test_all_wrong_credentials_get_the_same_answer(tmp_path: Path, file: TokenFile) -> None:
    now = datetime.now(UTC)
    _, expired = file.new("acme", "ci", expire_time=now - timedelta(seconds=1))
    revoked_record, revoked = file.new("acme", "ci")
    _, mine = file.new("mine", "x")
    _, theirs = file.new("theirs", "x")
    file.revoke(revoked_record.id)
    wrong = (expired, revoked, theirs[:17] + mine[17:], mine[:-1], mine + "A", "A" * 10_000, "", "ret_", mine[17:])
    async with serving(tmp_path, tokens=Tokens(TOKEN, file)) as edge:
        answers = [await refusal(edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=bearer(text))) for text in wrong]
        answers.append(await refusal(edge.stub.GetPolicy(pb.GetPolicyRequest())))
        answers.append(await refusal(edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=bearer(mine) * 2)))
    assert {(answer.code.name, answer.reason) for answer in answers} == {DENIED}
    assert len({answer.message for answer in answers}) == 1


async def test_a_denial_is_reported_without_a_name_that_a_stranger_chose(tmp_path: Path) -> None:
    recorder = Recorder()
    async with serving(tmp_path, observer=recorder) as edge:
        await refused(edge.stub.GetPolicy(pb.GetPolicyRequest()))
        await refused(edge.raw("Made-up")(b""))
    own = "/executor_api.v1.ExecutorService/GetPolicy"
    assert recorder.refusals == [(None, own, "UNAUTHENTICATED"), (None, "other", "UNAUTHENTICATED")]


async def open_stream(edge: Edge, metadata: Any) -> Any:
    """Opens an execution's stream, which has sent its first event and stays open."""
    create = pb.CreateSessionRequest(request_id="r")
    await edge.stub.CreateSession(create, metadata=metadata)
    session = edge.sessions.sessions["r"]
    session.next_execution = FakeExecution([Event(1, Log("stdout", "hello"))], stays_open=True)
    request = pb.ExecuteRequest(
        session_id="r", execution_id="e", code="1", output_mode=types_pb2.OUTPUT_MODE_TRAILING_EXPRESSION
    )
    call = edge.stub.Execute(request, metadata=metadata)
    assert (await anext(aiter(call))).event.log.text == "hello"
    return call


async def test_a_revoked_tokens_open_stream_ends_and_its_execution_goes_on(tmp_path: Path, file: TokenFile) -> None:
    record, token = file.new("acme", "ci")
    async with serving(tmp_path, tokens=Tokens(TOKEN, file)) as edge:
        stream = await open_stream(edge, bearer(token))
        file.revoke(record.id)
        assert await refused(stream) == DENIED
        execution = edge.sessions.sessions["r"].next_execution
        await asyncio.wait_for(execution.closed.wait(), 10)
        assert "cancel" not in execution.asked


async def test_an_expired_tokens_open_stream_ends(tmp_path: Path, file: TokenFile) -> None:
    time = datetime.now(UTC)
    _, token = file.new("acme", "ci", expire_time=time + timedelta(hours=1))
    async with serving(tmp_path, tokens=Tokens(TOKEN, file, lambda: time)) as edge:
        stream = await open_stream(edge, bearer(token))
        time += timedelta(hours=1)
        assert await refused(stream) == DENIED


async def test_an_upload_ends_with_its_token(tmp_path: Path, file: TokenFile) -> None:
    record, token = file.new("acme", "ci")
    async with serving(tmp_path, tokens=Tokens(TOKEN, file)) as edge:
        await edge.stub.CreateSession(pb.CreateSessionRequest(request_id="r"), metadata=bearer(token))
        upload = edge.stub.PutFile(metadata=bearer(token))
        await upload.write(pb.PutFileRequest(header=pb.PutFileHeader(session_id="r", path="a", size_bytes=1000)))
        file.revoke(record.id)
        assert await refused(upload) == DENIED


async def test_streams_of_other_tokens_stay_open(tmp_path: Path, file: TokenFile) -> None:
    record, _ = file.new("acme", "ci")
    _, token = file.new("acme", "ci")
    async with serving(tmp_path, tokens=Tokens(TOKEN, file)) as edge:
        stream = await open_stream(edge, bearer(token))
        file.revoke(record.id)
        await edge.server._authentication._callers.refresh()
        edge.server._authentication.cut_off_strangers()
        assert not stream.done()
        stream.cancel()


# -- admin calls


class Admin(admin_grpc.AdminServiceServicer):
    async def GetUsage(self, request: Any, context: Any) -> admin_pb.GetUsageResponse:
        return admin_pb.GetUsageResponse()


ADMIN_METHODS = [m.name for m in admin_pb.DESCRIPTOR.services_by_name["AdminService"].methods]
OF_APPROVERS = {"WatchApprovals", "DecideApproval"}
OF_VIEWERS = {
    *("WatchSessions", "InspectSession", "GetSessionNetwork", "ListExecutions", "FollowExecution", "FollowSession"),
    *("TailAudit", "GetUsage", "ExplainPolicy"),
}


@pytest.mark.parametrize(
    ("roles", "is_user", "admin_calls"),
    [
        ((), True, set()),
        (("user",), True, set()),
        (("viewer",), False, OF_VIEWERS),
        (("approver",), False, OF_APPROVERS),
        (("user", "viewer", "approver"), True, OF_VIEWERS | OF_APPROVERS),
    ],
)
async def test_a_credential_may_do_what_its_roles_allow_and_nothing_else(
    tmp_path: Path, file: TokenFile, roles: tuple[Role, ...], is_user: bool, admin_calls: set[str]
) -> None:
    recorder = Recorder()
    record, token = file.new("acme", "ci", roles=roles)
    principal = Principal("acme", f"token:ci:{record.id}", roles=roles)
    user_calls = {"GetPolicy"} if is_user else {method.name for method in METHODS}
    expected = [
        *(
            (principal, f"/executor_api.v1.AdminService/{name}", reason)
            for name in ADMIN_METHODS
            if name not in admin_calls
            for reason in ("ROLE_MISSING" if name in OF_APPROVERS | OF_VIEWERS else "ADMIN_ONLY",)
        ),
        *(
            (principal, f"/executor_api.v1.ExecutorService/{name}", "ROLE_MISSING")
            for name in user_calls
            if not is_user
        ),
    ]
    async with serving(tmp_path, tokens=Tokens(TOKEN, file), admin=Admin(), observer=recorder) as edge:
        for service, names in (("AdminService", ADMIN_METHODS), ("ExecutorService", user_calls)):
            for name in names:
                call: Any = edge.channel.unary_unary(f"/executor_api.v1.{service}/{name}")  # type: ignore[call-arg]
                is_denied = await call(b"", metadata=bearer(token)).code() is grpc.StatusCode.PERMISSION_DENIED
                assert is_denied == (not is_user if service == "ExecutorService" else name not in admin_calls)
    assert [each for each in recorder.refusals if each[2] in ("ROLE_MISSING", "ADMIN_ONLY")] == expected


async def test_a_refusal_names_the_missing_role(tmp_path: Path, file: TokenFile) -> None:
    _, token = file.new("acme", "console", roles=("viewer",))
    async with serving(tmp_path, tokens=Tokens(TOKEN, file)) as edge:
        error = await refusal(edge.stub.CreateSession(pb.CreateSessionRequest(), metadata=bearer(token)))
    assert all(text in error.message for text in ("needs the role user", "only viewer", "--role user"))


async def test_admins_make_every_call(tmp_path: Path, file: TokenFile) -> None:
    _, token = file.new("acme", "ops", admin=True)
    async with serving(tmp_path, tokens=Tokens(TOKEN, file), admin=Admin()) as edge:
        stub: Any = admin_grpc.AdminServiceStub(edge.channel)
        for credentials in (bearer(token), AUTH):
            await stub.GetUsage(admin_pb.GetUsageRequest(), metadata=credentials)
            await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=credentials)
