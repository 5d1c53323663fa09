"""The daemon's edge by itself: the real gRPC server over a Unix socket, with a session layer of plain values below it.

Only for tests whose subject is the edge. The fake sessions do what tests set and record their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_api.v1 import types_pb2
from executor_server.api.peer_socket import PeerSocket
from executor_server.api.recordings import Recordings
from executor_server.api.server import RpcServer, ServerSettings, TlsFiles
from executor_server.api.service import ExecutorService
from executor_server.backends.environments import Environment
from executor_server.core import Savepoint, Savepoints, checked_with_optional
from executor_server.core.config.config import Config
from executor_server.core.errors import NotFound, Reason
from executor_server.core.model import (
    BlobChunk,
    Event,
    FileInfo,
    OutputMode,
    Payload,
    Principal,
    SandboxSpec,
    SessionSpec,
    StateManifest,
    ToolSpec,
)
from executor_server.core.network import NO_NETWORK_USE, EgressDenial, NetworkUsage
from executor_server.policy.approvals import Approvals
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, Tenant
from executor_server.policy.identity.identities import Identities
from executor_server.policy.identity.tokens import Tokens
from executor_server.policy.profile import ImportsTable, Profile
from executor_server.policy.requested import RequestedLimits
from executor_server.policy.session_rules import execution_limits
from executor_server.sessions import SessionRequest, VariablesReply
from executor_server.sessions.leases import Renewal
from executor_server.sessions.network import HostUse, NetworkState, OpenConnection
from tests.rpc.behind_front import FrontedServer
from tests.support.fleet_daemon import wanted

TOKEN = "t" * 43
AUTH = (("authorization", f"Bearer {TOKEN}"),)
ENVIRONMENT = Environment("env-1", Path("/nowhere"), 7, ("numpy",), ("numpy==2.5.5",))


@dataclass
class FakeExecution:
    events_to_send: Sequence[Event] = ()
    raises: Exception | None = None
    asked: list[Any] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    stays_open: bool = False
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def events(self, after: int = 0) -> AsyncGenerator[Event]:
        self.asked.append(("events", after))
        try:
            if self.raises is not None:
                raise self.raises
            for event in self.events_to_send:
                if event.number > after:
                    yield event
            if self.stays_open:
                await self.may_end.wait()
        finally:
            self.closed.set()

    def cancel(self) -> None:
        self.asked.append("cancel")

    async def submit_tool_result(self, call_id: str, answer: Any) -> None:
        self.asked.append((call_id, answer))


@dataclass
class FakeNetwork:
    usage: NetworkUsage = NO_NETWORK_USE
    open: tuple[OpenConnection, ...] = ()
    denials: tuple[tuple[float, EgressDenial], ...] = ()
    hosts: tuple[HostUse, ...] = ()
    is_exhausted: bool = False

    @property
    def state(self) -> NetworkState:
        return NetworkState(self.usage, self.open, self.denials, self.hosts, self.is_exhausted)


@dataclass
class FakeSession:
    session_id: str
    owner: Principal
    spec: SessionSpec
    state: str = "idle"
    generation: int = 1
    backend_name: str = "fake"
    python_version: str = "3.11.7"
    create_time_s: float = 1_700_000_000.5
    expire_time_s: float = 1_700_001_800.0
    warm: bool = True
    leased: bool = False
    lost_reason: str = ""
    missing_modules: tuple[str, ...] = ()
    images_with_missing: tuple[str, ...] = ()
    environment_id: str = ""
    node: str = ""
    address: str = ""
    network: FakeNetwork = field(default_factory=lambda: FakeNetwork())
    executions: dict[str, FakeExecution] = field(default_factory=dict)
    next_execution: FakeExecution = field(default_factory=FakeExecution)
    parts: Sequence[Any] = ()
    asked: list[Any] = field(default_factory=list)
    raises: BaseException | None = None

    def touch(self) -> None:
        self.asked.append("touch")

    async def execute(
        self,
        execution_id: str,
        code: str,
        mode: OutputMode,
        limits: RequestedLimits,
        *,
        savepoint: bool = False,
        branch: bool = False,
    ) -> FakeExecution:
        asked = ("execute", execution_id, code, mode, execution_limits(self.spec, limits))
        self._do((*asked, *["savepoint"] * savepoint, *["branch"] * branch))
        self.executions[execution_id] = self.next_execution
        return self.next_execution

    def execution(self, execution_id: str) -> FakeExecution:
        if execution_id not in self.executions:
            raise NotFound(Reason.EXECUTION_NOT_FOUND, "no such execution")
        return self.executions[execution_id]

    def stop_execution(self, execution_id: str, reason: str) -> None:
        self.execution(execution_id).asked.append(("stop", reason))

    async def submit_tool_result(self, execution_id: str, call_id: str, answer: Any) -> None:
        await self.execution(execution_id).submit_tool_result(call_id, answer)

    async def register_tools(self, tools: Sequence[ToolSpec]) -> None:
        self._do(("tools", list(tools)))

    async def set_variables(self, variables: Sequence[tuple[str, Payload]]) -> None:
        self._do(("variables", list(variables)))

    async def get_variables(self, names: Sequence[str]) -> AsyncIterator[BlobChunk | VariablesReply]:
        self._do(("get", list(names)))
        for part in self.parts:
            yield part

    async def upload_blob(self, size_bytes: int, chunks: AsyncIterator[bytes]) -> str:
        self._do(("blob", b"".join([chunk async for chunk in chunks])))
        return "blob-1"

    async def put_file(
        self, path: str, size_bytes: int, chunks: AsyncIterator[bytes], *, tar: bool = False, **more: Any
    ) -> FileInfo:
        options = [f"{name}={value}" for name, value in more.items() if value]
        self._do((path, b"".join([chunk async for chunk in chunks]), *(["tar"] if tar else []), *options))
        return FileInfo(path, size_bytes, tar, 1_700_000_000.0)

    async def get_file(self, path: str, *, tar: bool = False, **more: Any) -> AsyncIterator[FileInfo | bytes]:
        options = [f"{name}={value}" for name, value in more.items() if value]
        self._do(("get_file", path, *(["tar"] if tar else []), *options))
        for part in self.parts:
            yield part

    @property
    def savepoints(self) -> FakeSavepoints:
        return FakeSavepoints(self)

    async def export_state(self, archives: Any) -> AsyncIterator[bytes | StateManifest]:
        self._do("export")
        for part in self.parts:
            yield part

    async def restore_state(self, archives: Any, chunks: AsyncIterator[bytes]) -> StateManifest:
        self._do(("restore", b"".join([chunk async for chunk in chunks])))
        manifest: StateManifest = self.parts[0]
        return manifest

    async def list_files(self, path: str, *, recursive: bool = True) -> tuple[list[FileInfo], bool]:
        self._do(("list_files", path, *([] if recursive else ["flat"])))
        return list(self.parts), True

    async def manage_file(self, action: str, path: str, **options: Any) -> FileInfo | None:
        self._do((action, path, options))
        return next(iter(self.parts), None)

    def _do(self, asked: Any) -> None:
        self.asked.append(asked)
        if self.raises is not None:
            raise self.raises


class FakeSavepoints:
    def __init__(self, session: FakeSession) -> None:
        self._session = session

    async def take(self) -> Savepoints:
        self._session._do("take savepoint")
        return SAVEPOINTS

    async def roll_back(self, number: int) -> Savepoints:
        self._session._do(("roll back", number))
        return SAVEPOINTS

    async def listed(self) -> Savepoints:
        self._session._do("list savepoints")
        return SAVEPOINTS


SAVEPOINTS = Savepoints(
    (Savepoint(3, 1.5, 2, 10, ("sockets",)), Savepoint(4, 2.5, 0, 0)), dropped=1, generation=7, left_out=("a file",)
)


@dataclass
class FakeSessions:
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    raises: Exception | None = None
    held: dict[str, str] = field(default_factory=dict)
    environment: Environment | Exception = ENVIRONMENT
    requests: list[SessionRequest] = field(default_factory=list)

    async def create(self, principal: Principal, request: SessionRequest) -> FakeSession:
        self.requests.append(request)
        if self.raises is not None:
            raise self.raises
        if request.lease_id is not None:
            self.held[request.request_id] = request.lease_id
        return self.sessions.setdefault(request.request_id, FakeSession(request.request_id, principal, request.spec))

    async def created(self, principal: Principal, request_id: str) -> FakeSession | None:
        return None

    def get(self, principal: Principal, session_id: str) -> FakeSession:
        session = self.sessions.get(session_id)
        if session is None or session.owner != principal:
            raise NotFound(Reason.SESSION_NOT_FOUND, "no such session")
        return session

    def list(self, principal: Principal) -> list[FakeSession]:
        return [session for session in self.sessions.values() if session.owner == principal]

    async def delete(self, principal: Principal, session_id: str) -> None:
        del self.sessions[self.get(principal, session_id).session_id]

    async def delete_by_request(self, principal: Principal, request_id: str) -> None:
        del self.sessions[self.get(principal, request_id).session_id]

    async def prepare_environment(self, principal: Principal, spec: SandboxSpec) -> Environment:
        if isinstance(self.environment, Exception):
            raise self.environment
        return self.environment

    def attach(self, session: FakeSession, lease_id: str) -> None:
        self.held[session.session_id] = lease_id

    def renew_lease(self, principal: Principal, lease_id: str) -> Renewal:
        return Renewal(list(self.held.values()).count(lease_id), 2.5)

    def end_lease(self, principal: Principal, lease_id: str) -> int:
        return list(self.held.values()).count(lease_id)


@dataclass
class Edge:
    """A running server and a client's channel to it."""

    server: RpcServer
    sessions: FakeSessions
    address: str
    channel: grpc.aio.Channel
    stub: Any  # the generated stub, which has no types

    async def session(self, session_id: str = "s1") -> FakeSession:
        await self.stub.CreateSession(pb.CreateSessionRequest(request_id=session_id), metadata=AUTH)
        return self.sessions.sessions[session_id]

    def raw(self, method: str, shape: str = "unary_unary") -> Any:
        """Returns a method that sends and receives bytes unchanged."""
        return getattr(self.channel, shape)(f"/executor_api.v1.ExecutorService/{method}")


