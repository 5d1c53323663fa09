"""A node of a fleet that does what a test says: it speaks Link and serves the front's calls over real mutual TLS.

It has no sandboxes. Its sessions are names, which it reports like a real node; the answers to CreateSession can be
refusals, late, or none at all.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import fleet_service_pb2 as fleet_pb
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_api.v1 import types_pb2 as pb
from executor_server.api.errors import error_border, ignore_lost_callers
from executor_server.api.handlers import MethodTable
from executor_server.core import NotFound, PreconditionFailed, Principal, Reason
from executor_server.fleet.api import wire
from executor_server.fleet.api.wire import PRINCIPAL_KEY, caller_from
from executor_server.fleet.membership import (
    Control,
    FrontHello,
    NodeBackend,
    NodeHello,
    NodeRefused,
    NodeReport,
    NodeSession,
    Renewal,
    TenantUse,
    issue_node,
)
from executor_server.fleet.membership.ids import new_session_id

EXECUTOR, ADMIN = "/executor_api.v1.ExecutorService/", "/executor_api.v1.AdminService/"

Create = Callable[["FakeNode", service_pb.CreateSessionRequest, Principal], Awaitable[pb.Session]]


@dataclass
class FakeNode:
    """One node. Tests change its fields while it runs."""

    name: str
    certificates: Path
    labels: Mapping[str, str] = field(default_factory=dict)
    max_sessions: int = 64
    load: float = 0.0
    draining: bool = False
    backends: tuple[NodeBackend, ...] = (NodeBackend("local", images=("base",)),)
    instance: str = field(default_factory=lambda: secrets.token_hex(16))
    epoch: int = 1
    reports: bool = True
    takes_control: bool = True
    obeys_another: bool = False
    """True: it refuses links, and ends the one that there is, as a node does that obeys a copy of the front."""
    answers_admins: bool = True
    """False: calls for environments wait until the caller leaves."""
    report_interval_s: float = 0.05
    create: Create | None = None
    """Replaces the making of a session."""
    report: Callable[[NodeReport], NodeReport] = lambda report: report
    """Changes each report before it is sent."""
    control: Control | None = None
    hellos: list[FrontHello] = field(default_factory=list)
    renewals: list[Renewal] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    """The requests of all CreateSession calls that came."""
    withdrawn: list[str] = field(default_factory=list)
    approvals: list[admin_pb.Approval] = field(default_factory=list)
    """Requests that it says wait there, to a front that watches from now on; one that is decided no longer does."""
    views: list[admin_pb.SessionView] = field(default_factory=list)
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[tuple[str, Principal, Any]] = field(default_factory=list)
    sessions: dict[str, NodeSession] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Of those sessions that were made with one."""
    ended: list[str] = field(default_factory=list)
    """Sessions whose end is not reported yet."""
    link_address: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def session_of(self, tenant: str, request_id: str) -> str | None:
        found = (
            each.session_id for each in self.sessions.values() if (each.tenant, each.request_id) == (tenant, request_id)
        )
        return next(found, None)

    def add(self, tenant: str, request_id: str) -> pb.Session:
        """Makes a session, or finds that of the request."""
        session_id = self.session_of(tenant, request_id) or new_session_id(self.name, self.epoch)
        self.sessions[session_id] = NodeSession(session_id, tenant, request_id)
        return self.shown(session_id)

    def end(self, session_id: str) -> None:
        """Ends a session; its end is reported even where its begin was not."""
        del self.sessions[session_id]
        self.ended.append(session_id)

    def shown(self, session_id: str) -> pb.Session:
        name = self.names.get(session_id, "")
        return pb.Session(session_id=session_id, state=pb.SESSION_STATE_IDLE, node=self.name, image="base", name=name)

    def owned(self, session_id: str, principal: Principal) -> NodeSession:
        session = self.sessions.get(session_id)
        if session is None or (session.tenant != principal.tenant and not principal.is_admin):
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {session_id!r}")
        return session


