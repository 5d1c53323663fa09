"""Commands and terminals as E2B's envd serves them, over `session.processes`.

A process outlives the client that started it, until its timeout or the sandbox's end. The daemon owns it. This module
keeps nothing, so a restarted gateway serves the same processes. For that reason the id of a process contains its tag.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import posixpath
import secrets
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from starlette.types import ASGIApp

from executor_api.json_size import JSON_VALUES_MAX
from executor_client.aio_process import AsyncProcess
from executor_client.aio_session import AsyncSession
from executor_client.errors import CallTimeoutError, FileError, InvalidRequest
from executor_client.process_results import ProcessInfo, ProcessOutput, ProcessOutputCut, ProcessResult, TerminalSize
from executor_server.gateway.e2b.envd import process_connect
from executor_server.gateway.e2b.envd import process_pb2 as pb
from executor_server.gateway.e2b.envd.calls import CODECS, keepalive_s, sandbox_of
from executor_server.gateway.e2b.paths import HOME, absolute, inside, shown
from executor_server.gateway.e2b.records import Sandbox, Sandboxes

TAG_BYTES_MAX = 34
ARGUMENTS_MAX = JSON_VALUES_MAX
"""Arguments and environment variables of a command. Each is checked, and 4 MiB of Protobuf have 2,000,000 empty ones.
They would hold up all other requests for seconds."""
KILL_S = 2.0
"""Seconds that SendSignal waits for the end of a killed process, so that the client no longer finds it."""

_TAGGED = "e2b-"

Context = RequestContext[Any, Any]


def process_app(sandboxes: Sandboxes) -> ASGIApp:
    """Returns the service `process.Process`."""
    service = ProcessService(sandboxes)
    return process_connect.ProcessASGIApplication(service, codecs=CODECS, compressions=())


class ProcessService(process_connect.Process):
    """Each method is one of envd's; E2B's clients define what it promises."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def start(self, request: pb.StartRequest, ctx: Context, /) -> AsyncIterator[pb.StartResponse]:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            process = await _started(sandbox.session, request, ctx)
            async with contextlib.aclosing(_events(sandbox.session, process, request.HasField("pty"), ctx)) as events:
                async for event in events:
                    yield pb.StartResponse(event=event)

    async def connect(self, request: pb.ConnectRequest, ctx: Context, /) -> AsyncIterator[pb.ConnectResponse]:
        """Joins a process. As in envd, the stream has only later output. An ended process sends its end."""
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            info = await _found(sandbox.session, request.process, or_ended=True)
            process = await _attached(sandbox.session, info)
            async with contextlib.aclosing(_events(sandbox.session, process, info.has_pty, ctx)) as events:
                async for event in events:
                    yield pb.ConnectResponse(event=event)

    async def list(self, request: pb.ListRequest, ctx: Context, /) -> pb.ListResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            running = [info for info in await sandbox.session.processes.list() if info.running]
            return pb.ListResponse(processes=map(_to_wire, running))

    async def update(self, request: pb.UpdateRequest, ctx: Context, /) -> pb.UpdateResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            process = await _attached(sandbox.session, await _found(sandbox.session, request.process))
            if request.HasField("pty"):
                await process.resize(_size(request.pty))
            return pb.UpdateResponse()

    async def stream_input(
        self, request: AsyncIterator[pb.StreamInputRequest], ctx: Context, /
    ) -> pb.StreamInputResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            selector: pb.ProcessSelector | None = None
            async for message in request:
                if message.HasField("start"):
                    selector = message.start.process
                    await _found(sandbox.session, selector)
                elif message.HasField("data"):
                    if selector is None:
                        raise ConnectError(Code.INVALID_ARGUMENT, "the first message must name the process: send start")
                    await _give(sandbox, selector, message.data.input)
            return pb.StreamInputResponse()

    async def send_input(self, request: pb.SendInputRequest, ctx: Context, /) -> pb.SendInputResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            await _give(sandbox, request.process, request.input)
            return pb.SendInputResponse()

    async def close_stdin(self, request: pb.CloseStdinRequest, ctx: Context, /) -> pb.CloseStdinResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            info = await _found(sandbox.session, request.process)
            if info.has_pty:
                raise ConnectError(
                    Code.INVALID_ARGUMENT, "a terminal has no stdin to close: send Ctrl+D (the byte 4) to it instead"
                )
            async with _writer(sandbox, info):
                await (await _attached(sandbox.session, info)).close_stdin()
            return pb.CloseStdinResponse()

    async def send_signal(self, request: pb.SendSignalRequest, ctx: Context, /) -> pb.SendSignalResponse:
        async with sandbox_of(self._sandboxes, ctx) as sandbox:
            process = await _attached(sandbox.session, await _found(sandbox.session, request.process))
            if request.signal == pb.SIGNAL_SIGKILL:
                await process.kill()
                with contextlib.suppress(CallTimeoutError):
                    await process.wait(KILL_S)
            elif request.signal == pb.SIGNAL_SIGTERM:
                await process.terminate()
            else:
                raise ConnectError(
                    Code.UNIMPLEMENTED, f"signal {request.signal} is not offered: send SIGTERM or SIGKILL"
                )
            return pb.SendSignalResponse()


