"""Runs one program of ours in a build sandbox: a sandbox for the daemon's own work on environments.

This drives its guest with the least code possible: it connects, sends the rules and a program, reads lines, and takes a
file out. The program is ours, but it works on data of an index, so all output of the sandbox is hostile: the channel
checks frames, and lines and files are counted here.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, TypeVar

import structlog

from executor_server.backends import BuildMounts, BuildSandboxes, Sandbox
from executor_server.backends.channel import GuestChannel, Request, file_part, nothing, read_result
from executor_server.core import (
    NO_NETWORK_USE,
    EgressConnection,
    EgressDenial,
    ExecutorError,
    FileInfo,
    NetworkRules,
    Outcome,
    OutputMode,
    Reason,
    Result,
    SandboxFailure,
    SandboxSpec,
    Unavailable,
)
from executor_server.guest.wire.frames import Frame, FrameError
from executor_server.guest.wire.messages import Configure, Done, Execute, FileChunk, FileGet, Log
from executor_server.guest.wire.messages import Result as ResultMessage
from executor_server.guest.wire.schema import message_of
from executor_server.guest.wire.session_rules import ExecutionMax, SessionRules
from executor_server.network.egress import Egress, EgressError

MAX_OUTPUT_BYTES = 2 * 2**20
"""Bytes that one program may print: progress and errors."""
_MAX_LINE_CHARS = 16_384
_OPERATIONS = 10**9
_ANSWER_TIME_S = 30.0  # for each part of an answer
_BIND_TIME_S = 30.0
_PING_INTERVAL_S = 5.0
# Seconds after the program's own limit until a guest that reports no end is given up.
_REPORT_TIME_S = 15.0

_log = structlog.get_logger(__name__)

T = TypeVar("T")

OnLine = Callable[[dict[str, Any]], None]
"""Called in the event loop with each line of the program, a JSON object. Raises nothing."""


class BuildSandboxFailed(SandboxFailure):
    """The program failed. The message is for the log."""


class BuildTimeout(BuildSandboxFailed):
    """The program did not end in time."""


@dataclass(frozen=True)
class Network:
    """The network of a build sandbox."""

    egress: Egress
    rules: NetworkRules


@dataclass(frozen=True)
class Order:
    """The description of a build sandbox."""

    maker: BuildSandboxes
    spec: SandboxSpec
    mounts: BuildMounts
    network: Network | None = None


class BuildSandbox:
    """A build sandbox whose guest is ready. One program runs at a time."""

    def __init__(self, sandbox: Sandbox, channel: GuestChannel) -> None:
        self.denials: list[EgressDenial] = []
        """The first refusals of its network."""
        self._sandbox = sandbox
        self._channel = channel
        self._requests: dict[int, Request[Any]] = {}
        self._ended: asyncio.Future[Result] | None = None
        self._output: _Lines | None = None
        self._ops = 0
        self._lost: str | None = None
        channel.on_frame = self._on_frame
        channel.on_lost = self._on_lost

    async def configure(self, spec: SandboxSpec) -> None:
        """Sends rules that allow everything that the sandbox allows. Raises SandboxFailure."""
        most = ExecutionMax(wall_time_s=86_400.0, cpu_time_s=86_400.0, operations=_OPERATIONS, output_bytes=2**40)
        rules = SessionRules(
            authorized=["*"],
            denied=[],
            refused=[],
            session_operations=_OPERATIONS,
            execution_max=most,
            shipped_tools=[],
        )
        body = json.dumps(rules.head()).encode()
        await self._ask(nothing, lambda op: Configure(op=op, settings=len(body), env=0), body)

    async def run(self, program: str, *, time_s: float, on_line: OnLine) -> None:
        """Runs a program to its end. Raises BuildSandboxFailed if it fails, BuildTimeout if it does not end."""
        self._require_alive()
        self._ended = asyncio.get_running_loop().create_future()
        self._output = _Lines(on_line)
        execute = Execute(
            id=secrets.token_hex(8),
            mode=OutputMode.LAST_STATEMENT.value,
            asked={},
            wall_time_s=time_s,
            cpu_time_s=time_s * 64,
            operations=_OPERATIONS,
            output_bytes=MAX_OUTPUT_BYTES,
            policy="",
        )
        self._channel.send(execute, program.encode())
        try:
            result = await self._end_of(self._ended, time_s + _REPORT_TIME_S)
        except TimeoutError as error:
            raise BuildTimeout(f"the program did not end within {time_s:g} s") from error
        if result.outcome in (Outcome.TIMEOUT, Outcome.CPU_LIMIT):
            raise BuildTimeout(f"the program did not end within {time_s:g} s")
        if result.outcome is not Outcome.SUCCEEDED:
            why = result.error.message[:500] if result.error is not None else ""
            raise BuildSandboxFailed(f"the program ended as {result.outcome.value}: {why}")

    async def _end_of(self, ended: asyncio.Future[Result], within_s: float) -> Result:
        """Waits, and pings meanwhile, since a guest without messages assumes that its daemon is dead."""
        async with asyncio.timeout(within_s):
            while not ended.done():
                await asyncio.wait([ended], timeout=_PING_INTERVAL_S)
                self._channel.ping()
        return ended.result()

    async def take_file(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yields a file of the workspace in pieces. Raises SandboxFailure if it is missing or longer."""
        left = max_bytes
        request: Request[FileInfo | bytes] = Request(file_part, self._hold)
        with self._asking(request) as op:
            self._channel.send(FileGet(op=op, path=path, max_bytes=max_bytes, tar=False))
            while (part := await _next(request)) is not None:
                if isinstance(part, bytes) and part:
                    left -= len(part)
                    if left < 0:
                        raise BuildSandboxFailed(f"the file has more than {max_bytes:,} bytes")
                    yield part

    async def _ask(self, read: Callable[[Frame], None], message: Callable[[int], Configure], body: bytes) -> None:
        request: Request[None] = Request(read, self._hold)
        with self._asking(request) as op:
            self._channel.send(message(op), body)
            await _next(request)

    @contextmanager
    def _asking(self, request: Request[Any]) -> Iterator[int]:
        """Opens a request for the duration of the block."""
        self._require_alive()
        self._ops += 1
        self._requests[op := self._ops] = request
        try:
            yield op
        finally:
            del self._requests[op]

    def _hold(self, _: object, held: bool) -> None:
        if held:
            self._channel.reading.pause()
        else:
            self._channel.reading.resume()

    def _require_alive(self) -> None:
        if self._lost is not None:
            raise BuildSandboxFailed(f"the build sandbox is lost: {self._lost}")

    # -- frames of the guest -------------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        message = message_of(frame)
        if isinstance(message, (Done, FileChunk)):
            request = self._requests.get(message.op)
            if request is not None:
                request.take(frame)
        elif isinstance(message, ResultMessage):
            if self._ended is None or self._ended.done():
                raise FrameError("a result of nothing")
            self._ended.set_result(read_result(frame))
        elif isinstance(message, Log) and self._output is not None and message.stream == "stdout":
            self._output.take(frame.body)

    def _on_lost(self, reason: str) -> None:
        self._lost = reason
        failure = BuildSandboxFailed(f"the build sandbox was lost: {reason}")
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(failure)
            self._ended.exception()  # marks it as seen: possibly no task waits for it
        for request in self._requests.values():
            request.fail(Unavailable(Reason.BACKEND_UNAVAILABLE, str(failure)))

    # -- reports of the egress proxy: EgressSink -----------------------------------------------------------------

    def connection_opened(self, connection: EgressConnection) -> None:
        _log.debug("build_sandbox_connected", host=connection.host)

    def connection_closed(self, connection: EgressConnection) -> None:
        _log.debug("build_sandbox_disconnected", host=connection.host, received_bytes=connection.received_bytes)

    def connection_denied(self, denial: EgressDenial) -> None:
        _log.info("build_sandbox_denied", host=denial.host, port=denial.port, reason=denial.reason)
        if len(self.denials) < 8:
            self.denials.append(denial)

    def denials_uncounted(self, count: int) -> None:
        _log.info("build_sandbox_denied_more", count=count)

    async def host_asked(self, host: str, port: int) -> str:
        return f"a build can't wait for an approval of {host}:{port}"

    def listener_misused(self) -> None:
        self._on_lost("it tried to block the egress proxy")

    def moved(self, sent_bytes: int, received_bytes: int) -> None:
        return


