"""ExecutorService: each method checks the form of its request, calls the session layer, and converts the answer.

It decides nothing and stores nothing. Errors of the layers below pass through to the error border.

Streaming methods write to the context instead of yielding: grpc.aio cancels a coroutine in its own task when the client
leaves, while it finalizes a suspended generator in another task, where cancel scopes break. Ending a stream does not
affect its execution, which belongs to the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import structlog
from google.protobuf.message import Message

from executor_api.messages import write
from executor_api.recordings import FILE_BYTES_RECORDED_MAX, PORTS
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_server.api import checks, from_wire, to_wire
from executor_server.api.asking import Asking
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context
from executor_server.api.port_forwarding import forward_port
from executor_server.api.recordings import Recordings
from executor_server.api.upload import Upload
from executor_server.core import BlobChunk, FileInfo, NotFound, Principal, Reason, ResourceExhausted
from executor_server.policy import Policy, check_tools
from executor_server.policy.approvals import Approvals
from executor_server.sessions import Session, SessionManager, SessionRequest, StateArchives
from executor_server.sessions.journal import Execution

STATE_TIME_S = 600.0
"""Seconds that the transfer of one state may take, in either direction."""


class ExecutorService(service_grpc.ExecutorServiceServicer):
    """Serves executor_api.v1.ExecutorService from a session manager."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        sessions: SessionManager,
        states: StateArchives,
        approvals: Approvals,
        recordings: Recordings,
        *,
        in_fleet: bool = False,
        why_ended: Callable[[Principal, str], str] = lambda _principal, _session_id: "",
    ) -> None:
        """`policy` returns the policy in force. `in_fleet`: a front has checked node labels and approvals already.

        `why_ended` returns the reason why a session of this caller has ended; empty if that is not known.
        """
        self._policy = policy
        self._sessions = sessions
        self._states = states
        self._asking = Asking(approvals, is_node=in_fleet)
        self._recordings = recordings
        self._in_fleet = in_fleet
        self._why_ended = why_ended

    # -- sessions

    async def CreateSession(
        self, request: service_pb.CreateSessionRequest, context: Context
    ) -> service_pb.CreateSessionResponse:
        principal = current_principal.get()
        request_id = checks.identifier(request.request_id, "request_id")
        lease_id = checks.lease_id(request.lease_id) if request.lease_id else None
        session = await self._sessions.created(principal, request_id)
        if session is None:
            if request.node_labels and not self._in_fleet:
                raise checks.invalid("node_labels", "can't be satisfied: this daemon is not part of a fleet")
            modules = from_wire.needed_modules_from(request)
            asked = from_wire.requested_session_from(request)
            spec = self._asking.decided(
                principal, "", request_id, lambda approved: self._policy().decide(principal, asked, approved)
            )
            made = SessionRequest(request_id, spec, lease_id, modules, dict(request.env))
            session = await self._sessions.create(principal, made)
            self._asking.done(principal, "", request_id)
        elif lease_id is not None:
            self._sessions.attach(session, lease_id)
        return service_pb.CreateSessionResponse(session=to_wire.session_to(session))

    async def PrepareEnvironment(
        self, request: service_pb.PrepareEnvironmentRequest, context: Context
    ) -> service_pb.PrepareEnvironmentResponse:
        principal = current_principal.get()
        asked = from_wire.requested_environment_from(request)
        spec = self._asking.decided_environment(
            principal, request, lambda given: self._policy().decide(principal, asked, given)
        )
        environment = await self._sessions.prepare_environment(principal, spec.sandbox)
        self._asking.done(principal, "", request.request_id)
        return write(service_pb.PrepareEnvironmentResponse, environment)

    async def GetSession(
        self, request: service_pb.GetSessionRequest, context: Context
    ) -> service_pb.GetSessionResponse:
        if bool(request.session_id) == bool(request.name):
            raise checks.invalid("session_id", "or name must be given, and not both")
        if request.name:
            session = self._sessions.named(current_principal.get(), checks.session_name(request.name))
        else:
            session = self._session(request.session_id)
        if request.lease_id:
            self._sessions.attach(session, checks.lease_id(request.lease_id))
        return service_pb.GetSessionResponse(session=to_wire.session_to(session))

    async def RenameSession(
        self, request: service_pb.RenameSessionRequest, context: Context
    ) -> service_pb.RenameSessionResponse:
        session = self._session(request.session_id)
        await self._sessions.rename(session, checks.session_name(request.name) if request.name else "")
        return service_pb.RenameSessionResponse(session=to_wire.session_to(session))

    async def ListSessions(
        self, request: service_pb.ListSessionsRequest, context: Context
    ) -> service_pb.ListSessionsResponse:
        sessions = sorted(self._sessions.list(current_principal.get()), key=lambda session: session.create_time_s)
        return service_pb.ListSessionsResponse(sessions=[to_wire.session_to(session) for session in sessions])

    async def DeleteSession(
        self, request: service_pb.DeleteSessionRequest, context: Context
    ) -> service_pb.DeleteSessionResponse:
        if bool(request.session_id) == bool(request.request_id):
            raise checks.invalid("session_id", "or request_id must be given, and not both")
        if request.request_id:
            request_id = checks.identifier(request.request_id, "request_id")
            self._asking.give_up(current_principal.get(), request_id)
            await self._sessions.delete_by_request(current_principal.get(), request_id)
        else:
            session_id = checks.identifier(request.session_id, "session_id")
            await self._sessions.delete(current_principal.get(), session_id)
        return service_pb.DeleteSessionResponse()

    async def KeepAlive(self, request: service_pb.KeepAliveRequest, context: Context) -> service_pb.KeepAliveResponse:
        session = self._session(request.session_id)
        session.touch()
        return service_pb.KeepAliveResponse(session=to_wire.session_to(session))

    async def AuthorizeImports(
        self, request: service_pb.AuthorizeImportsRequest, context: Context
    ) -> service_pb.AuthorizeImportsResponse:
        session = self._session(request.session_id)
        imports = tuple(request.authorized_imports)
        await session.authorize_imports(
            imports,
            lambda spec: self._asking.decided(
                session.owner,
                session.session_id,
                "",
                lambda approved: self._policy().authorize_imports(session.owner, spec, imports, approved),
            ),
        )
        self._asking.done(session.owner, session.session_id, "")
        self._record(session, "imports", request)
        return service_pb.AuthorizeImportsResponse(session=to_wire.session_to(session))

    async def RenewLease(
        self, request: service_pb.RenewLeaseRequest, context: Context
    ) -> service_pb.RenewLeaseResponse:
        renewal = self._sessions.renew_lease(current_principal.get(), checks.lease_id(request.lease_id))
        return write(service_pb.RenewLeaseResponse, renewal)

    async def EndLease(self, request: service_pb.EndLeaseRequest, context: Context) -> service_pb.EndLeaseResponse:
        ended = self._sessions.end_lease(current_principal.get(), checks.lease_id(request.lease_id))
        return service_pb.EndLeaseResponse(sessions=ended)

    # -- executions

    async def Execute(self, request: service_pb.ExecuteRequest, context: Context) -> None:
        session = self._session(request.session_id)
        execution = await session.execute(
            execution_id=checks.identifier(request.execution_id, "execution_id"),
            code=checks.source(request.code, "code"),
            mode=from_wire.output_mode_from(request),
            limits=from_wire.requested_limits_from(request.limits),
            savepoint=request.savepoint,
            branch=checks.branch(request.branch, savepoint=request.savepoint),
        )
        await _follow(execution, 0, service_pb.ExecuteResponse, context)

    async def AttachExecution(self, request: service_pb.AttachExecutionRequest, context: Context) -> None:
        execution = self._execution(request.session_id, request.execution_id)
        await _follow(execution, request.after_event, service_pb.AttachExecutionResponse, context)

    async def CancelExecution(
        self, request: service_pb.CancelExecutionRequest, context: Context
    ) -> service_pb.CancelExecutionResponse:
        self._execution(request.session_id, request.execution_id).cancel()
        return service_pb.CancelExecutionResponse()

    async def SubmitToolResult(
        self, request: service_pb.SubmitToolResultRequest, context: Context
    ) -> service_pb.SubmitToolResultResponse:
        session = self._session(request.session_id)
        execution_id = checks.identifier(request.execution_id, "execution_id")
        structlog.contextvars.bind_contextvars(execution_id=execution_id)
        call_id = checks.identifier(request.call_id, "call_id")
        await session.submit_tool_result(execution_id, call_id, from_wire.answer_from(request))
        return service_pb.SubmitToolResultResponse()

    # -- processes

    async def StartProcess(self, request: service_pb.StartProcessRequest, context: Context) -> None:
        session = self._session(request.session_id)
        started = from_wire.process_request_from(request)
        self._record(session, "command", request)  # before its output, which may come before this call goes on
        process = await session.processes.start(started)
        async with aclosing(process.events_with_gap(0)) as events:
            async for event in events:
                message = service_pb.StartProcessResponse(event=to_wire.process_event_to(event))
                await context.write(message)

    async def AttachProcess(self, request: service_pb.AttachProcessRequest, context: Context) -> None:
        process = self._session(request.session_id).processes.process(_process_id(request))
        async with aclosing(process.events_with_gap(request.after_event)) as events:
            async for event in events:
                message = service_pb.AttachProcessResponse(event=to_wire.process_event_to(event))
                await context.write(message)

    async def ListProcesses(
        self, request: service_pb.ListProcessesRequest, context: Context
    ) -> service_pb.ListProcessesResponse:
        processes = self._session(request.session_id).processes.list()
        return service_pb.ListProcessesResponse(processes=[to_wire.process_info_to(process) for process in processes])

    async def WriteProcess(
        self, request: service_pb.WriteProcessRequest, context: Context
    ) -> service_pb.WriteProcessResponse:
        data = from_wire.written_data_from(request)
        session = self._session(request.session_id)
        processes = session.processes
        self._record(session, "input", request)
        written_bytes = await processes.write(_process_id(request), request.offset, data, eof=request.eof)
        return service_pb.WriteProcessResponse(written_bytes=written_bytes)

    async def ResizeProcess(
        self, request: service_pb.ResizeProcessRequest, context: Context
    ) -> service_pb.ResizeProcessResponse:
        size = from_wire.terminal_size_from(request.size, "size")
        session = self._session(request.session_id)
        self._record(session, "resize", request)
        await session.processes.resize(_process_id(request), size)
        return service_pb.ResizeProcessResponse()

    async def SignalProcess(
        self, request: service_pb.SignalProcessRequest, context: Context
    ) -> service_pb.SignalProcessResponse:
        signal, target = from_wire.signal_from(request)
        session = self._session(request.session_id)
        self._record(session, "signal", request)
        await session.processes.signal(_process_id(request), signal, target)
        return service_pb.SignalProcessResponse()

    async def ForwardPort(self, requests: AsyncIterator[service_pb.ForwardPortRequest], context: Context) -> None:
        await forward_port(requests, context, self._session_with_ports)

    # -- tools, variables, blobs

    async def RegisterTools(
        self, request: service_pb.RegisterToolsRequest, context: Context
    ) -> service_pb.RegisterToolsResponse:
        session = self._session(request.session_id)
        tools = from_wire.tools_from(request.tools)
        check_tools(session.spec, tools)
        await session.register_tools(tools)
        self._record(session, "tools", request)
        return service_pb.RegisterToolsResponse()

    async def SetVariables(
        self, request: service_pb.SetVariablesRequest, context: Context
    ) -> service_pb.SetVariablesResponse:
        session = self._session(request.session_id)
        await session.set_variables(from_wire.variables_from(request.variables))
        self._record(session, "variables", request)
        return service_pb.SetVariablesResponse()

    async def GetVariables(self, request: service_pb.GetVariablesRequest, context: Context) -> None:
        session = self._session(request.session_id)
        names = from_wire.variable_names_from(request.names)
        async with aclosing(session.get_variables(names)) as parts:
            async for part in parts:
                if isinstance(part, BlobChunk):
                    message = write(service_pb.GetVariablesResponse, blob_chunk=part)
                else:
                    message = service_pb.GetVariablesResponse(variables=to_wire.variables_to(part))
                await context.write(message)

    async def UploadBlob(
        self, requests: AsyncIterator[service_pb.UploadBlobRequest], context: Context
    ) -> service_pb.UploadBlobResponse:
        upload = Upload(requests)
        header: service_pb.UploadBlobHeader = await upload.header()
        session = self._session(header.session_id)
        with self._recordings.upload(session) as recorded:
            blob_id = await session.upload_blob(header.size_bytes, recorded.pieces(upload.pieces(header.size_bytes)))
            recorded.as_blob(blob_id)
        return service_pb.UploadBlobResponse(blob_id=blob_id)

    # -- files and policy

    async def PutFile(
        self, requests: AsyncIterator[service_pb.PutFileRequest], context: Context
    ) -> service_pb.PutFileResponse:
        upload = Upload(requests)
        header: service_pb.PutFileHeader = await upload.header()
        session = self._session(header.session_id)
        tar = from_wire.is_tar(header.format)
        path = checks.path(header.path, "path", may_be_empty=tar)
        size_bytes = checks.size(header.size_bytes, session.spec.limits.disk_bytes, "an archive" if tar else "a file")
        mode = checks.file_mode(header.mode) if header.HasField("mode") else None
        if tar and (header.append or mode is not None):
            raise checks.invalid("append" if header.append else "mode", "is not for an archive")
        with self._recordings.upload(session, keeps=size_bytes <= FILE_BYTES_RECORDED_MAX) as recorded:
            pieces = recorded.pieces(upload.pieces(size_bytes))
            file = await session.put_file(path, size_bytes, pieces, tar=tar, append=header.append, mode=mode)
            recorded.as_file(header)
        return write(service_pb.PutFileResponse, file=file)

    async def GetFile(self, request: service_pb.GetFileRequest, context: Context) -> None:
        session = self._session(request.session_id)
        tar = from_wire.is_tar(request.format)
        path = checks.path(request.path, "path", may_be_empty=tar)
        length = checks.file_bytes(request.length, "length") if request.HasField("length") else None
        offset = checks.file_bytes(request.offset, "offset")
        excluded = checks.excluded(request.excluded)
        if tar and (offset or length is not None):
            raise checks.invalid("offset" if offset else "length", "is not for an archive")
        parts_of = session.get_file(path, tar=tar, offset=offset, length=length, excluded=excluded)
        async with aclosing(parts_of) as parts:
            async for part in parts:
                if isinstance(part, FileInfo):
                    await context.write(write(service_pb.GetFileResponse, file=part))
                else:
                    await context.write(service_pb.GetFileResponse(data=part))

    async def ListFiles(self, request: service_pb.ListFilesRequest, context: Context) -> service_pb.ListFilesResponse:
        session = self._session(request.session_id)
        path = checks.path(request.path, "path", may_be_empty=True)
        recursive = request.recursive if request.HasField("recursive") else True
        files, truncated = await session.list_files(path, recursive=recursive)
        return write(service_pb.ListFilesResponse, files=files, truncated=truncated)

    async def ManageFile(
        self, request: service_pb.ManageFileRequest, context: Context
    ) -> service_pb.ManageFileResponse:
        session = self._session(request.session_id)
        action = request.WhichOneof("action")
        if action is None:
            raise checks.invalid("action", "must be given")
        path = checks.path(request.path, "path", may_be_empty=action in ("stat", "realpath"))
        options = {field.name: value for field, value in getattr(request, action).ListFields()}
        if action == "move":
            options["target"] = checks.path(request.move.target, "target")
        file = await session.manage_file(action, path, **options)
        if action in ("mkdir", "move", "remove"):
            self._record(session, "files", request)
        return write(service_pb.ManageFileResponse, file=file)

    async def WatchFiles(self, request: service_pb.WatchFilesRequest, context: Context) -> None:
        session = self._session(request.session_id)
        path = checks.path(request.path, "path", may_be_empty=True)
        async with aclosing(session.watches.changes(path, recursive=request.recursive)) as found:
            async for changes in found:
                await context.write(write(service_pb.WatchFilesResponse, changes))

    # -- savepoints, and the state of a session

    async def TakeSavepoint(
        self, request: service_pb.TakeSavepointRequest, context: Context
    ) -> service_pb.TakeSavepointResponse:
        session = self._session(request.session_id)
        answer = await session.savepoints.take()
        self._record(session, "savepoint", request)
        return write(service_pb.TakeSavepointResponse, answer)

    async def Rollback(self, request: service_pb.RollbackRequest, context: Context) -> service_pb.RollbackResponse:
        session = self._session(request.session_id)
        answer = await session.savepoints.roll_back(checks.savepoint(request.savepoint, "savepoint"))
        self._record(session, "rollback", request)
        return write(service_pb.RollbackResponse, answer)

    async def ListSavepoints(
        self, request: service_pb.ListSavepointsRequest, context: Context
    ) -> service_pb.ListSavepointsResponse:
        answer = await self._session(request.session_id).savepoints.listed()
        return write(service_pb.ListSavepointsResponse, answer)

    async def ExportState(self, request: service_pb.ExportStateRequest, context: Context) -> None:
        session = self._session(request.session_id)
        async with _in_time(), aclosing(session.export_state(self._states)) as parts:
            async for part in parts:
                if isinstance(part, bytes):
                    await context.write(service_pb.ExportStateResponse(data=part))
                else:
                    await context.write(write(service_pb.ExportStateResponse, manifest=part))

    async def RestoreState(
        self, requests: AsyncIterator[service_pb.RestoreStateRequest], context: Context
    ) -> service_pb.RestoreStateResponse:
        upload = Upload(requests, first="session_id")
        session = self._session(await upload.header())
        async with _in_time():
            manifest = await session.restore_state(self._states, upload.all_pieces())
        self._record_unseen(session, "a state that was restored")
        return write(service_pb.RestoreStateResponse, manifest=manifest)

    async def GetPolicy(self, request: service_pb.GetPolicyRequest, context: Context) -> service_pb.GetPolicyResponse:
        return service_pb.GetPolicyResponse(policy=to_wire.policy_to(self._policy().describe(current_principal.get())))

    # -- recordings

    async def ListRecordings(
        self, request: service_pb.ListRecordingsRequest, context: Context
    ) -> service_pb.ListRecordingsResponse:
        return service_pb.ListRecordingsResponse(recordings=self._recordings.list(current_principal.get()))

    async def GetRecording(self, request: service_pb.GetRecordingRequest, context: Context) -> None:
        principal = current_principal.get()
        about = self._recordings.find(principal, checks.identifier(request.session_id, "session_id"))
        if not principal.is_admin:
            self._policy().check_recording_fetch(principal)
        async with _in_time(), aclosing(self._recordings.read(principal, about)) as parts:
            async for part in parts:
                await context.write(part)

    def _record(self, session: Session, kind: str, request: Message) -> None:
        """Records a request, if the session is recorded; the request of a command even before it may be refused."""
        if (recorder := self._recordings.recorder(session)) is not None:
            recorder.request(kind, request)

    def _record_unseen(self, session: Session, what: str) -> None:
        if (recorder := self._recordings.recorder(session)) is not None:
            recorder.unseen(what)

    # -- sessions and executions by id

    def _session_with_ports(self, session_id: str) -> Session:
        session = self._session(session_id)
        self._record_unseen(session, PORTS)
        return session

    def _session(self, session_id: str) -> Session:
        principal = current_principal.get()
        try:
            session = self._sessions.get(principal, checks.identifier(session_id, "session_id"))
        except NotFound as error:
            if not (reason := self._why_ended(principal, session_id)):
                raise
            raise NotFound(error.reason, f"the session {session_id!r} has ended: {reason}") from None
        structlog.contextvars.bind_contextvars(session_id=session_id)
        return session

    def _execution(self, session_id: str, execution_id: str) -> Execution:
        execution = self._session(session_id).execution(checks.identifier(execution_id, "execution_id"))
        structlog.contextvars.bind_contextvars(execution_id=execution_id)
        return execution


async def _follow(execution: Execution, after: int, response: Callable[..., Any], context: Context) -> None:
    """Sends the events of an execution after event `after`."""
    async with aclosing(execution.events(after)) as events:
        async for event in events:
            await context.write(response(event=to_wire.event_to(event)))


def _process_id(request: Any) -> str:
    """Returns the checked process id of a request, and binds it to log messages."""
    process_id = checks.identifier(request.process_id, "process_id")
    structlog.contextvars.bind_contextvars(process_id=process_id)
    return process_id


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Ends a transfer that takes too long: others wait for its place."""
    try:
        async with asyncio.timeout(STATE_TIME_S) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():  # a timeout of a layer below, unrelated to the size of the state
            raise
        raise ResourceExhausted(Reason.TOO_SLOW, f"the state was not transferred within {STATE_TIME_S:g} s") from error