async def _give(sandbox: Sandbox, selector: pb.ProcessSelector, given: pb.ProcessInput) -> None:
    info = await _found(sandbox.session, selector)
    if given.WhichOneof("input") != ("pty" if info.has_pty else "stdin"):
        what = "a terminal: send pty" if info.has_pty else "no terminal: send stdin"
        raise ConnectError(Code.INVALID_ARGUMENT, f"process {info.pid} has {what}")
    async with _writer(sandbox, info):
        await (await _attached(sandbox.session, info)).write(given.pty or given.stdin)


def _writer(sandbox: Sandbox, info: ProcessInfo) -> asyncio.Lock:
    """Returns the lock for writing to a process: each write names its position after the one before it."""
    return sandbox.writers.setdefault(info.process_id, asyncio.Lock())


async def _started(session: AsyncSession, request: pb.StartRequest, ctx: Context) -> AsyncProcess:
    config, pty = request.process, request.HasField("pty")
    if len(config.args) + len(config.envs) > ARGUMENTS_MAX:
        raise ConnectError(
            Code.INVALID_ARGUMENT,
            f"the command has more than {ARGUMENTS_MAX:,} arguments and variables: pass them in a file, or as input",
        )
    cwd = absolute(config.cwd)
    timeout_ms = int(ctx.request_headers.get("connect-timeout-ms", "0"))  # connectrpc has checked it; 0: none
    try:
        return await session.processes.start(
            [config.cmd, *config.args],
            cwd=inside(cwd),
            env={"PWD": cwd, **config.envs},  # shells show it if it names their directory
            pty=_size(request.pty) if pty else None,
            stdin=not pty and (request.stdin or not request.HasField("stdin")),
            timeout_s=timeout_ms / 1000 if timeout_ms > 0 else None,
            process_id=_id_of(request.tag),
        )
    except FileError as error:
        raise ConnectError(Code.INVALID_ARGUMENT, f"the command can't begin in {cwd!r}: {error.message}") from error
    except InvalidRequest as error:
        if error.reason == "COMMAND_NOT_FOUND" and config.cmd == "/bin/bash":
            raise ConnectError(
                Code.INVALID_ARGUMENT,
                "this sandbox has no /bin/bash, with which E2B's clients run every command: use a template whose "
                "image has bash",
            ) from error
        raise