class _Link(fleet_grpc.FleetServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def Link(self, requests: AsyncIterator[fleet_pb.LinkRequest], context: Any) -> None:
        node = self._node
        hello = wire.request_from(await anext(requests))
        assert isinstance(hello, FrontHello)
        self._check_front()
        node.hellos.append(hello)
        if hello.lost_epoch >= node.epoch:
            node.sessions.clear()
            node.epoch = hello.lost_epoch + 1
        said = NodeHello(node.name, node.epoch, node.instance, node.labels)
        await context.write(wire.response_to(said))
        reading = asyncio.create_task(self._read(requests))
        try:
            known: dict[str, NodeSession] = {}
            for sequence in itertools.count(1):
                while not node.reports:  # noqa: ASYNC110 - tests set a field
                    await asyncio.sleep(0.01)
                self._check_front()
                now = dict(node.sessions)
                await context.write(wire.response_to(node.report(self._report(sequence, known, now))))
                known = now
                await asyncio.sleep(node.report_interval_s)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _check_front(self) -> None:
        if self._node.obeys_another:
            raise NodeRefused("term 2 is that of another front", is_superseded=True)

    def _report(self, sequence: int, known: Mapping[str, NodeSession], now: Mapping[str, NodeSession]) -> NodeReport:
        node = self._node
        tenants = {each.tenant for each in now.values()}
        ended, node.ended = node.ended, []
        return NodeReport(
            sequence,
            node.epoch,
            node.max_sessions,
            draining=node.draining,
            control_fingerprint=node.control.fingerprint if node.control is not None else "",
            load=node.load,
            backends=node.backends,
            full=sequence == 1,
            opened=tuple(each for key, each in now.items() if key not in known),
            closed=tuple(ended),
            tenants={tenant: TenantUse() for tenant in tenants},
        )

    async def _read(self, requests: AsyncIterator[fleet_pb.LinkRequest]) -> None:
        async for request in requests:
            message = wire.request_from(request)
            if isinstance(message, Control) and self._node.takes_control:
                self._node.control = message
            elif isinstance(message, Renewal):
                self._node.renewals.append(message)


class _Service(service_grpc.ExecutorServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def CreateSession(self, request: service_pb.CreateSessionRequest, context: Any) -> Any:
        principal = _noted(self._node, "CreateSession", request, context)
        self._node.created.append(request.request_id)
        if request.request_id in self._node.withdrawn:
            raise NotFound(Reason.SESSION_NOT_FOUND, "the session was deleted before it was made")
        session_id = self._node.session_of(principal.tenant, request.request_id)
        if session_id is not None:
            session = self._node.shown(session_id)
        elif self._node.create is not None:
            session = await self._node.create(self._node, request, principal)
        else:
            session = self._node.add(principal.tenant, request.request_id)
        if request.name:
            self._node.names[session.session_id] = request.name
        return service_pb.CreateSessionResponse(session=session)

    async def GetSession(self, request: service_pb.GetSessionRequest, context: Any) -> Any:
        principal = _noted(self._node, "GetSession", request, context)
        self._node.owned(request.session_id, principal)
        return service_pb.GetSessionResponse(session=self._node.shown(request.session_id))

    async def KeepAlive(self, request: service_pb.KeepAliveRequest, context: Any) -> Any:
        principal = _noted(self._node, "KeepAlive", request, context)
        self._node.owned(request.session_id, principal)
        return service_pb.KeepAliveResponse(session=self._node.shown(request.session_id))

    async def ListSessions(self, request: service_pb.ListSessionsRequest, context: Any) -> Any:
        principal = _noted(self._node, "ListSessions", request, context)
        own = [each for each in self._node.sessions.values() if each.tenant == principal.tenant]
        return service_pb.ListSessionsResponse(sessions=[self._node.shown(each.session_id) for each in own])

    async def DeleteSession(self, request: service_pb.DeleteSessionRequest, context: Any) -> Any:
        principal = _noted(self._node, "DeleteSession", request, context)
        session_id = request.session_id or self._node.session_of(principal.tenant, request.request_id)
        if session_id is None:
            self._node.withdrawn.append(request.request_id)
            raise NotFound(Reason.SESSION_NOT_FOUND, "there is no such request")
        self._node.owned(session_id, principal)
        self._node.end(session_id)
        return service_pb.DeleteSessionResponse()

    async def Execute(self, request: service_pb.ExecuteRequest, context: Any) -> None:
        """Writes as many events as the code says; `forever` writes on until the caller leaves."""
        principal = _noted(self._node, "Execute", request, context)
        self._node.owned(request.session_id, principal)
        numbers = itertools.count(1) if request.code == "forever" else range(1, int(request.code) + 1)
        try:
            for number in numbers:
                log = pb.LogEvent(stream=pb.OUTPUT_STREAM_STDOUT, text="x" * 1000)
                await context.write(service_pb.ExecuteResponse(event=pb.Event(number=number, log=log)))
        finally:
            self._node.calls.append(("Execute ended", principal, request.code))
            self._node.changed.set()

    async def PutFile(self, requests: AsyncIterator[service_pb.PutFileRequest], context: Any) -> Any:
        first = await anext(requests)
        principal = _noted(self._node, "PutFile", first, context)
        self._node.owned(first.header.session_id, principal)
        size_bytes = 0
        async for request in requests:
            size_bytes += len(request.data)
        return service_pb.PutFileResponse(file=pb.FileInfo(path=first.header.path, size_bytes=size_bytes))

    async def WatchFiles(self, request: service_pb.WatchFilesRequest, context: Any) -> None:
        """Reports that the file of the request has changed."""
        principal = _noted(self._node, "WatchFiles", request, context)
        self._node.owned(request.session_id, principal)
        await context.write(service_pb.WatchFilesResponse(changes=[pb.FileChange(path=request.path)]))

    async def ForwardPort(self, requests: AsyncIterator[service_pb.ForwardPortRequest], context: Any) -> None:
        """Sends back what comes. Port 1 is closed, and what listens on port 2 ends its connections at once."""
        first = await anext(requests)
        principal = _noted(self._node, "ForwardPort", first, context)
        self._node.owned(first.open.session_id, principal)
        if first.open.port == 1:
            raise PreconditionFailed(Reason.PORT_CLOSED, "nothing listens on the port")
        try:
            await context.write(service_pb.ForwardPortResponse(opened=service_pb.PortOpened()))
            if first.open.port == 2:
                return
            async for request in requests:
                if request.WhichOneof("part") == "data":
                    await context.write(service_pb.ForwardPortResponse(data=request.data))
            await context.write(service_pb.ForwardPortResponse(shutdown=service_pb.Shutdown()))
        finally:
            self._node.calls.append(("ForwardPort ended", principal, first.open.port))
            self._node.changed.set()

    async def ResizeProcess(self, request: service_pb.ResizeProcessRequest, context: Any) -> Any:
        """Answers as the gRPC of a program does that is older than the method."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    async def RenewLease(self, request: service_pb.RenewLeaseRequest, context: Any) -> Any:
        _noted(self._node, "RenewLease", request, context)
        return service_pb.RenewLeaseResponse(sessions=1, renew_after_s=2.5)


class _Admin(admin_grpc.AdminServiceServicer):
    def __init__(self, node: FakeNode) -> None:
        self._node = node

    async def ListAllSessions(self, request: admin_pb.ListAllSessionsRequest, context: Any) -> Any:
        _noted(self._node, "ListAllSessions", request, context)
        owned = [
            admin_pb.OwnedSession(tenant=each.tenant, principal="p", session=self._node.shown(each.session_id))
            for each in self._node.sessions.values()
        ]
        return admin_pb.ListAllSessionsResponse(sessions=owned)

    async def GetEnvironment(self, request: admin_pb.GetEnvironmentRequest, context: Any) -> Any:
        _noted(self._node, "GetEnvironment", request, context)
        if not self._node.answers_admins:
            await asyncio.Event().wait()
        raise NotFound(Reason.ENVIRONMENT_NOT_FOUND, "there is no such environment")

    async def WatchApprovals(self, request: admin_pb.WatchApprovalsRequest, context: Any) -> None:
        while True:
            self._node.decided.clear()
            await context.write(admin_pb.WatchApprovalsResponse(approvals=self._node.approvals))
            await self._node.decided.wait()

    async def DecideApproval(self, request: admin_pb.DecideApprovalRequest, context: Any) -> Any:
        _noted(self._node, "DecideApproval", request, context)
        self._node.approvals = [each for each in self._node.approvals if each.approval_id != request.approval_id]
        self._node.decided.set()
        return admin_pb.DecideApprovalResponse()

    async def WatchSessions(self, request: admin_pb.WatchSessionsRequest, context: Any) -> None:
        await context.write(admin_pb.WatchSessionsResponse(sessions=self._node.views, complete=True))
        await asyncio.Event().wait()

    async def KillSession(self, request: admin_pb.KillSessionRequest, context: Any) -> Any:
        principal = _noted(self._node, "KillSession", request, context)
        self._node.owned(request.session_id, principal)
        self._node.end(request.session_id)
        return admin_pb.KillSessionResponse()

    async def Drain(self, request: admin_pb.DrainRequest, context: Any) -> Any:
        _noted(self._node, "Drain", request, context)
        self._node.draining = not request.resume
        return admin_pb.DrainResponse(draining=self._node.draining, sessions=len(self._node.sessions))


def _noted(node: FakeNode, method: str, request: Any, context: Any) -> Principal:
    """Notes a call, and returns the caller that the front has named."""
    named = [value for key, value in context.invocation_metadata() if key == PRINCIPAL_KEY]
    caller = caller_from(named[0])
    assert caller is not None and caller.front == node.hellos[-1].instance
    node.calls.append((method, caller.principal, request))
    return caller.principal


@asynccontextmanager
async def serving(node: FakeNode, listen: str = "127.0.0.1:0") -> AsyncIterator[FakeNode]:
    """Runs a node until the block ends; then its connections break."""
    ignore_lost_callers()
    folder = issue_node(node.certificates, node.name).folder
    files = {name: (folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")}
    credentials = grpc.ssl_server_credentials(
        [(files["key.pem"], files["cert.pem"])], root_certificates=files["ca.pem"], require_client_auth=True
    )
    server = grpc.aio.server()
    methods: Any = MethodTable(frozenset(), (error_border(lambda _method, _error: None),))
    fleet_grpc.add_FleetServiceServicer_to_server(cast("Any", _Link(node)), methods)
    service_grpc.add_ExecutorServiceServicer_to_server(cast("Any", _Service(node)), methods)
    admin_grpc.add_AdminServiceServicer_to_server(cast("Any", _Admin(node)), methods)
    methods.serve_by(server)
    port = server.add_secure_port(listen, credentials)
    node.link_address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield node
    finally:
        await server.stop(None)
