"""A daemon that runs nothing: it answers over real gRPC from journals that a test sets.

For what a real daemon cannot be made to do: cut streams at a chosen event, number them wrongly, lie about sizes.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from executor_api import values
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_services
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as services
from executor_api.v1 import types_pb2 as types

TOKEN = "the-token"
SESSION = "the-session"
WAIT_S = 20.0


# ---------------------------------------------------------------------------------------------------------------------
# Parts of journals


def log(text: str, stream: Any = types.OUTPUT_STREAM_STDOUT) -> types.Event:
    return types.Event(log=types.LogEvent(stream=stream, text=text))


def value(obj: object) -> types.Value:
    return types.Value(packed=types.Payload(inline=values.encode(obj)))


def blob(blob_id: str, size_bytes: int) -> types.Payload:
    return types.Payload(blob=types.BlobRef(blob_id=blob_id, size_bytes=size_bytes))


def chunks(blob_id: str, data: bytes, piece_bytes: int = 262_144) -> list[types.Event]:
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    return [types.Event(blob_chunk=types.BlobChunk(blob_id=blob_id, data=piece)) for piece in pieces]


def tool_call(name: str, *args: Any, call_id: str = "call-1", **kwargs: Any) -> types.Event:
    return types.Event(tool_call=types.ToolCallEvent(call_id=call_id, name=name, arguments=value((args, kwargs))))


def result(output: object = None, **fields: Any) -> types.Event:
    fields = {
        "outcome": types.OUTCOME_SUCCEEDED,
        "variables_state": types.VARIABLES_STATE_KEPT,
        "generation": 1,
        **({} if output is None else {"output": output if isinstance(output, types.Value) else value(output)}),
        **fields,
    }
    return types.Event(result=types.ExecutionResult(**fields))


@dataclass(frozen=True)
class Answered:
    """A step of a journal: events after it are sent only once the call is answered."""

    call_id: str = "call-1"


class Cancelled:
    """A step of a journal: events after it are sent only once the execution is cancelled."""


@dataclass(frozen=True)
class Numbered:
    """An event with a number of its own."""

    number: int
    event: types.Event


Step = types.Event | Answered | Cancelled | Numbered


@dataclass(frozen=True)
class Cut:
    """Ends one stream early, after that many events, with a status; None for an end that looks like a proper one."""

    after_events: int
    code: grpc.StatusCode | None = grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class Refusal:
    """A status instead of a response."""

    code: grpc.StatusCode
    reason: str = ""
    message: str = "refused"
    more: tuple[Message, ...] = ()
    incident_id: str = ""
    progress: Mapping[str, str] = field(default_factory=dict)


def busy(code: grpc.StatusCode, reason: str, seconds: int = 0, nanos: int = 1_000_000) -> Refusal:
    """Returns a refusal with a retry delay."""
    delay = duration_pb2.Duration(seconds=seconds, nanos=nanos)
    return Refusal(code, reason, more=(error_details_pb2.RetryInfo(retry_delay=delay),))


def building(step: str, done: int = 0, total: int = 0) -> Refusal:
    """Returns the refusal of a daemon that is making the environment of a session's packages."""
    progress = {"step": step, "done": str(done), "total": str(total), "unit": "packages" if total else ""}
    waiting = busy(grpc.StatusCode.UNAVAILABLE, "IMAGE_NOT_READY")
    return replace(waiting, message="the environment is being made", progress=progress)


