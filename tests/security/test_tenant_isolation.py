"""The property of another tenant does not exist: the same answer, on the same path, as for what never existed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import grpc
import pytest

import executor_server
from executor_api import values
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as services
from executor_api.v1 import types_pb2 as types
from executor_server.api.auth import current_principal
from executor_server.api.recordings import Recordings
from executor_server.api.service import ExecutorService
from executor_server.core.config.state_dir import StateDir
from executor_server.core.errors import ExecutorError
from executor_server.core.model import Principal
from executor_server.policy.approvals import Approvals
from executor_server.policy.identity.token_file import TokenFile
from executor_server.sessions import SessionManager, SessionRequest, SessionSettings
from executor_server.sessions.journal.registry import Registry
from executor_server.sessions.pool.pool import PoolSettings, WarmPool
from tests.support.daemon import Daemon
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.polling import eventually
from tests.support.specs import session_spec

TIMEOUT_S = 60.0
EXECUTION = "the-execution"
CALL = "the-call"
PROCESS = "the-process"
METHODS = {method.name for method in pb.DESCRIPTOR.services_by_name["ExecutorService"].methods}
# A lease of another tenant is answered like one that there is not (tests/unit/sessions/test_owners.py).
NAME_NOTHING = {
    "CreateSession", "PrepareEnvironment", "ListSessions", "GetPolicy", "RenewLease", "EndLease", "ListRecordings"
}  # fmt: skip
VALUE = types.Value(packed=types.Payload(inline=values.encode(1)))

# Each call that names something, as a request or the messages of an upload, for a session.
CALLS: dict[str, Callable[[str], Any]] = {
    "GetSession": lambda s: pb.GetSessionRequest(session_id=s),
    "DeleteSession": lambda s: pb.DeleteSessionRequest(session_id=s),
    "KeepAlive": lambda s: pb.KeepAliveRequest(session_id=s),
    "AuthorizeImports": lambda s: pb.AuthorizeImportsRequest(session_id=s, authorized_imports=["os"]),
    "Execute": lambda s: pb.ExecuteRequest(session_id=s, execution_id=EXECUTION, code="1"),
    "AttachExecution": lambda s: pb.AttachExecutionRequest(session_id=s, execution_id=EXECUTION),
    "CancelExecution": lambda s: pb.CancelExecutionRequest(session_id=s, execution_id=EXECUTION),
    "SubmitToolResult": lambda s: pb.SubmitToolResultRequest(
        session_id=s, execution_id=EXECUTION, call_id=CALL, value=VALUE
    ),
    "RegisterTools": lambda s: pb.RegisterToolsRequest(session_id=s, tools=[types.ToolSpec(name="tool")]),
    "SetVariables": lambda s: pb.SetVariablesRequest(session_id=s, variables=[types.NamedValue(name="x", value=VALUE)]),
    "GetVariables": lambda s: pb.GetVariablesRequest(session_id=s, names=["x"]),
    "UploadBlob": lambda s: [
        pb.UploadBlobRequest(header=pb.UploadBlobHeader(session_id=s, size_bytes=1)),
        pb.UploadBlobRequest(data=b"x"),
    ],
    "PutFile": lambda s: [
        pb.PutFileRequest(header=pb.PutFileHeader(session_id=s, path="f", size_bytes=1)),
        pb.PutFileRequest(data=b"x"),
    ],
    "GetFile": lambda s: pb.GetFileRequest(session_id=s, path="f"),
    "ListFiles": lambda s: pb.ListFilesRequest(session_id=s),
    "ManageFile": lambda s: pb.ManageFileRequest(session_id=s, path="f", remove=pb.RemoveFile()),
    "WatchFiles": lambda s: pb.WatchFilesRequest(session_id=s),
    "RenameSession": lambda s: pb.RenameSessionRequest(session_id=s, name="mine"),
    "StartProcess": lambda s: pb.StartProcessRequest(session_id=s, process_id=PROCESS, argv=["true"]),
    "AttachProcess": lambda s: pb.AttachProcessRequest(session_id=s, process_id=PROCESS),
    "ListProcesses": lambda s: pb.ListProcessesRequest(session_id=s),
    "WriteProcess": lambda s: pb.WriteProcessRequest(session_id=s, process_id=PROCESS, data=b"x"),
    "ResizeProcess": lambda s: pb.ResizeProcessRequest(
        session_id=s, process_id=PROCESS, size=types.TerminalSize(columns=80, rows=24)
    ),
    "SignalProcess": lambda s: pb.SignalProcessRequest(session_id=s, process_id=PROCESS, signal=15),
    "ForwardPort": lambda s: [pb.ForwardPortRequest(open=pb.OpenPort(session_id=s, port=8000))],
    "TakeSavepoint": lambda s: pb.TakeSavepointRequest(session_id=s),
    "Rollback": lambda s: pb.RollbackRequest(session_id=s, savepoint=1),
    "ListSavepoints": lambda s: pb.ListSavepointsRequest(session_id=s),
    "ExportState": lambda s: pb.ExportStateRequest(session_id=s),
    "GetRecording": lambda s: pb.GetRecordingRequest(session_id=s),
    "RestoreState": lambda s: [pb.RestoreStateRequest(session_id=s), pb.RestoreStateRequest(data=b"x")],
}


def test_no_call_is_forgotten() -> None:
    assert set(CALLS) == METHODS - NAME_NOTHING


# -- over the wire


class Tenant:
    """A tenant with a token, and its calls."""

    def __init__(self, daemon: Daemon, channel: grpc.Channel) -> None:
        name = f"t{secrets.token_hex(4)}"
        _, token = TokenFile(daemon.state_dir / "tokens.json").new(name, "test")
        self._stub: Any = services.ExecutorServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),)
        assert eventually(self._is_known)

    def _is_known(self) -> bool:
        try:
            self("GetPolicy", pb.GetPolicyRequest())
        except grpc.RpcError:
            return False
        return True

    def __call__(self, method: str, request: Any) -> Any:
        asked = iter(request) if isinstance(request, list) else request
        return getattr(self._stub, method)(asked, metadata=self._metadata, timeout=TIMEOUT_S)

    def session(self, request_id: str | None = None) -> str:
        request = pb.CreateSessionRequest(request_id=request_id or secrets.token_hex(8))
        return str(self("CreateSession", request).session.session_id)

    def sessions(self) -> set[str]:
        return {session.session_id for session in self("ListSessions", pb.ListSessionsRequest()).sessions}

    def execute(self, session_id: str, code: str, execution_id: str = EXECUTION) -> Any:
        return self("Execute", pb.ExecuteRequest(session_id=session_id, execution_id=execution_id, code=code))

    def answer(self, method: str, request: Any, names: Iterable[str]) -> tuple[str, ...]:
        """All that a refusal says, with those names taken out of it; nothing where there was none."""
        try:
            result = self(method, request)
            list(result) if hasattr(result, "__next__") else result
        except grpc.RpcError as error:
            call: Any = error
            said = [call.code().name, call.details(), *map(repr, sorted(call.trailing_metadata()))]
            for name in names:
                said = [text.replace(name, "NAME") for text in said]
            return tuple(said)
        return ()


@dataclass
class Two:
    victim: Tenant
    stranger: Tenant
    session_id: str  # the victim's


@pytest.fixture(scope="module")
def tenants(daemon: Daemon) -> Iterator[tuple[Tenant, Tenant]]:
    with grpc.insecure_channel(daemon.address) as channel:
        yield Tenant(daemon, channel), Tenant(daemon, channel)


@pytest.fixture
def two(tenants: tuple[Tenant, Tenant]) -> Iterator[Two]:
    victim, stranger = tenants
    yield Two(victim, stranger, victim.session())
    for tenant in tenants:
        for session_id in tenant.sessions():
            tenant("DeleteSession", pb.DeleteSessionRequest(session_id=session_id))


def test_a_session_of_another_tenant_is_like_one_that_never_was(two: Two) -> None:
    assert [event.event.HasField("result") for event in two.victim.execute(two.session_id, "x = 41")][-1]
    for method, request in CALLS.items():
        never = secrets.token_hex(16)
        foreign = two.stranger.answer(method, request(two.session_id), [two.session_id])
        assert foreign == two.stranger.answer(method, request(never), [never]) != (), method
        assert foreign[0] == "NOT_FOUND", method
    assert two.victim.sessions() == {two.session_id}
    events = [response.event for response in two.victim.execute(two.session_id, "x + 1", "next")]
    assert values.decode(events[-1].result.output.packed.inline) == 42


def test_what_is_in_another_tenants_session_is_like_what_never_was(two: Two) -> None:
    """With a session of its own, a stranger tries the names of the other's execution, tool call and blob."""
    victim, own = two.victim, two.stranger.session()
    victim("RegisterTools", pb.RegisterToolsRequest(session_id=two.session_id, tools=[types.ToolSpec(name="tool")]))
    stream = victim.execute(two.session_id, "tool()")
    call_id = next(response.event.tool_call.call_id for response in stream if response.event.HasField("tool_call"))
    blob_id = victim("UploadBlob", CALLS["UploadBlob"](two.session_id)).blob_id

    def by_reference(blob_id: str) -> Any:
        blob = types.Value(packed=types.Payload(blob=types.BlobRef(blob_id=blob_id, size_bytes=1)))
        return pb.SetVariablesRequest(session_id=own, variables=[types.NamedValue(name="x", value=blob)])

    def of_execution(execution_id: str, call_id: str) -> list[tuple[str, Any]]:
        names: Any = {"session_id": own, "execution_id": execution_id}
        return [
            ("AttachExecution", pb.AttachExecutionRequest(**names)),
            ("CancelExecution", pb.CancelExecutionRequest(**names)),
            ("SubmitToolResult", pb.SubmitToolResultRequest(**names, call_id=call_id, value=VALUE)),
        ]

    names = (EXECUTION, call_id, blob_id)
    never = ["0" * len(name) for name in names]
    foreign = [*of_execution(*names[:2]), ("SetVariables", by_reference(blob_id))]
    made_up = [*of_execution(*never[:2]), ("SetVariables", by_reference(never[2]))]
    for asked, like in zip(foreign, made_up, strict=True):
        answers = [two.stranger.answer(*each, (*names, *never)) for each in (asked, like)]
        assert answers[0] == answers[1] != (), asked[0]
    victim(
        "SubmitToolResult",
        pb.SubmitToolResultRequest(session_id=two.session_id, execution_id=EXECUTION, call_id=call_id, value=VALUE),
    )
    assert [response.event for response in stream][-1].result.outcome == types.OUTCOME_SUCCEEDED