async def _next(request: Request[T]) -> T | None:
    """Returns the next part of an answer. Raises BuildSandboxFailed if the guest refuses, is silent or is lost."""
    try:
        async with asyncio.timeout(_ANSWER_TIME_S):
            return await request.next()
    except TimeoutError as error:
        raise BuildSandboxFailed(f"the build sandbox did not answer within {_ANSWER_TIME_S:g} s") from error
    except ExecutorError as error:
        raise BuildSandboxFailed(f"the build sandbox refused a request: {error.message[:500]}") from error


class _Lines:
    """Splits a program's output into lines of JSON objects; drops other lines, and lines that are too long."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._pending = b""
        self._taken_bytes = 0

    def take(self, data: bytes) -> None:
        """Takes the next bytes. Raises FrameError if the guest sends more than the limit for its program."""
        self._taken_bytes += len(data)
        if self._taken_bytes > 2 * MAX_OUTPUT_BYTES:
            raise FrameError("more output than was allowed")
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_CHARS:
            self._pending = b""
        for line in lines:
            if len(line) <= _MAX_LINE_CHARS:
                self._give(line)

    def _give(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(said, dict):
            self._on_line(said)


@asynccontextmanager
async def open_build_sandbox(order: Order) -> AsyncIterator[BuildSandbox]:
    """Creates a build sandbox, and destroys it at the end of the block.

    Raises SandboxFailure; EgressError if its network can't be opened.
    """
    sandbox = await order.maker.create_build_sandbox(order.spec, order.mounts)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_destroy, sandbox)
        channel = GuestChannel(sandbox.endpoint)
        stack.callback(channel.close)
        await channel.connect()
        running = BuildSandbox(sandbox, channel)
        await running.configure(order.spec)
        if order.network is not None:
            await stack.enter_async_context(_bound(order.network, channel, running))
        yield running


async def _destroy(sandbox: Sandbox) -> None:
    await asyncio.shield(sandbox.destroy())


@asynccontextmanager
async def _bound(network: Network, channel: GuestChannel, sink: BuildSandbox) -> AsyncIterator[None]:
    session_id = f"environment-{secrets.token_hex(8)}"
    try:
        async with asyncio.timeout(_BIND_TIME_S):
            listener = await channel.take_listener()
            await network.egress.bind(session_id, network.rules, listener, sink, NO_NETWORK_USE)
    except TimeoutError as error:
        raise EgressError("the egress proxy does not serve a build sandbox") from error
    try:
        yield
    finally:
        await asyncio.shield(network.egress.release(session_id))


def program(name: Literal["run_uv", "first_import"], task: dict[str, Any]) -> str:
    """Returns the text of a program of inside/ that calls its `main` with this task."""
    return f"{_text_of(name)}\n\nmain(json.loads({json.dumps(task)!r}))\n"


@functools.cache
def _text_of(name: str) -> str:
    return (files(__package__) / "inside" / f"{name}.py").read_text()
