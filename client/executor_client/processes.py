# Made of aio_processes.py by tools/unasync.py: change that, and run `make unasync`.
"""The processes of a session, `session.processes`, of the blocking client: commands and terminals in its sandbox."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Literal

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import process as core
from executor_client._core.arguments import checks_calls
from executor_client._core.convert import from_wire
from executor_client._core.process import FollowedProcess, KeptOutput
from executor_client._core.quiet_grpc import grpc
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._core.tracing import current_trace
from executor_client._core.waiting import Waits
from executor_client._sync import Background, OnOutput, Transport, notify, shielded
from executor_client.errors import (
    CallTimeoutError,
    ConnectionLost,
    ExecutorClientError,
    InvalidRequest,
    NotFoundError,
    PreconditionError,
)
from executor_client.process import Process
from executor_client.process_results import (
    CompletedProcess,
    ProcessEvent,
    ProcessInfo,
    ProcessOutput,
    ProcessResult,
    TerminalSize,
)

OUTPUT_BYTES = 1024 * 1024
"""Default for the bytes of each stream that `run` keeps, head and tail."""

Command = str | Sequence[str]
"""A text for the shell, or a program with its arguments."""


@checks_calls
class SessionProcesses(ShortRepr):
    """The processes of one session. They run alongside its executions, as the same user, under the same limits."""

    _shows = ("_session.session_id",)

    def __init__(self, session: SessionBase[Transport]) -> None:
        self._session = session

    def run(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        input: bytes | str | None = None,  # as in subprocess.run
        on_output: OnOutput | None = None,
        max_output_bytes: int = OUTPUT_BYTES,
        merge_stderr: bool = False,
        overflow: Literal["cut", "error"] = "cut",
        not_runnable: Literal["error", "result"] = "error",
    ) -> CompletedProcess:
        """Runs a command to its end and returns its exit code and output. A command that fails is a result.

        Text is run by bash, or by `/bin/sh` if the image has no bash; a list is run directly. After `timeout_s` seconds
        the command is killed with its descendants. `on_output` is called with the stream's name and each piece as it
        arrives. `max_output_bytes` of each stream are kept, head and tail; with `overflow="error"`, a command that
        prints more is killed. With `merge_stderr`, both streams are one pipe, which keeps their order, and all output
        is stdout. `input` is written while output is read.

        With `not_runnable="result"`, a command that can't be run is a result, as for a shell: exit code 127 if there is
        no such program, 126 if it can't be executed, and the reason on stderr.

        If it ends in any other way (an interrupt, an exception of `on_output`), it kills the command.
        After a KeyboardInterrupt, the command gets a SIGINT first and two seconds to end.

        Arguments may have 2 MiB together, and 131,071 bytes each; a text for the shell may have 2 MiB.

        Raises InvalidRequest if the program is missing (COMMAND_NOT_FOUND) or can't be executed
        (COMMAND_NOT_EXECUTABLE); FileNotFound, FileNotDirectory, FilePermissionDenied or another FileError if it can't
        begin in `cwd`; OutputLimitExceeded; and PolicyViolationError.
        """
        kept = KeptOutput(max_output_bytes, overflow)
        request = core.start_request(
            self._session.session_id,
            command,
            cwd=cwd,
            env=env,
            stdin=input is not None,
            timeout_s=timeout_s,
            merge_stderr=merge_stderr,
        )
        process = None
        try:
            with self._running(request, input) as process:
                for event in process:
                    kept.add(event)
                    if on_output is not None and isinstance(event, ProcessOutput):
                        notify(on_output, event.stream, event.data)
        except InvalidRequest as error:
            if process is not None or not_runnable == "error":
                raise
            return core.not_run(request, error)
        assert process.result is not None, "the events ended without a result"
        return kept.completed(request, process.result)

    def stream(
        self,
        command: Command,
        *,
        timeout_s: float | None = None,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        input: bytes | str | None = None,  # as in `run`
        merge_stderr: bool = False,
    ) -> Generator[ProcessEvent | ProcessResult, None]:
        """Runs a command as `run` does, and yields its output as it arrives, then its result.

        The command starts with the first iteration, which raises the errors of `run`. A slow reader makes it wait once
        the buffers are full. It is killed if the generator is left early: by a break, an exception.
        Python closes an abandoned generator when it collects it; `contextlib.closing` closes it at once.
        """
        request = core.start_request(
            self._session.session_id,
            command,
            cwd=cwd,
            env=env,
            stdin=input is not None,
            timeout_s=timeout_s,
            merge_stderr=merge_stderr,
        )
        return self._streamed(request, input)

    def _streamed(
        self, request: pb.StartProcessRequest, input: bytes | str | None
    ) -> Generator[ProcessEvent | ProcessResult, None]:
        with self._running(request, input) as process:
            while (event := process._next(math.inf)) is not None:
                yield event
        assert process.result is not None, "the events ended without a result"
        yield process.result

    def _running(self, request: pb.StartProcessRequest, input: bytes | str | None) -> _Running:
        waits = self._session._transport.waits()
        given = None if input is None else core.as_bytes(input)
        return _Running(self._asked_for(request, waits), waits, given)

    def start(
        self,
        command: Command,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        pty: TerminalSize | None = None,
        stdin: bool = False,
        timeout_s: float | None = None,
        process_id: str | None = None,
        merge_stderr: bool = False,
    ) -> Process:
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
            merge_stderr=merge_stderr,
        )
        waits = self._session._transport.waits()
        process = self._asked_for(request, waits)
        if process_id is None:
            # Killed if this fails halfway: the caller would not know its id.
            with _Running(process, waits, None):
                pass
        else:
            with waits:
                process._begin()  # not in the constructor: it does I/O
        # Not followed until the caller iterates: a followed process waits for its reader.
        process.close()
        return process

    def _asked_for(self, request: pb.StartProcessRequest, waits: Waits) -> Process:
        return Process(self._session, self._followed(request.process_id, request, waits))

    def _followed(self, process_id: str, request: pb.StartProcessRequest | None, waits: Waits) -> FollowedProcess:
        transport = self._session._open()
        self._session._was_used = True
        followed = transport.process(self._session.session_id, process_id, request, current_trace(), waits)
        if (record := self._session._record) is not None:
            if request is not None:
                record.command(request)
            followed.on_event = functools.partial(record.command_event, process_id)
        return followed

    def list(self) -> list[ProcessInfo]:
        """Lists the session's processes, including ended ones until the daemon forgets them."""
        request = pb.ListProcessesRequest(session_id=self._session.session_id)
        response = self._session._open().call(request)
        return [from_wire(ProcessInfo, each) for each in response.processes]

    def attach(self, process_id: str, *, after_event: int = 0) -> Process:
        """Returns an existing process. Another client may have started it. Iterating begins after `after_event`.

        Raises NotFoundError if there is none, or if the daemon has forgotten it.
        """
        found = [info for info in self.list() if info.process_id == process_id]
        if not found:
            raise NotFoundError(f"there is no process {process_id!r} in this session", reason="PROCESS_NOT_FOUND")
        with self._session._transport.waits() as waits:
            followed = self._followed(process_id, None, waits)
            followed.last_number, followed.pid = after_event, found[0].pid
        if found[0].result is not None and after_event >= found[0].last_event:
            followed.result = found[0].result  # no later event will bring it
        return Process(self._session, followed, found[0].written_bytes)