def test_a_list_shows_ones_own_sessions_only(two: Two) -> None:
    own = two.stranger.session()
    assert (two.stranger.sessions(), two.victim.sessions()) == ({own}, {two.session_id})


def test_one_request_id_of_two_tenants_makes_two_sessions(two: Two) -> None:
    first, second = two.victim.session("same"), two.stranger.session("same")
    assert first != second
    assert (two.victim.session("same"), two.stranger.session("same")) == (first, second)


def test_one_execution_id_of_two_tenants_runs_twice(two: Two) -> None:
    own = two.stranger.session()
    for tenant, session_id, code in ((two.victim, two.session_id, "'theirs'"), (two.stranger, own, "'mine'")):
        result = [response.event for response in tenant.execute(session_id, code)][-1].result
        assert values.decode(result.output.packed.inline) == code.strip("'")


def test_ids_cannot_be_guessed(two: Two) -> None:
    assert len(two.session_id) == 32 and int(two.session_id, 16) >= 0


# -- the same way, and so in the same time


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[SessionManager]:
    backend = FakeBackend(tmp_path)
    pool, registry = WarmPool(backend, PoolSettings()), Registry(StateDir(tmp_path))
    manager = SessionManager(backend, pool, registry, SessionSettings())
    yield manager
    await manager.close()
    await pool.close()
    registry.close()


