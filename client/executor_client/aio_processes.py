"""The processes of a session, `session.processes`, of the asyncio client: commands and terminals in its sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncTransport, Background, OnOutput, notify
from executor_client._core import process as core
from executor_client._core.arguments import checks_calls
from executor_client._core.convert import from_wire
from executor_client._core.process import FollowedProcess, HeadAndTail
from executor_client._core.quiet_grpc import grpc
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._core.tracing import current_trace
from executor_client._core.waiting import Waits
from executor_client.aio_process import AsyncProcess
from executor_client.errors import (
    CallTimeoutError,
    ConnectionLost,
    ExecutorClientError,
    InvalidRequest,
    NotFoundError,
    PreconditionError,
)
from executor_client.process_results import (
    CompletedProcess,
    ProcessInfo,
    ProcessOutput,
    TerminalSize,
)

OUTPUT_BYTES = 1024 * 1024
"""Default for the bytes of each stream that `run` keeps, head and tail."""

Command = str | Sequence[str]
"""A text for the shell, or a program with its arguments."""


@checks_calls
class AsyncSessionProcesses(ShortRepr):
    """The processes of one session. They run alongside its executions, as the same user, under the same limits."""

    _shows = ("_session.session_id",)

    def __init__(self, session: SessionBase[AsyncTransport]) -> None:
        self._session = session

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

        Text is run by bash, or by `/bin/sh` if the image has no bash; a list is run directly. After `timeout_s` seconds
        the command is killed with its descendants. `on_output` is called with the stream's name and each piece as it
        arrives. `max_output_bytes` of each stream are kept, head and tail. `input` is written while output is read.

        If it ends in any other way (an interrupt, a cancelled task, an exception of `on_output`), it kills the command.
        After a KeyboardInterrupt, the command gets a SIGINT first and two seconds to end.

        Raises InvalidRequest (COMMAND_NOT_FOUND) if there is no such program, and PolicyViolationError.
        """
        if max_output_bytes < 0:
            raise InvalidRequest("max_output_bytes is negative")
        given = None if input is None else core.as_bytes(input)
        request = core.start_request(
            self._session.session_id, command, cwd=cwd, env=env, stdin=given is not None, timeout_s=timeout_s
        )
        kept = {"stdout": HeadAndTail(max_output_bytes), "stderr": HeadAndTail(max_output_bytes)}
        with self._session._transport.waits() as waits:
            process = self._asked_for(request, waits)
            async with _killed_on_failure(process):
                await process._begin()
                async with contextlib.nullcontext() if given is None else Background(lambda: _give(process, given)):
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
        """Starts a command. Returns once it runs.

        `cwd` is a directory of the workspace, or an absolute path of the sandbox. `pty` gives the process a terminal of
        this size. With `stdin`, its input can be written; otherwise it is empty. The same `process_id` with the same
        command returns the same process. The process continues without this client, and ends with the session.

        Raises the errors of `run`.
        """
        request = core.start_request(
            self._session.session_id,
            command,
            cwd=cwd,
            env=env,
            pty=pty,
            stdin=stdin,
            timeout_s=timeout_s,
            process_id=process_id,
        )
        with self._session._transport.waits() as waits:
            process = self._asked_for(request, waits)
            await process._begin()  # a part of making it
        # Not followed until the caller iterates: a followed process waits for its reader.
        process.close()
        return process

    def _asked_for(self, request: pb.StartProcessRequest, waits: Waits) -> AsyncProcess:
        return AsyncProcess(self._session, self._followed(request.process_id, request, waits))

    def _followed(self, process_id: str, request: pb.StartProcessRequest | None, waits: Waits) -> FollowedProcess:
        transport = self._session._open()
        return transport.process(self._session.session_id, process_id, request, current_trace(), waits)

    async def list(self) -> list[ProcessInfo]:
        """Lists the session's processes, including ended ones until the daemon forgets them."""
        request = pb.ListProcessesRequest(session_id=self._session.session_id)
        response = await self._session._open().call(request)
        return [from_wire(ProcessInfo, each) for each in response.processes]

    async def attach(self, process_id: str, *, after_event: int = 0) -> AsyncProcess:
        """Returns an existing process. Another client may have started it. Iterating begins after `after_event`.

        Raises NotFoundError if there is none, or if the daemon has forgotten it.
        """
        found = [info for info in await self.list() if info.process_id == process_id]
        if not found:
            raise NotFoundError(f"there is no process {process_id!r} in this session", reason="PROCESS_NOT_FOUND")
        with self._session._transport.waits() as waits:
            followed = self._followed(process_id, None, waits)
            followed.last_number, followed.pid = after_event, found[0].pid
        if found[0].result is not None and after_event >= found[0].last_event:
            followed.result = found[0].result  # no later event will bring it
        return AsyncProcess(self._session, followed, found[0].written_bytes)


async def _give(process: AsyncProcess, given: bytes) -> None:
    """Writes all input of a command and closes it. The command may read less than that."""
    for piece, eof in ((given, False), (b"", True)):
        while process.result is None:
            try:
                await process._write(piece, eof=eof)
            except CallTimeoutError:
                continue  # it is slow to read; its end, or its timeout, ends this loop
            except NotFoundError:
                return  # ended, and forgotten
            except PreconditionError as error:
                if error.reason != "PROCESS_ENDED":
                    raise
                return
            break


@contextlib.asynccontextmanager
async def _killed_on_failure(process: AsyncProcess) -> AsyncIterator[None]:
    """Kills a process if the block fails. Drops its own failures: the caller gets the block's error."""
    try:
        yield
    except BaseException as error:
        if not (process._followed.refused or isinstance(error, ConnectionLost)):
            with contextlib.suppress(ExecutorClientError, grpc.RpcError):
                await process._end(gently=isinstance(error, KeyboardInterrupt))
        raise
