"""A session of the asyncio client; `session.py` on the event loop, promise by promise."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from executor_api.limits import VARIABLES_BYTES_MAX, VARIABLES_MAX
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client import _convert, _requests, _shipped_tools, _tools
from executor_client._aio_tool_calls import AioToolCalls, AioToolPool
from executor_client._aio_transport import AioTransport, is_cancelling
from executor_client._assembler import EventGap, ToolRequest
from executor_client._blobs import IncomingBlobs
from executor_client._execution import Execution
from executor_client._lease import ClientLease
from executor_client._limits import CANCEL_GRACE_S, CLOSE_TIMEOUT_S, STATE_BYTES_MAX, transfer_timeout_s
from executor_client._quiet_grpc import grpc
from executor_client._requests import InlineBudget, LimitsLike
from executor_client._session_base import SessionBase
from executor_client._suggest import names_arguments
from executor_client._tools import Answer, Tool
from executor_client._tracing import current_trace
from executor_client._values import unpack_or_opaque
from executor_client.aio_files import AsyncSessionFiles
from executor_client.checkpoint import Checkpoint, StateReader
from executor_client.errors import (
    ConnectionLost,
    ExecutorClientError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
)
from executor_client.events import ExecutionEvent
from executor_client.results import ExecutionResult, FileInfo, FileList, SessionInfo

OnEvent = Callable[[ExecutionEvent], Awaitable[None] | None]


class AsyncSession(SessionBase):
    """`Session` for asyncio. Host tools may be coroutine functions; others run in threads.

    A task that is cancelled in `execute` cancels the execution first.
    """

    def __init__(
        self, transport: AioTransport, info: SessionInfo, lease: ClientLease, *, max_concurrent_tools: int
    ) -> None:
        super().__init__(info)
        self._lease = lease
        self._transport = transport
        self._tools: dict[str, Tool] = {}
        self._tool_pool = AioToolPool(max_concurrent_tools=max_concurrent_tools)
        self._running: set[str] = set()
        self._close_lock = asyncio.Lock()
        self._closed = False

    # -----------------------------------------------------------------------------------------------------------------
    # What it is

    async def refresh(self) -> SessionInfo:
        """Asks the daemon how the session is."""
        request = pb.GetSessionRequest(session_id=self.session_id)
        return self._described((await self._transport.call(self._transport.stub.GetSession, request)).session)

    async def keep_alive(self) -> SessionInfo:
        """Puts off the session's idle end."""
        request = pb.KeepAliveRequest(session_id=self.session_id)
        return self._described((await self._transport.call(self._transport.stub.KeepAlive, request)).session)

    async def authorize_imports(self, imports: Iterable[str]) -> SessionInfo:
        """Authorizes more modules, from the next execution on: "os", or "numpy.*" for all of a package.

        Raises PolicyViolationError, with every module that the policy does not allow; then nothing has changed.
        """
        request = _requests.authorize_imports(self.session_id, imports)
        response = await self._transport.call(
            self._transport.stub.AuthorizeImports, request, self._turn("to authorize the imports")
        )
        return self._described(response.session)

    @property
    def files(self) -> AsyncSessionFiles:
        """The files of its workspace."""
        return AsyncSessionFiles(self._transport, self.session_id, self)

    # -----------------------------------------------------------------------------------------------------------------
    # Executions

    @names_arguments
    async def execute(
        self,
        code: str,
        *,
        execution_id: str | None = None,
        on_event: OnEvent | None = None,
        limits: LimitsLike = None,
        output_mode: Literal["trailing_expression", "last_statement"] = "trailing_expression",
    ) -> ExecutionResult:
        """Runs code and returns how it ended; see `Session.execute`. `on_event` may be a coroutine function."""
        _tools.refuse_reentrance(self.session_id, "execute")
        request = _requests.execute(self.session_id, code, execution_id, output_mode, limits)
        return await self._execute(request, self._tools, on_event)

    @names_arguments
    async def evaluate(self, expression: str, *, timeout_s: float | None = None) -> Any:
        """The value of an expression, out of band; see `Session.evaluate`."""
        _tools.refuse_reentrance(self.session_id, "evaluate")
        request = _requests.evaluate(self._info, expression, timeout_s, busy=bool(self._running))
        return _requests.value_of(await self._execute(request, {}, None))

    async def _execute(
        self, request: pb.ExecuteRequest, tools: Mapping[str, Tool], on_event: OnEvent | None
    ) -> ExecutionResult:
        with self._transport.watch() as watch:
            return await self._watched(self._transport.execution(request, current_trace(), watch), tools, on_event)

    async def _watched(
        self, execution: Execution, tools: Mapping[str, Tool], on_event: OnEvent | None
    ) -> ExecutionResult:
        self._running.add(execution.execution_id)
        try:
            async with AioToolCalls(execution, dict(tools), self._tool_pool, self._answer) as calls:
                result = await self._drive(execution, calls, on_event)
        except BaseException as error:
            if not (execution.refused or isinstance(error, ConnectionLost)):
                await self._abandon(execution)
            raise
        finally:
            self._running.discard(execution.execution_id)
        self._generation = result.generation
        return result

    async def _drive(self, execution: Execution, calls: AioToolCalls, on_event: OnEvent | None) -> ExecutionResult:
        while True:
            stream = self._transport.open(execution.opening(), execution.trace)
            calls.watch(stream)
            cause: grpc.RpcError | EventGap | None = None
            try:
                async for message in stream:
                    fed = execution.feed(message)
                    if execution.assembler.result is not None:
                        return execution.assembler.result
                    if isinstance(fed, ToolRequest):
                        calls.start(fed)
                        fed = fed.event
                    if fed is not None and on_event is not None:
                        told = on_event(fed)
                        if inspect.isawaitable(told):
                            await told
            except (grpc.RpcError, EventGap) as error:
                cause = error
            except asyncio.CancelledError:
                # grpc.aio raises this in the reader of a stream that was cancelled, too. That was `calls`, if anybody.
                # Or the client was closed.
                if is_cancelling() or (calls.failure is None and not self._transport.is_closed()):
                    raise
            finally:
                # Also after the result: nothing that comes then is of interest, and waiting for the end costs time.
                stream.cancel()
            if calls.failure is not None:
                raise calls.failure
            await asyncio.sleep(execution.interrupted(cause, time.monotonic()))

    async def _abandon(self, execution: Execution) -> None:
        """Cancels an execution that nobody waits for any more. Its own failure is left out: a cause is on its way."""
        with contextlib.suppress(ExecutorClientError):
            await self._transport.once(self._transport.stub.CancelExecution, execution.cancellation(), CANCEL_GRACE_S)

    async def cancel(self, execution_id: str | None = None) -> None:
        """Asks an execution to end, by default every one that this object is running. Does not wait for the end."""
        for each in [execution_id] if execution_id is not None else list(self._running):
            request = pb.CancelExecutionRequest(session_id=self.session_id, execution_id=each)
            try:
                await self._transport.call(self._transport.stub.CancelExecution, request)
            except NotFoundError:
                # One of ours that has not reached the daemon yet, or has ended and is forgotten.
                if execution_id is not None:
                    raise

    # -----------------------------------------------------------------------------------------------------------------
    # Host tools

    async def register_tools(self, tools: Mapping[str, Callable[..., Any] | Tool]) -> None:
        """Replaces the session's tools; see `Session.register_tools`."""
        _tools.refuse_reentrance(self.session_id, "register_tools")
        made = _tools.as_tools(tools, allow_coroutines=True)
        shipped = _shipped_tools.ship_all(made, self._info.python_version)

        async def attempt() -> None:
            budget = InlineBudget()
            request = _requests.register_tools(self.session_id, made)
            for place, packed in _shipped_tools.payloads(request, shipped):
                place.CopyFrom(await self._payload(packed, budget))
            await self._transport.once(self._transport.stub.RegisterTools, request)

        with _shipped_tools.explaining(shipped):
            await self._transport.repeat(attempt, awaited=self._turn("to take the tools"))
        self._tools = _tools.on_host(made)

    async def _answer(self, execution_id: str, call_id: str, answer: Answer) -> None:
        try:
            await self._submit(execution_id, call_id, answer)
        except ExecutorClientError as error:
            other = _tools.instead_of(answer, error)
            if other is not None:
                await self._answer(execution_id, call_id, other)

    async def _submit(self, execution_id: str, call_id: str, answer: Answer) -> None:
        async def attempt() -> None:
            request = pb.SubmitToolResultRequest(
                session_id=self.session_id, execution_id=execution_id, call_id=call_id, error=answer.error
            )
            if answer.packed is not None:
                request.value.packed.CopyFrom(await self._payload(answer.packed, InlineBudget()))
            await self._transport.once(self._transport.stub.SubmitToolResult, request)

        await self._transport.repeat(attempt)

    # -----------------------------------------------------------------------------------------------------------------
    # Variables

    async def set_variables(self, variables: Mapping[str, object]) -> None:
        """Sets variables of the interpreter, all or none; see `Session.set_variables`."""
        _tools.refuse_reentrance(self.session_id, "set_variables")
        packed = _requests.pack_variables(variables)

        async def attempt() -> None:
            budget = InlineBudget()
            request = pb.SetVariablesRequest(session_id=self.session_id)
            for name, each in packed.items():
                request.variables.add(name=name).value.packed.CopyFrom(await self._payload(each, budget))
            await self._transport.once(self._transport.stub.SetVariables, request)

        if packed:
            await self._transport.repeat(attempt, awaited=self._turn("to take the variables"))

    async def get_variables(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Reads variables; those that do not exist are left out. Without names: all that are not code or private."""
        _tools.refuse_reentrance(self.session_id, "get_variables")
        asked = _requests.variable_names(names)
        if asked is not None and not asked:
            return {}
        request = pb.GetVariablesRequest(session_id=self.session_id, names=asked or ())

        async def attempt() -> dict[str, Any]:
            blobs = IncomingBlobs(bytes_max=VARIABLES_BYTES_MAX, open_max=VARIABLES_MAX)
            messages = self._transport.read(self._transport.stub.GetVariables, request)
            async with contextlib.aclosing(messages):
                async for message in messages:
                    if message.HasField("variables"):
                        variables = message.variables.variables
                        return {each.name: unpack_or_opaque(blobs.take(each.value.packed)) for each in variables}
                    blobs.add(message.blob_chunk)
            raise ProtocolError("the daemon sent no variables")

        return await self._transport.repeat(attempt, awaited=self._turn("to give the variables"))

    async def _payload(self, packed: bytes, budget: InlineBudget) -> types_pb2.Payload:
        if budget.takes(packed):
            return _requests.inline(packed)
        upload = _requests.blob_upload(self.session_id, packed)
        response = await self._transport.upload(self._transport.stub.UploadBlob, upload)
        return _requests.by_blob(response.blob_id, packed)

    # -----------------------------------------------------------------------------------------------------------------
    # Files of the workspace; `files` has more

    async def put_file(self, path: str, data: bytes | bytearray | memoryview) -> FileInfo:
        """Writes a file of the workspace, whole or not at all. The path is relative to the workspace."""
        return await self.files.write(path, data)

    async def get_file(self, path: str) -> bytes:
        """Reads a file of the workspace."""
        return await self.files.read(path)

    async def list_files(self, path: str = "") -> FileList:
        """Lists a directory of the workspace, and what is below it."""
        return await self.files.list(path)

    # -----------------------------------------------------------------------------------------------------------------
    # The state of the session

    async def export_state(self) -> Checkpoint:
        """Writes the session down: variables and files; see `Session.export_state`."""
        _tools.refuse_reentrance(self.session_id, "export_state")
        request = pb.ExportStateRequest(session_id=self.session_id)
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, STATE_BYTES_MAX)

        async def attempt() -> Checkpoint:
            reader = StateReader()
            messages = self._transport.read(self._transport.stub.ExportState, request, timeout_s)
            async with contextlib.aclosing(messages):
                async for message in messages:
                    reader.feed(message)
            return reader.finish()

        return await self._transport.repeat(attempt, awaited=self._turn("to write down its state"))

    async def _begin_with(self, state: bytes) -> None:
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, len(state))

        async def attempt() -> None:
            messages = _requests.restore_state(self.session_id, state)
            response = await self._transport.upload(self._transport.stub.RestoreState, messages, timeout_s)
            self._restored = _convert.state_manifest_from_wire(response.manifest)

        await self._transport.repeat(attempt, awaited=self._turn("to restore a state"))

    # -----------------------------------------------------------------------------------------------------------------
    # The end

    async def close(self) -> None:
        """Deletes the session and its sandbox. Repeating it, or closing one that has ended, does nothing."""
        await self._close(CLOSE_TIMEOUT_S)

    async def _close(self, patience_s: float) -> None:
        async with self._close_lock:
            if self._closed:
                return
            request = pb.DeleteSessionRequest(session_id=self.session_id)
            with contextlib.suppress(NotFoundError):
                await self._transport.repeat(
                    lambda: self._transport.once(self._transport.stub.DeleteSession, request),
                    within_s=patience_s,
                    awaited=self._turn("to end"),
                )
            self._closed = True
            self._lease.closed(self.session_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lease.is_foreign:
            return  # a forked child leaves the block, and its parent is still in it
        try:
            # A daemon that was waited for in vain is not waited for again.
            await self._close(0.0 if isinstance(exc, UnavailableError) else CLOSE_TIMEOUT_S)
        except UnavailableError:
            # An error that is on its way out already says more; the daemon ends idle sessions by itself.
            if exc is None:
                raise
