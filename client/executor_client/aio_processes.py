"""The processes of a session, `session.processes`, of the asyncio client: commands and terminals in its sandbox.

A process belongs to the daemon. Reading its events resumes by itself after a lost connection or a restart of the
daemon, with the event after the last one, so each byte arrives once. A caller that stops reading leaves the process
as it is.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncEventStream, AsyncSessionTransport, Beside, Lock, OnOutput, notify
from executor_client._core import process as core
from executor_client._core.assembler import EventGap
from executor_client._core.limits import CANCEL_GRACE_S, INTERRUPT_GRACE_S
from executor_client._core.process import FollowedProcess, HeadAndTail
from executor_client._core.quiet_grpc import grpc
from executor_client._core.status import SessionElsewhere
from executor_client._core.tracing import current_trace
from executor_client._core.waiting import Waits
from executor_client.errors import (
    CallTimeoutError,
    ConnectionLost,
    ExecutorClientError,
    InvalidRequest,
    NotFoundError,
    PreconditionError,
    ProtocolError,
)
from executor_client.process_results import (
    CompletedProcess,
    ProcessEvent,
    ProcessInfo,
    ProcessOutput,
    ProcessResult,
    TerminalSize,
)

OUTPUT_BYTES = 1024 * 1024
"""Bytes of each stream that `run` keeps by default, head and tail."""

_SIGINT, _SIGKILL, _SIGTERM = 2, 9, 15

Command = str | Sequence[str]
"""A text for the shell, or a program with its arguments."""


class AsyncProcess:
    """A process of a session, made by `start` and `attach`. Iterating yields its output, once.

    One reader at a time. As a context manager it stops following at the end; the process goes on.
    """

    def __init__(
        self, transport: AsyncSessionTransport, followed: FollowedProcess, session: object, written_bytes: int = 0
    ) -> None:
        """Keeps a reference to `session` as long as this object lives: a session ends when none refers to it."""
        self._session = session
        self._transport = transport
        self._followed = followed
        self._written_bytes = written_bytes
        self._stream: AsyncEventStream | None = None
        self._stream_ends_s = math.inf
        self._write_lock = Lock()

    @property
    def process_id(self) -> str:
        """The id by which `attach` finds it."""
        return self._followed.process_id

    @property
    def pid(self) -> int:
        """Its id in the sandbox."""
        return self._followed.pid

    @property
    def last_event(self) -> int:
        """Number of the last event that was read here; `attach` goes on after it."""
        return self._followed.last_number

    @property
    def result(self) -> ProcessResult | None:
        """Its end; None until all of its events were read here."""
        return self._followed.result

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    async def __aiter__(self) -> AsyncGenerator[ProcessEvent, None]:
        """Yields its output, as far as it was not read here, up to its end.

        Left early it stops following: a process that is followed waits for its reader once the buffers are full.
        Raises ConnectionLost when the daemon goes away and does not come back.
        """
        try:
            while (event := await self._next(math.inf)) is not None:
                yield event
        finally:
            self.close()

    async def wait(self, timeout_s: float | None = None) -> ProcessResult:
        """Waits for the end. Output that was not read before is dropped.

        Raises CallTimeoutError when the process still runs after `timeout_s`; it goes on.
        """
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._followed.has_ended():
            await self._next(ends_s)
        assert self._followed.result is not None, "the events ended without a result"
        return self._followed.result

    def close(self) -> None:
        """Stops following it. The process goes on; iterating again goes on with the next event. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def _begin(self) -> None:
        """Starts the process: returns when it runs."""
        while self._followed.last_number == 0:
            event = await self._next(math.inf, only_one=True)
            if isinstance(event, ProcessOutput):
                raise ProtocolError("a process printed before its start")

    async def _next(self, ends_s: float, *, only_one: bool = False) -> ProcessEvent | None:
        """Returns the next event to report; None after the result, and when it was closed meanwhile.

        With `only_one` it returns after every event, with None for one that is not reported.
        """
        while not self._followed.has_ended():
            stream = self._open(ends_s)
            cause: grpc.RpcError | EventGap | None = None
            try:
                async for message in stream:
                    self._transport.current.answered = True
                    event = self._followed.feed(message)
                    if self._followed.has_ended():
                        self._stream = None
                        await stream.finish()
                        return None
                    if event is not None or only_one:
                        return event
            except (grpc.RpcError, EventGap) as error:
                cause = error
            except BaseException:
                self.close()
                raise
            if self._stream is not stream:
                return None  # another task or thread has closed it
            self.close()
            if time.monotonic() >= ends_s:
                raise CallTimeoutError(f"process {self.process_id} still runs")
            await self._await_next(cause)
        return None

    def _open(self, ends_s: float) -> AsyncEventStream:
        if self._stream is not None and self._stream_ends_s > ends_s:
            self.close()  # it would not end in time
        if self._stream is None:
            timeout_s = None if ends_s == math.inf else max(0.001, ends_s - time.monotonic())
            self._stream = self._transport.open(self._followed.opening(), self._followed.trace, timeout_s)
            self._stream_ends_s = ends_s
        return self._stream

    async def _await_next(self, cause: grpc.RpcError | EventGap | None) -> None:
        """Waits before the next stream. Raises the error for the caller when another stream cannot help."""
        try:
            delay_s = self._followed.interrupted(cause, time.monotonic())
            await self._transport.pause(delay_s, is_away=self._followed.is_away)
        except SessionElsewhere as elsewhere:
            self._transport.follow(elsewhere, self._followed.redirected())
        except (NotFoundError, PreconditionError) as error:
            lost = await self._transport.loss(error)
            if lost is None or not self._followed.may_have_begun:
                raise lost or error from error
            self._followed.lost(lost.why)

    # -----------------------------------------------------------------------------------------------------------------
    # Steering

    async def write(self, data: bytes | bytearray | memoryview | str) -> None:
        """Writes to its standard input or its terminal; a text in UTF-8. Waits while the process does not read.

        Raises PreconditionError when it has ended or closed its input (reason PROCESS_ENDED), and when another client
        has written to it meanwhile; InvalidRequest when it was started without one; CallTimeoutError when it does not
        read for `call_timeout_s`. The same data may be written again then, and arrives once.
        """
        await self._write(core.as_bytes(data), eof=False)

    async def close_stdin(self) -> None:
        """Ends its input. On a terminal: sends the end-of-file character. One that has ended has no input to end."""
        try:
            await self._write(b"", eof=True)
        except PreconditionError as error:
            if error.reason != "PROCESS_ENDED":
                raise

    async def _write(self, data: bytes, *, eof: bool) -> None:
        # Two writers of this object would use the same offset, and the bytes of one would be skipped as repeated ones.
        async with self._write_lock:
            offset = self._written_bytes
            for request in core.write_requests(self._followed.session_id, self.process_id, offset, data, eof=eof):
                response = await self._transport.call(self._transport.stub.WriteProcess, request)
                if response.written_bytes > request.offset + len(request.data):
                    self._written_bytes = response.written_bytes
                    raise PreconditionError("another client has written to this process: its input is not yours alone")
            # Not before all of it has arrived: data that is written again after an error begins at the same offset.
            self._written_bytes = offset + len(data)

    async def resize(self, size: TerminalSize) -> None:
        """Sets the size of its terminal."""
        request = pb.ResizeProcessRequest(
            session_id=self._followed.session_id, process_id=self.process_id, size=core.size_to_wire(size)
        )
        await self._transport.call(self._transport.stub.ResizeProcess, request)

    async def signal(self, number: int, target: str = "group") -> None:
        """Sends a signal: to its process group, to the "process" alone, or to the "tree" of all that it started.

        After its end it has no effect.
        """
        request = core.signal_request(self._followed.session_id, self.process_id, number, target)
        await self._transport.call(self._transport.stub.SignalProcess, request)

    async def terminate(self) -> None:
        """Sends SIGTERM to its process group."""
        await self.signal(_SIGTERM)

    async def kill(self) -> None:
        """Ends it with all that it started (SIGKILL)."""
        await self.signal(_SIGKILL, "tree")

    async def _end(self, *, gently: bool) -> None:
        """Ends it with all that it started, in a bounded time; `gently` with a SIGINT and a moment to end before."""
        self.close()
        try:
            if gently:
                await self._send(_SIGINT, "group")
                with contextlib.suppress(CallTimeoutError):
                    await self.wait(INTERRUPT_GRACE_S)
        finally:
            await self._send(_SIGKILL, "tree")

    async def _send(self, number: int, target: str) -> None:
        """Sends a signal in one attempt."""
        request = core.signal_request(self._followed.session_id, self.process_id, number, target)
        await self._transport.once(self._transport.stub.SignalProcess, request, CANCEL_GRACE_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncSessionProcesses:
    """The processes of one session. They run beside its executions, as the same user and under the same limits."""

    def __init__(self, transport: AsyncSessionTransport, session_id: str, session: object) -> None:
        self._session = session
        self._transport = transport
        self._session_id = session_id

    async def run(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        input: bytes | str | None = None,  # as in subprocess.run
        on_output: OnOutput | None = None,
        max_output_bytes: int = OUTPUT_BYTES,
    ) -> CompletedProcess:
        """Runs a command to its end and returns its exit code and output. A command that fails is a result.

        A text is run by `/bin/sh -c`, a list as it is. `timeout_s` ends it with all that it started. `on_output` is
        called with the stream and each piece as it comes. Of each stream `max_output_bytes` are kept, head and tail.
        `input` is written while output is read.

        Left in any other way (an interrupt, a cancelled task, an exception of `on_output`), it kills the command. After
        a KeyboardInterrupt the command gets a SIGINT first, and two seconds to end.

        Raises InvalidRequest (reason COMMAND_NOT_FOUND) when there is no such program, PolicyViolationError.
        """
        if max_output_bytes < 0:
            raise InvalidRequest("max_output_bytes is negative")
        given = None if input is None else core.as_bytes(input)
        request = core.start_request(
            self._session_id,
            command,
            cwd=cwd,
            env=env,
            pty=None,
            stdin=given is not None,
            timeout_s=timeout_s,
            process_id=None,
        )
        kept = {"stdout": HeadAndTail(max_output_bytes), "stderr": HeadAndTail(max_output_bytes)}
        with self._transport.waits() as waits:
            process = self._asked_for(request, waits)
            async with _killed_on_failure(process):
                await process._begin()
                async with contextlib.nullcontext() if given is None else Beside(lambda: _give(process, given)):
                    async for event in process:
                        if isinstance(event, ProcessOutput):
                            kept[event.stream].add(event.data)
                            if on_output is not None:
                                await notify(on_output, event.stream, event.data)
                        else:
                            kept["stdout"].omit(event.omitted_bytes)
        assert process.result is not None, "the events ended without a result"
        stdout, stderr = kept["stdout"].finish(), kept["stderr"].finish()
        return CompletedProcess(
            process_id=process.process_id,
            argv=tuple(request.argv),
            result=process.result,
            stdout_bytes=stdout,
            stderr_bytes=stderr,
            omitted_bytes=kept["stdout"].omitted_bytes + kept["stderr"].omitted_bytes,
        )

    async def start(
        self,
        command: Command,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        pty: TerminalSize | None = None,
        stdin: bool = False,
        timeout_s: float | None = None,
        process_id: str | None = None,
    ) -> AsyncProcess:
        """Starts a command and returns when it runs.

        `cwd` is a directory of the workspace, or an absolute path of the sandbox. `pty` gives it a terminal of that
        size. With `stdin` its input can be written to; else it is empty. The same `process_id` with the same command
        gives the same process again. It goes on when this client leaves, and ends with the session.

        Raises as `run`.
        """
        request = core.start_request(
            self._session_id,
            command,
            cwd=cwd,
            env=env,
            pty=pty,
            stdin=stdin,
            timeout_s=timeout_s,
            process_id=process_id,
        )
        with self._transport.waits() as waits:
            process = self._asked_for(request, waits)
            await process._begin()  # a part of making it
        # Not followed until it is iterated over: one that is followed, and that the caller never reads, would wait.
        process.close()
        return process

    def _asked_for(self, request: pb.StartProcessRequest, waits: Waits) -> AsyncProcess:
        followed = self._transport.process(request, request.process_id, current_trace(), waits)
        return AsyncProcess(self._transport, followed, self._session)

    async def list(self) -> list[ProcessInfo]:
        """Lists the session's processes, those that ended among them until they are forgotten."""
        request = pb.ListProcessesRequest(session_id=self._session_id)
        response = await self._transport.call(self._transport.stub.ListProcesses, request)
        return [core.info_from_wire(each) for each in response.processes]

    async def attach(self, process_id: str, *, after_event: int = 0) -> AsyncProcess:
        """Finds a process that was started before, perhaps by another client; iterating begins after that event.

        Raises NotFoundError when there is none, or it was forgotten.
        """
        found = [info for info in await self.list() if info.process_id == process_id]
        if not found:
            raise NotFoundError(f"there is no process {process_id!r} in this session", reason="PROCESS_NOT_FOUND")
        with self._transport.waits() as waits:
            followed = self._transport.process(None, process_id, current_trace(), waits)
            followed.last_number, followed.pid = after_event, found[0].pid
        if found[0].result is not None and after_event >= found[0].last_event:
            followed.result = found[0].result  # no event follows that could bring it
        return AsyncProcess(self._transport, followed, self._session, found[0].written_bytes)


async def _give(process: AsyncProcess, given: bytes) -> None:
    """Writes all input of a command, and ends it. One that reads less than it is given has not failed for that."""
    for piece, eof in ((given, False), (b"", True)):
        while process.result is None:
            try:
                await process._write(piece, eof=eof)
            except CallTimeoutError:
                continue  # it takes its time; its own end, or its timeout, ends this
            except NotFoundError:
                return  # ended, and forgotten
            except PreconditionError as error:
                if error.reason != "PROCESS_ENDED":
                    raise
                return
            break


@contextlib.asynccontextmanager
async def _killed_on_failure(process: AsyncProcess) -> AsyncIterator[None]:
    """Ends a process when the block fails. Drops its own failures: the caller is about to get the block's error."""
    try:
        yield
    except BaseException as error:
        if not (process._followed.refused or isinstance(error, ConnectionLost)):
            with contextlib.suppress(ExecutorClientError, grpc.RpcError):
                await process._end(gently=isinstance(error, KeyboardInterrupt))
        raise