async def _events(
    session: AsyncSession, process: AsyncProcess, pty: bool, ctx: Context
) -> AsyncGenerator[pb.ProcessEvent, None]:
    """Yields the start of a process, its output with keepalives, and its end. Raises if the end is unknown."""
    yield pb.ProcessEvent(start=pb.ProcessEvent.StartEvent(pid=process.pid))
    silence_s = keepalive_s(ctx)
    async with contextlib.aclosing(aiter(process)) as outputs:
        following: asyncio.Task[Any] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(anext(outputs, None))
                if not (await asyncio.wait((following,), timeout=silence_s))[0]:
                    yield pb.ProcessEvent(keepalive=pb.ProcessEvent.KeepAlive())
                    continue
                output, following = following.result(), None
                if output is None:
                    break
                yield pb.ProcessEvent(data=_data(output, pty))
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
    if process.result is None or process.result.outcome == "lost":
        await session.keep_alive()  # raises SessionGone if the sandbox is the reason
        raise ConnectError(Code.UNAVAILABLE, "the process was lost, and it is unknown how it ended")
    yield pb.ProcessEvent(end=_end(process.result))


def _data(output: ProcessOutput | ProcessOutputCut, pty: bool) -> pb.ProcessEvent.DataEvent:
    if isinstance(output, ProcessOutputCut):
        stream, data = "stdout", b"\n[%d bytes left out]\n" % output.omitted_bytes
    else:
        stream, data = output.stream, output.data
    return pb.ProcessEvent.DataEvent(**{"pty" if pty else stream: data})


def _end(result: ProcessResult) -> pb.ProcessEvent.EndEvent:
    """Returns the end in Go's words, as envd does. Raises ConnectError for a timeout."""
    if result.outcome == "timeout":
        raise ConnectError(Code.DEADLINE_EXCEEDED, "the command ran until its timeout and was killed")
    exited = result.outcome == "exited"
    name = "" if exited else (signal.strsignal(result.signal) or f"signal {result.signal}").lower()
    status = f"exit status {result.exit_code}" if exited else f"signal: {name}"
    return pb.ProcessEvent.EndEvent(
        exit_code=(result.exit_code or 0) if exited else -1,
        exited=exited,
        status=status,
        error=None if result.succeeded else status,
    )


async def _found(session: AsyncSession, selector: pb.ProcessSelector, *, or_ended: bool = False) -> ProcessInfo:
    """Returns the selected running process. With `or_ended`, else the last one that ended."""
    infos = await session.processes.list()
    match selector.WhichOneof("selector"):
        case "pid":
            infos, which = [info for info in infos if info.pid == selector.pid], f"pid {selector.pid}"
        case "tag":
            infos, which = [info for info in infos if _tag_of(info) == selector.tag], f"tag {selector.tag[:200]}"
        case _:
            raise ConnectError(Code.INVALID_ARGUMENT, "the request selects no process: give its pid or its tag")
    running = [info for info in infos if info.running or or_ended]
    if not running:
        raise ConnectError(Code.NOT_FOUND, f"process with {which} not found")
    return max(running, key=lambda info: (info.running, info.start_time))


async def _attached(session: AsyncSession, info: ProcessInfo) -> AsyncProcess:
    return await session.processes.attach(info.process_id, after_event=info.last_event)


def _size(pty: pb.PTY) -> TerminalSize:
    return TerminalSize(columns=pty.size.cols or 80, rows=pty.size.rows or 24)


def _to_wire(info: ProcessInfo) -> pb.ProcessInfo:
    """Without the environment of the process, which the daemon does not keep."""
    config = pb.ProcessConfig(cmd=info.argv[0], args=info.argv[1:], cwd=shown(posixpath.join(HOME, info.cwd)))
    return pb.ProcessInfo(pid=info.pid, config=config, tag=_tag_of(info))


def _id_of(tag: str) -> str:
    """Makes an id for a process with a tag."""
    if len(tag.encode()) > TAG_BYTES_MAX:
        raise ConnectError(Code.INVALID_ARGUMENT, f"the tag is longer than {TAG_BYTES_MAX} bytes")
    encoded = base64.urlsafe_b64encode(tag.encode()).decode().rstrip("=")
    return f"{_TAGGED}{secrets.token_hex(6)}{'-' if tag else ''}{encoded}"


def _tag_of(info: ProcessInfo) -> str | None:
    if not info.process_id.startswith(_TAGGED):
        return None
    _, _, encoded = info.process_id.removeprefix(_TAGGED).partition("-")
    try:
        return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode() or None
    except ValueError:
        return None  # another program gave it this id