def settings(*listen: str, tls: TlsFiles | None = None, peer_socket: PeerSocket | None = None) -> ServerSettings:
    return ServerSettings(
        listen=checked_with_optional(listen, frozenset(), has_tls=tls is not None)[0],
        tls=tls,
        max_concurrent_calls=Config().server.max_concurrent_calls,
        peer_socket=peer_socket,
    )


def make_policy(**tenants: Tenant) -> Policy:
    profile = Profile(imports=ImportsTable(allowed=("numpy.*",)))
    file = PolicyFile(version="1", default="default", profiles={"default": profile}, tenants=tenants)
    return Policy(file, images=["base"], backend="local", orphan_time_s=600.0)


def make_server(
    sessions: FakeSessions,
    server_settings: ServerSettings,
    *,
    tokens: Tokens | None = None,
    current_policy: Callable[[], Policy] = make_policy,
    front_reload: Callable[[], Awaitable[bool]] | None = None,
    **more: Any,
) -> RpcServer:
    """Returns a daemon's server, or that of a front where the run of the tests asks for one.

    `front_reload` is what that one reloads its policy with. `more` goes to RpcServer.
    """
    identities = Identities(tokens or Tokens(TOKEN), current_policy)
    if wanted():
        return FrontedServer(sessions, server_settings, identities, current_policy, reload=front_reload, **more)
    service = ExecutorService(
        current_policy, cast("Any", sessions), cast("Any", None), Approvals(), Recordings(Path("unused"))
    )
    return RpcServer(service, identities, server_settings, **more)