def _give(process: Process, given: bytes) -> None:
    """Writes all input of a command and closes it. The command may read less than that."""
    for piece, eof in ((given, False), (b"", True)):
        while process.result is None:
            try:
                process._write(piece, eof=eof)
            except CallTimeoutError:
                continue  # it is slow to read; its end, or its timeout, ends this loop
            except NotFoundError:
                return  # ended, and forgotten
            except PreconditionError as error:
                if error.reason != "PROCESS_ENDED":
                    raise
                return
            break


class _Running:
    """A command during the body of an `async with`: started, given its input, and killed if the body fails.

    It is a class, not an `asynccontextmanager`, since `stream` uses it: at the end of its loop, asyncio closes all
    generators at the same time, including the generator that an `asynccontextmanager` would have.
    """

    def __init__(self, process: Process, waits: Waits, given: bytes | None) -> None:
        self._process = process
        self._waits = waits
        self._given = given

    def __enter__(self) -> Process:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._waits)
            stack.push(self._kill_on_failure)
            self._process._begin()
            if (given := self._given) is not None:
                stack.enter_context(Background(lambda: _give(self._process, given)))
            self._owned = stack.pop_all()
        return self._process

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owned.__exit__(exc_type, exc, traceback)

    def _kill_on_failure(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kills the process if the body has failed. Drops its own failures: the caller gets the body's error."""
        if not (exc is None or self._process._followed.refused or isinstance(exc, ConnectionLost)):
            with contextlib.suppress(ExecutorClientError, grpc.RpcError):
                interrupted = isinstance(exc, KeyboardInterrupt)
                shielded(lambda: self._process._end(gently=interrupted))