class FakeDaemon(services.ExecutorServiceServicer, admin_services.AdminServiceServicer):
    """Set `journal`, `cuts`, `refusals`, and in `barriers` the events that calls wait for; read `requests`, `metadata`,
    `answers` and `blobs` afterwards.

    It requires `token`; None is a daemon that identifies its callers by other means.
    """

    def __init__(self) -> None:
        self.address = ""
        self.token: str | None = TOKEN
        self.journal: list[Step] = [result()]
        self.cuts: deque[Cut | None] = deque()
        self.refusals: dict[str, deque[Refusal]] = defaultdict(deque)
        self.barriers: dict[str, threading.Event] = {}
        self.requests: list[tuple[str, Any]] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.answers: dict[str, list[pb.SubmitToolResultRequest]] = defaultdict(list)
        self.blobs: dict[str, bytes] = {}
        self.variables: list[pb.GetVariablesResponse] = []
        self.file: list[pb.GetFileResponse] = []
        self.state: list[pb.ExportStateResponse] = []
        self.files: dict[str, bytes] = {}
        self.session = _session()  # the description of each session
        self.found: types.Session | None = None  # the description of those that GetSession finds, where it differs
        self.sessions: list[types.Session] = [_session()]
        self.policy = _policy()
        self.leased = False  # True when it knows leases
        self.renewed_sessions = 1
        self.watched_for_s: dict[str, float] = {}  # how long each watch may last, by its name
        self.cancelled = threading.Event()
        self._answered: dict[str, threading.Event] = defaultdict(threading.Event)

    def names(self) -> list[str]:
        """Returns the names of the received calls, in order."""
        return [name for name, _ in self.requests]

    def release(self) -> None:
        """Ends the streams that wait for events which will not come any more."""
        for event in [self.cancelled, *self._answered.values(), *self.barriers.values()]:
            event.set()

    def _enter(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append((name, request))
        self.metadata.append(dict(context.invocation_metadata()))
        if self.token is not None and self.metadata[-1].get("authorization") != f"Bearer {self.token}":
            _abort(context, Refusal(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "a wrong token"))
        admission = self.barriers.get(name)
        if admission is not None and not admission.wait(WAIT_S):
            raise AssertionError(f"nobody opened the gate of {name}")
        if self.refusals[name]:
            _abort(context, self.refusals[name].popleft())

    # Executions

    def Execute(self, request: Any, context: Any) -> Iterator[pb.ExecuteResponse]:
        self._enter("Execute", request, context)
        for event in self._stream(0, context):
            yield pb.ExecuteResponse(event=event)

    def AttachExecution(self, request: Any, context: Any) -> Iterator[pb.AttachExecutionResponse]:
        self._enter("AttachExecution", request, context)
        for event in self._stream(request.after_event, context):
            yield pb.AttachExecutionResponse(event=event)

    def _stream(self, after_event: int, context: Any) -> Iterator[types.Event]:
        cut = self.cuts.popleft() if self.cuts else None
        sent = number = 0
        for step in self.journal:
            if isinstance(step, Answered):
                if not self._answered[step.call_id].wait(WAIT_S):
                    raise AssertionError(f"{step.call_id} was not answered")
                continue
            if isinstance(step, Cancelled):
                if not self.cancelled.wait(WAIT_S):
                    raise AssertionError("nobody cancelled the execution")
                continue
            number += 1
            if number <= after_event:
                continue
            if cut is not None and sent == cut.after_events:
                break
            event = types.Event()
            event.CopyFrom(step.event if isinstance(step, Numbered) else step)
            event.number = step.number if isinstance(step, Numbered) else number
            yield event
            sent += 1
        if cut is not None and cut.code is not None:
            context.abort(cut.code, "cut")

    def CancelExecution(self, request: Any, context: Any) -> pb.CancelExecutionResponse:
        self._enter("CancelExecution", request, context)
        self.cancelled.set()
        return pb.CancelExecutionResponse()

    def SubmitToolResult(self, request: Any, context: Any) -> pb.SubmitToolResultResponse:
        self._enter("SubmitToolResult", request, context)
        if self.answers[request.call_id]:
            _abort(context, Refusal(grpc.StatusCode.FAILED_PRECONDITION, "TOOL_CALL_ANSWERED"))
        self.answers[request.call_id].append(request)
        self._answered[request.call_id].set()
        return pb.SubmitToolResultResponse()

    # Everything else

    def CreateSession(self, request: Any, context: Any) -> pb.CreateSessionResponse:
        self._enter("CreateSession", request, context)
        return pb.CreateSessionResponse(session=self._described(request.lease_id))

    def PrepareEnvironment(self, request: Any, context: Any) -> pb.PrepareEnvironmentResponse:
        self._enter("PrepareEnvironment", request, context)
        return pb.PrepareEnvironmentResponse(
            environment_id="env-1", pins=["numpy==2.5.5"], size_bytes=7, modules=["numpy"]
        )

    def GetSession(self, request: Any, context: Any) -> pb.GetSessionResponse:
        self._enter("GetSession", request, context)
        return pb.GetSessionResponse(session=self.found or self._described(request.lease_id))

    def _described(self, lease_id: str) -> types.Session:
        session = types.Session()
        session.CopyFrom(self.session)
        if self.leased and lease_id:
            session.leased = True
            session.limits.owner_grace_s = 0.1
        return session

    def RenewLease(self, request: Any, context: Any) -> pb.RenewLeaseResponse:
        self._enter("RenewLease", request, context)
        return pb.RenewLeaseResponse(sessions=self.renewed_sessions, renew_after_s=0.001)

    def EndLease(self, request: Any, context: Any) -> pb.EndLeaseResponse:
        self._enter("EndLease", request, context)
        return pb.EndLeaseResponse(sessions=self.renewed_sessions)

    def ListSessions(self, request: Any, context: Any) -> pb.ListSessionsResponse:
        self._enter("ListSessions", request, context)
        return pb.ListSessionsResponse(sessions=self.sessions)

    def KeepAlive(self, request: Any, context: Any) -> pb.KeepAliveResponse:
        self._enter("KeepAlive", request, context)
        return pb.KeepAliveResponse(session=_session())

    def AuthorizeImports(self, request: Any, context: Any) -> pb.AuthorizeImportsResponse:
        self._enter("AuthorizeImports", request, context)
        return pb.AuthorizeImportsResponse(session=self.session)

    def DeleteSession(self, request: Any, context: Any) -> pb.DeleteSessionResponse:
        self._enter("DeleteSession", request, context)
        return pb.DeleteSessionResponse()

    def RegisterTools(self, request: Any, context: Any) -> pb.RegisterToolsResponse:
        self._enter("RegisterTools", request, context)
        return pb.RegisterToolsResponse()

    def UploadBlob(self, requests: Any, context: Any) -> pb.UploadBlobResponse:
        header, data = _received(requests)
        self._enter("UploadBlob", header, context)
        assert len(data) == header.size_bytes
        blob_id = f"blob-{len(self.blobs)}"
        self.blobs[blob_id] = data
        return pb.UploadBlobResponse(blob_id=blob_id)

    def SetVariables(self, request: Any, context: Any) -> pb.SetVariablesResponse:
        self._enter("SetVariables", request, context)
        return pb.SetVariablesResponse()

    def GetVariables(self, request: Any, context: Any) -> Iterable[pb.GetVariablesResponse]:
        self._enter("GetVariables", request, context)
        yield from self.variables

    def PutFile(self, requests: Any, context: Any) -> pb.PutFileResponse:
        header, data = _received(requests)
        self._enter("PutFile", header, context)
        self.files[header.path] = data
        return pb.PutFileResponse(file=types.FileInfo(path=header.path, size_bytes=len(data)))

    def GetFile(self, request: Any, context: Any) -> Iterable[pb.GetFileResponse]:
        self._enter("GetFile", request, context)
        yield from self.file

    def ExportState(self, request: Any, context: Any) -> Iterable[pb.ExportStateResponse]:
        self._enter("ExportState", request, context)
        yield from self.state

    def RestoreState(self, requests: Any, context: Any) -> pb.RestoreStateResponse:
        messages = list(requests)
        self._enter("RestoreState", messages, context)
        return pb.RestoreStateResponse(manifest=pb.StateManifest(variables=["a"]))

    def ListFiles(self, request: Any, context: Any) -> pb.ListFilesResponse:
        self._enter("ListFiles", request, context)
        return pb.ListFilesResponse(files=[types.FileInfo(path="a/b.csv", size_bytes=3)], truncated=True)

    def ManageFile(self, request: Any, context: Any) -> pb.ManageFileResponse:
        self._enter("ManageFile", request, context)
        return pb.ManageFileResponse(file=types.FileInfo(path=request.path, is_directory=True))

    def GetPolicy(self, request: Any, context: Any) -> pb.GetPolicyResponse:
        self._enter("GetPolicy", request, context)
        return pb.GetPolicyResponse(policy=self.policy)

    def GetStatus(self, request: Any, context: Any) -> admin_pb.GetStatusResponse:
        self._enter("GetStatus", request, context)
        return admin_pb.GetStatusResponse(max_sessions=7)

    def WatchSessions(self, request: Any, context: Any) -> Iterable[admin_pb.WatchSessionsResponse]:
        self.watched_for_s["WatchSessions"] = context.time_remaining()
        self._enter("WatchSessions", request, context)
        yield admin_pb.WatchSessionsResponse(complete=True)

    def WatchApprovals(self, request: Any, context: Any) -> Iterable[admin_pb.WatchApprovalsResponse]:
        self.watched_for_s["WatchApprovals"] = context.time_remaining()
        self._enter("WatchApprovals", request, context)
        yield admin_pb.WatchApprovalsResponse()


@contextmanager
def serve(
    directory: Path, credentials: grpc.ServerCredentials | None = None, address: str = ""
) -> Iterator[FakeDaemon]:
    """Runs a fake daemon at an address, else on a Unix socket in the directory; with credentials, on a port."""
    daemon = FakeDaemon()
    if credentials is None:
        daemon.address = address or f"unix:{directory / 'd.sock'}"
    with ThreadPoolExecutor(8) as threads:
        server = start(daemon, threads, credentials)
        try:
            yield daemon
        finally:
            daemon.release()
            server.stop(grace=0).wait()


def start(
    daemon: FakeDaemon, threads: ThreadPoolExecutor, credentials: grpc.ServerCredentials | None = None
) -> grpc.Server:
    # Else the kernel may give two such servers the same free port.
    server = grpc.server(threads, options=[("grpc.so_reuseport", 0)])
    services.add_ExecutorServiceServicer_to_server(daemon, server)
    admin_services.add_AdminServiceServicer_to_server(daemon, server)
    if credentials is None:
        server.add_insecure_port(daemon.address)
    else:
        daemon.address = f"localhost:{server.add_secure_port('localhost:0', credentials)}"
    server.start()
    return server


def _received(requests: Any) -> tuple[Any, bytes]:
    header = next(requests).header
    return header, b"".join(message.data for message in requests)


def _session() -> types.Session:
    session = types.Session(
        session_id=SESSION, state=types.SESSION_STATE_IDLE, generation=1, backend="fake", image="base"
    )
    session.limits.wall_time_s = 30
    session.python_version = "3.11.7"
    session.labels["team"] = "a\x1b[31m"
    session.policy.CopyFrom(types.PolicyRef(profile="strict", version="7", fingerprint="abc"))
    session.denied_imports.append("os")
    session.workspace_imports = True
    session.refused_language.append("dynamic_code")
    session.network.append("pypi.org:443")
    session.denied_network.append("gist.github.com")
    session.packages.append("polars>=1")
    session.environment_id = "env-1"
    session.images_with_missing.append("data")
    session.network_usage.CopyFrom(types.NetworkUsage(connections=2, denied=1, sent_bytes=1000, received_bytes=234))
    return session


def _policy() -> types.Policy:
    return types.Policy(
        policy=types.PolicyRef(profile="strict", version="7", fingerprint="abc"),
        default_limits=types.Limits(wall_time_s=30, operations=1_000_000),
        max_limits=types.Limits(wall_time_s=60, operations=2_000_000),
        execution_default_limits=types.Limits(wall_time_s=10),
        execution_max_limits=types.Limits(wall_time_s=20.5),
        default_imports=["math"],
        allowed_imports=["numpy.*"],
        denied_imports=["os"],
        refused_language=["dynamic_code"],
        images=["base"],
        backend="local",
        tool_placements=["host"],
        allowed_tools=["web_*"],
        files=types.FileLimits(max_put_bytes=1000, max_get_bytes=2000, max_puts=3),
        network="names",
        network_rules=types.NetworkRules(
            default_hosts=["pypi.org:443"],
            allowed_hosts=["*.example.com"],
            denied_hosts=["gist.github.com"],
            secrets=[types.NetworkSecret(host="api.example.com", header="X-Key", methods=["GET"], paths=["/a/*"])],
            max_connections=3,
            max_new_connections_per_minute=40,
            max_sent_bytes=5_000,
            max_received_bytes=6_000,
            max_connection_s=7.5,
        ),
        quotas=types.Quotas(sessions=4, cpu_time_s_per_hour=0.5, egress_bytes_per_hour=8_000),
    )


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> None:
    details: list[Message] = list(refusal.more)
    if refusal.reason:
        info = error_details_pb2.ErrorInfo(reason=refusal.reason, domain="remote-executor")
        if refusal.incident_id:
            info.metadata["incident_id"] = refusal.incident_id
        info.metadata.update(refusal.progress)
        details.append(info)
    status = status_pb2.Status(code=refusal.code.value[0], message=refusal.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(refusal.code, refusal.message)