# A message goes the way of the call that it stands for.
@pytest.mark.parametrize("method", list(CALLS))
async def test_the_way_to_no_is_the_same_line_by_line(manager: SessionManager, method: str) -> None:
    """Timing reveals nothing where the same lines run on values of the same form."""
    session = await manager.create(Principal("victim", "x"), SessionRequest("r", session_spec(SPEC)))
    service = ExecutorService(cast("Any", None), manager, cast("Any", None), Approvals(), Recordings(Path("unused")))
    current_principal.set(Principal("stranger", "x"))
    ways = [
        await way_to_refusal(service, method, CALLS[method](session_id))
        for session_id in (session.session_id, secrets.token_hex(16))
    ]
    assert ways[0] == ways[1]
    assert len(ways[0]) > 5


async def way_to_refusal(service: ExecutorService, method: str, request: Any) -> list[tuple[str, int]]:
    """The lines of the daemon that run until it says no."""
    package = str(Path(executor_server.__file__).parent)
    connection: list[tuple[str, int]] = []

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            connection.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    async def messages() -> AsyncIterator[Any]:
        for message in request:
            yield message

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(ExecutorError):
            await getattr(service, method)(messages() if isinstance(request, list) else request, cast("Any", None))
    finally:
        sys.settrace(before)
    return connection