@asynccontextmanager
async def serving(directory: Path, **more: Any) -> AsyncIterator[Edge]:
    """`more` goes to `make_server`."""
    sessions = FakeSessions()
    server = make_server(sessions, settings(f"unix:{directory}/s"), **more)
    (address,) = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Edge(server, sessions, address, channel, pb_grpc.ExecutorServiceStub(channel))
    finally:
        await server.stop(0)


@dataclass(frozen=True)
class Refusal:
    """The status of a refused call, as the client sees it."""

    code: grpc.StatusCode
    reason: str
    message: str
    fields: dict[str, str]
    violations: list[types_pb2.Violation]
    omitted: int
    retry_delay_s: float | None
    incident_id: str
    metadata: dict[str, str]


async def refusal(call: Any) -> Refusal:
    """The refusal that a call, or the reading of a stream, ends with. Fails when it is not refused."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return _refusal(error)
    raise AssertionError("the call was not refused")


async def refused(call: Any) -> tuple[str, str]:
    found = await refusal(call)
    return found.code.name, found.reason


def _refusal(error: Any) -> Refusal:
    status = status_pb2.Status()
    for key, value in cast("Any", error.trailing_metadata() or ()):
        if key == "grpc-status-details-bin":
            status.ParseFromString(value)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    listed = types_pb2.Violations()
    for detail in status.details:
        for message in (info, bad, retry, listed):
            detail.Unpack(message)
    assert not status.details or (info.domain == "remote-executor" and status.message == error.details())
    return Refusal(
        code=error.code(),
        reason=info.reason,
        message=error.details() or "",
        fields={violation.field: violation.description for violation in bad.field_violations},
        violations=list(listed.violations),
        omitted=listed.omitted,
        retry_delay_s=retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None,
        incident_id=info.metadata.get("incident_id", ""),
        metadata=dict(info.metadata),
    )
