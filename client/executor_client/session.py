# Made of aio_session.py by tools/unasync.py: change that, and run `make unasync`.
"""A session of the blocking client: a stateful interpreter in a sandbox.

`execute` reads the events of its execution until the result, and reconnects as often as needed. If it ends in any other
way (an interrupt, an exception out of `on_event`), it cancels the execution first.
It reads in the caller's own thread, and starts no other unless the program calls host tools.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from executor_api.limits import VARIABLES_BYTES_MAX, VARIABLES_MAX
from executor_api.recordings import PORTS
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client._core import convert, requests, shipped_tools
from executor_client._core import tools as host_tools
from executor_client._core.arguments import checks_calls
from executor_client._core.blobs import IncomingBlobs
from executor_client._core.execution import Execution
from executor_client._core.limits import CLOSE_TIMEOUT_S, STATE_BYTES_MAX, transfer_timeout_s
from executor_client._core.requests import InlineBudget, LimitsLike
from executor_client._core.tools import Answer, Tool
from executor_client._core.tracing import current_trace
from executor_client._core.values import unpack_or_opaque
from executor_client._sync import ClientLease, Lock, ToolCalls, ToolPool, Transport, run_blocking, shielded, wait_for
from executor_client._sync import OnEvent as OnEvent
from executor_client.checkpoint import Checkpoint, StateReader
from executor_client.driving import abandon, drive
from executor_client.errors import (
    ConnectionLost,
    ExecutorClientError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from executor_client.file_results import FileInfo, FileList
from executor_client.files import SessionFiles
from executor_client.ports import SessionPorts
from executor_client.processes import SessionProcesses
from executor_client.results import ExecutionResult, SessionInfo
from executor_client.undo import SessionUndo

if TYPE_CHECKING:
    from executor_client.mcp_servers import McpServer


@checks_calls
class Session(SessionUndo):
    """Created by `ExecutorClient.create_session` and `get_session`. As a context manager, ends the session.

    Executions of one session run one after the other, in the daemon's order of arrival. Thread-safe.
    """

    def __init__(
        self, transport: Transport, info: SessionInfo, lease: ClientLease, *, max_concurrent_tools: int
    ) -> None:
        super().__init__(transport, info)
        self._lease = lease
        self._tools: dict[str, Tool] = {}
        self._given_tools: dict[str, Callable[..., Any] | Tool] = {}
        self._mcp_tools: dict[str, Tool] = {}
        self._mcp_servers: list[McpServer] = []
        self._tool_pool = ToolPool(max_concurrent_tools=max_concurrent_tools)
        self._running: set[str] = set()
        self._close_lock, self._tools_lock = Lock(), Lock()

    # -----------------------------------------------------------------------------------------------------------------
    # Description

    def refresh(self) -> SessionInfo:
        """Fetches the session's current description from the daemon."""
        request = pb.GetSessionRequest(session_id=self.session_id)
        response = self._open().call(request)
        return self._described(response.session)

    def keep_alive(self) -> SessionInfo:
        """Restarts the session's idle time."""
        request = pb.KeepAliveRequest(session_id=self.session_id)
        response = self._open().call(request)
        return self._described(response.session)

    def authorize_imports(self, imports: Iterable[str]) -> SessionInfo:
        """Authorizes more modules for later executions: "os", or "numpy.*" for all of a package.

        Raises PolicyViolationError, which lists every refused module; then nothing has changed.
        """
        request = requests.made(
            pb.AuthorizeImportsRequest, session_id=self.session_id, authorized_imports=list(imports)
        )
        response = self._open().call(request, self._turn("to authorize imports"))
        if self._record is not None:
            self._record.request("imports", request)
        return self._described(response.session)

    @property
    def files(self) -> SessionFiles:
        """The files of its workspace."""
        return SessionFiles(self)

    @property
    def ports(self) -> SessionPorts:
        """TCP ports in its sandbox."""
        if self._record is not None:
            self._record.unseen(PORTS)
        return SessionPorts(self)

    def rename(self, name: str) -> SessionInfo:
        """Renames the session; an empty name removes its name.

        Raises PreconditionError (NAME_TAKEN) if another session of the caller has this name.
        """
        request = pb.RenameSessionRequest(session_id=self.session_id, name=name and requests.checked_name(name))
        response = self._open().call(request)
        return self._described(response.session)

    @property
    def processes(self) -> SessionProcesses:
        """Commands and terminals in its sandbox."""
        return SessionProcesses(self)

    # -----------------------------------------------------------------------------------------------------------------
    # Executions

    def execute(
        self,
        code: str,
        *,
        execution_id: str | None = None,
        on_event: OnEvent | None = None,
        limits: LimitsLike = None,
        output_mode: Literal["trailing_expression", "last_statement"] = "trailing_expression",
        savepoint: bool = False,
    ) -> ExecutionResult:
        """Runs code and returns its result. A program that fails is a result, not an exception.

        `on_event` is called with each event as it arrives, in this thread. A call with the same
        `execution_id` and code returns the same execution. With `savepoint`, a savepoint is taken first
        (`ExecutionResult.savepoint`), and the session rolls back to it if the program ends or crashes its interpreter.

        Raises ConnectionLost if the daemon goes away and does not come back, and the other errors of
        `executor_client.errors` if the daemon refuses.
        """
        host_tools.refuse_reentrance(self.session_id, "execute")
        request = requests.execute(self.session_id, code, execution_id, output_mode, limits, savepoint=savepoint)
        return self._execute(request, self._tools, on_event)

    def evaluate(self, expression: str, *, timeout_s: float | None = None) -> Any:
        """Returns the value of an expression, to inspect an idle session.

        For the daemon it is an execution like any other: the policy applies, it is audited and counted, and the next
        execution sees its changes. Its prints and displays are dropped, and it can't call host tools. A value without
        an exact form is an `OpaqueValue`; a large value arrives whole, up to 128 MiB.
        `timeout_s` limits the wall time; default: 10 seconds, or the session's `wall_time_s` if that is less. If the
        expression can be interrupted, a timeout keeps the session's variables.

        Raises EvaluationError, with the result, if the expression fails; also while this object runs an execution.
        Raises InvalidRequest for text that is not an expression, and the errors of `execute`.
        """
        host_tools.refuse_reentrance(self.session_id, "evaluate")
        request = requests.evaluate(self._info, expression, timeout_s, busy=bool(self._running))
        return requests.value_of(self._execute(request, {}, None))

    def _execute(
        self, request: pb.ExecuteRequest, tools: Mapping[str, Tool], on_event: OnEvent | None
    ) -> ExecutionResult:
        with self._transport.waits() as waits:
            execution = self._open().execution(request, current_trace(), waits)
            if self._record is not None:
                self._record.begin(execution, request)
            return self._watched(execution, tools, on_event)

    def _watched(self, execution: Execution, tools: Mapping[str, Tool], on_event: OnEvent | None) -> ExecutionResult:
        self._running.add(execution.execution_id)
        self._was_used = True
        try:
            with ToolCalls(execution, dict(tools), self._tool_pool, self._answer) as calls:
                result = drive(self, execution, calls, on_event)
        except BaseException as error:
            if self._record is not None:
                self._record.broken(execution.execution_id, error)
            if not (execution.refused or isinstance(error, ConnectionLost)):
                interrupted = isinstance(error, KeyboardInterrupt)
                shielded(lambda: abandon(self, execution, wait=interrupted))
            raise
        finally:
            self._running.discard(execution.execution_id)
            if self._record is not None:
                self._record.end(execution.execution_id)
        self._generation = result.generation
        return result

    def cancel(self, execution_id: str | None = None) -> None:
        """Cancels an execution, by default all that this object is running. Does not wait for their end."""
        for each in [execution_id] if execution_id is not None else list(self._running):
            request = pb.CancelExecutionRequest(session_id=self.session_id, execution_id=each)
            try:
                self._open().call(request)
            except NotFoundError:
                # Our execution has not reached the daemon yet, or has ended and is forgotten.
                if execution_id is not None:
                    raise

    # -----------------------------------------------------------------------------------------------------------------
    # Host tools

    def register_tools(self, tools: Mapping[str, Callable[..., Any] | Tool]) -> None:
        """Replaces the session's tools, except those of MCP servers.

        They run in this process while `execute` waits, on threads. Those with the placement "sandbox" run in the
        session's interpreter, and in each one that replaces it.

        Raises ToolNotShippable for a tool that can't be shipped unchanged, and InvalidRequest if the sandbox can't
        recreate it; the previous tools then stay in place.
        """
        host_tools.refuse_reentrance(self.session_id, "register_tools")
        with self._tools_lock:
            self._register(dict(tools), self._mcp_tools)

    def register_mcp(self, server: Mapping[str, Any]) -> dict[str, Tool]:
        """Adds the tools of MCP servers to the session's tools, and returns the functions that it added, by name.

        `server` is an entry of the `mcpServers` that hosts use: `{"command": "uvx", "args": [...], "env": {...}}`, or
        `{"url": "https://...", "headers": {...}}` for streamable HTTP; or `{"mcpServers": {...}}` with several entries.
        In an entry, `"tools": [...]` chooses tools, and `"prefix"` precedes their names. The servers run, or are
        connected, on this machine, until the session is closed here. Needs the extra `mcp`.

        The code calls the functions as host tools: with the names, parameters and docstrings that the servers describe,
        as far as Python allows ("get-weather" becomes `get_weather`). Structured results are values, images are images,
        and an error result raises RuntimeError, as does a server that ends or hangs.

        Raises InvalidRequest if a server can't be used or a name is taken, and ConfigurationError without the SDK.
        """
        from executor_client.mcp_servers import READY_TIMEOUT_S, McpServer, described

        host_tools.refuse_reentrance(self.session_id, "register_mcp")
        self._open()
        servers = [McpServer(each) for each in described(server)]
        added: dict[str, Tool] = {}
        try:
            for each in servers:
                functions = wait_for(each.functions, READY_TIMEOUT_S)
                host_tools.refuse_taken_names(functions, added)
                added |= functions
            with self._tools_lock:
                host_tools.refuse_taken_names(added, self._given_tools, self._mcp_tools)
                self._register(self._given_tools, {**self._mcp_tools, **added})
        except BaseException:
            shielded(lambda: self._stop(servers))
            raise
        self._mcp_servers += servers
        return added

    def _stop(self, servers: list[McpServer]) -> None:
        for each in servers:
            run_blocking(each.stop)

    def _register(self, given: dict[str, Callable[..., Any] | Tool], mcp_tools: dict[str, Tool]) -> None:
        host_tools.refuse_taken_names(given, mcp_tools)
        made = host_tools.as_tools({**given, **mcp_tools})
        shipped = shipped_tools.ship_all(made, self._info.python_version)

        def attempt() -> None:
            budget = InlineBudget()
            request = requests.register_tools(self.session_id, made)
            for place, packed in shipped_tools.payloads(request, shipped):
                place.CopyFrom(self._payload(packed, budget))
            self._transport.once(request)

        with shipped_tools.explaining(shipped):
            self._open().repeat(attempt, awaited=self._turn("to register tools"))
        self._tools, self._given_tools, self._mcp_tools = host_tools.on_host(made), given, mcp_tools
        self._was_used = True
        if self._record is not None:
            self._record.tools(made, shipped)

    def _answer(self, execution_id: str, call_id: str, answer: Answer) -> None:
        if self._record is not None:
            self._record.answer(execution_id, call_id, answer)
        try:
            self._submit(execution_id, call_id, answer)
        except ExecutorClientError as error:
            other = host_tools.instead_of(answer, error)
            if other is not None:
                self._answer(execution_id, call_id, other)

    def _submit(self, execution_id: str, call_id: str, answer: Answer) -> None:
        def attempt() -> None:
            request = pb.SubmitToolResultRequest(
                session_id=self.session_id, execution_id=execution_id, call_id=call_id, error=answer.error
            )
            if answer.packed is not None:
                request.value.packed.CopyFrom(self._payload(answer.packed, InlineBudget()))
            self._transport.once(request)

        self._open().repeat(attempt)

    # -----------------------------------------------------------------------------------------------------------------
    # Variables

    def set_variables(self, variables: Mapping[str, object]) -> None:
        """Sets variables of the interpreter, all or none.

        Values without an exact form are pickled for the sandbox, which must then run the same Python x.y.
        """
        host_tools.refuse_reentrance(self.session_id, "set_variables")
        packed = requests.pack_variables(variables)

        def attempt() -> None:
            budget = InlineBudget()
            request = pb.SetVariablesRequest(session_id=self.session_id)
            for name, each in packed.items():
                request.variables.add(name=name).value.packed.CopyFrom(self._payload(each, budget))
            self._transport.once(request)

        if packed:
            self._open().repeat(attempt, awaited=self._turn("to set variables"))
            self._was_used = True
            if self._record is not None:
                self._record.variables(packed)

    def get_variables(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Returns variables by name; missing ones are omitted. Without names: all data that is not private."""
        host_tools.refuse_reentrance(self.session_id, "get_variables")
        asked = requests.variable_names(names)
        if asked is not None and not asked:
            return {}
        request = pb.GetVariablesRequest(session_id=self.session_id, names=asked or ())

        def attempt() -> dict[str, Any]:
            blobs = IncomingBlobs(bytes_max=VARIABLES_BYTES_MAX, open_max=VARIABLES_MAX)
            messages = self._transport.read(request)
            with contextlib.closing(messages):
                for message in messages:
                    if message.HasField("variables"):
                        variables = message.variables.variables
                        return {each.name: unpack_or_opaque(blobs.take(each.value.packed)) for each in variables}
                    blobs.add(message.blob_chunk)
            raise ProtocolError("the daemon sent no variables")

        return self._open().repeat(attempt, awaited=self._turn("to read variables"))

    def _payload(self, packed: bytes, budget: InlineBudget) -> types_pb2.Payload:
        if budget.takes(packed):
            return types_pb2.Payload(inline=packed)
        upload = requests.blob_upload(self.session_id, packed)
        response = self._transport.upload(self._transport.channel.stub.UploadBlob, upload)
        return requests.by_blob(response.blob_id, packed)

    # -----------------------------------------------------------------------------------------------------------------
    # Files of the workspace; see `files` for more

    def put_file(self, path: str, data: bytes | bytearray | memoryview) -> FileInfo:
        """Writes a file; see `files.write`."""
        return self.files.write(path, data)

    def get_file(self, path: str) -> bytes:
        """Reads a file; see `files.read`."""
        return self.files.read(path)

    def list_files(self, path: str = "") -> FileList:
        """Lists a directory, recursively; see `files.list`."""
        return self.files.list(path)

    # -----------------------------------------------------------------------------------------------------------------
    # State

    def export_state(self) -> Checkpoint:
        """Exports the session: the variables that can be pickled, and the files of its workspace.

        Waits for earlier executions, and changes nothing. The manifest names what was omitted. Raises
        PolicyViolationError if the policy forbids it, ResourceExhaustedError if the state is too large.
        """
        host_tools.refuse_reentrance(self.session_id, "export_state")
        request = pb.ExportStateRequest(session_id=self.session_id)
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, STATE_BYTES_MAX)

        def attempt() -> Checkpoint:
            reader = StateReader()
            messages = self._transport.read(request, timeout_s)
            with contextlib.closing(messages):
                for message in messages:
                    reader.feed(message)
            return reader.finish()

        return self._open().repeat(attempt, awaited=self._turn("to export its state"))

    def _begin_with(self, state: bytes) -> None:
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, len(state))

        def attempt() -> None:
            messages = requests.restore_state(self.session_id, state)
            response = self._transport.upload(self._transport.channel.stub.RestoreState, messages, timeout_s)
            self._restored = convert.state_manifest_from_wire(response.manifest)

        self._open().repeat(attempt, awaited=self._turn("to restore a state"))

    # -----------------------------------------------------------------------------------------------------------------
    # The end

    def close(self) -> None:
        """Deletes the session and its sandbox. Does nothing if the session has ended already."""
        self._close(CLOSE_TIMEOUT_S)

    def _close(self, within_s: float) -> None:
        shielded(lambda: self._end(within_s))

    def _end(self, within_s: float) -> None:
        with self._close_lock:
            if self._closed:
                return
            request = pb.DeleteSessionRequest(session_id=self.session_id)
            try:
                with contextlib.suppress(NotFoundError):
                    self._transport.repeat(
                        lambda: self._transport.once(request),
                        within_s=within_s,
                        awaited=self._turn("to end"),
                    )
                    self._lease.closed(self.session_id)
            finally:
                self._stop(self._mcp_servers)
            self._closed = True
        self._tool_pool.close()
        if self._record is not None:
            run_blocking(self._record.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lease.is_foreign:
            return  # a forked child leaves the block while its parent is still in it
        try:
            # If the daemon did not answer in time, do not wait for it again.
            self._close(0.0 if isinstance(exc, UnavailableError) else CLOSE_TIMEOUT_S)
        except UnavailableError:
            # A pending error says more, and the daemon ends idle sessions by itself.
            if exc is None:
                raise
