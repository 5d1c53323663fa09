"""A connection to an MCP server, on the official SDK, in a thread with an event loop of its own.

Both clients use it: a session outlives the loops of its callers, and a busy loop must not delay the server. The thread
refers to the `_Connection`, not to the `McpServer`, whose finalizer ends it.

The server is not trusted to behave. Its messages are limited before they are parsed. So this module reads a process
itself, since the SDK's transport has no limit. Whatever happens to the server, a call ends with a reason in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor_api.limits import TOOLS_MAX
from executor_client._core.mcp_functions import functions
from executor_client._core.tools import Tool
from executor_client.errors import ConfigurationError, InvalidRequest

if TYPE_CHECKING:
    import mcp

START_TIMEOUT_S = 60.0
"""Seconds until a server has listed its tools; the first start may download it."""
CALL_TIMEOUT_S = 300.0
MESSAGE_BYTES_MAX = 32 << 20
TOOL_PAGES_MAX = 100
READY_TIMEOUT_S = START_TIMEOUT_S + 10
"""Seconds that a caller waits for the thread to say whether the server can be used."""
END_TIMEOUT_S = 4.0
"""Seconds that the end of a session waits for a server."""
_EXIT_GRACE_S = 1.0
"""Seconds until a process gets the next harder request to end: the end of its input, SIGTERM, SIGKILL."""
_STDERR_CHARS = 500
_EVENT_END = re.compile(rb"\n\r?\n")
_KEYS = ("type", "command", "args", "env", "cwd", "url", "headers", "prefix", "tools")


@dataclass(frozen=True, kw_only=True)
class Described:
    """A server as the configuration of a host describes it: a command, or the URL of streamable HTTP.

    If `tools` is not empty, only these of its tools become functions. `prefix` precedes their names.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    prefix: str = ""
    tools: tuple[str, ...] = ()


def described(config: Mapping[str, Any]) -> list[Described]:
    """Returns the servers of an entry, or of a whole `mcpServers` object. Raises InvalidRequest."""
    servers = config.get("mcpServers", config.get("servers"))
    if servers is None:
        return [_described("", config)]
    if not isinstance(servers, Mapping):
        raise InvalidRequest("`mcpServers` must be an object: the name of each server, and its description")
    return [_described(str(name), each) for name, each in servers.items()]


def _described(name: str, entry: object) -> Described:
    what = f"the MCP server {name!r}" if name else "the MCP server"
    if not isinstance(entry, Mapping):
        raise InvalidRequest(f'{what} must be described by an object with "command" or "url"')
    if bool(entry.get("command")) == bool(entry.get("url")):
        raise InvalidRequest(f'{what} needs either "command", for a program, or "url", for streamable HTTP')
    if entry.get("type") not in (None, "stdio", "http", "streamable-http", "streamableHttp"):
        raise InvalidRequest(
            f'{what} has the type {entry["type"]!r}; only "stdio" and "http" (streamable) are supported'
        )
    given: dict[str, Any] = {key: entry[key] for key in _KEYS if key != "type" and entry.get(key) is not None}
    for key, value in given.items():
        if key in ("args", "tools"):
            kind, texts = "a list of texts", value
            given[key] = tuple(value) if isinstance(value, list | tuple) else ()
        elif key in ("env", "headers"):
            kind, texts = "an object with texts", list(value.values()) if isinstance(value, Mapping) else None
        else:
            kind, texts = "a text", [value]
        if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
            raise InvalidRequest(f"{key!r} of {what} must be {kind}")
    return Described(name=name or Path(given.get("command", "")).name or given["url"], **given)


class McpServer:
    """A running connection. It ends with `stop`, with this object and with this process."""

    def __init__(self, server: Described) -> None:
        try:
            import mcp  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigurationError("MCP servers need the official SDK: pip install 'remote-executor[mcp]'") from error
        connection = _Connection(server)
        self._server, self._connection = server, connection
        self.functions: Future[dict[str, Tool]] = connection.functions
        self.ended: Future[None] = connection.ended
        self.stop = weakref.finalize(self, connection.stop)
        for each in (self.functions, self.ended):
            each.set_running_or_notify_cancel()  # so that no waiter can cancel it
        connection.thread.start()


class _Connection:
    def __init__(self, server: Described) -> None:
        self.server = server
        self.functions: Future[dict[str, Tool]] = Future()
        self.ended: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name="executor-mcp", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._why = ""
        self._stderr = self._garbage = ""
        self._session: mcp.ClientSession | None = None
        self._pid = os.getpid()

    def stop(self) -> None:
        """Ends the connection. Also runs at the interpreter's exit, since daemon threads are stopped soon after."""
        if os.getpid() != self._pid:
            return  # a forked child, in which the thread is missing
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end, "its session was closed")
        if threading.current_thread() is not self.thread:
            with contextlib.suppress(TimeoutError):
                self.ended.result(END_TIMEOUT_S)

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._over.set()

    # -----------------------------------------------------------------------------------------------------------------
    # In the thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self.ended.set_result(None)

    async def _serve(self) -> None:
        try:
            async with self._connected() as session:
                self._session = session
                tools = await self._answer(self._list(session), START_TIMEOUT_S)
                self.functions.set_result(functions(self.server.name, tools, self.call, self.server.prefix))
                await self._over.wait()
        except BaseException as error:  # noqa: BLE001 - the SDK may raise groups of any errors
            self._end(_cause(error))
            if not self.functions.done():
                refused = next((each for each in (error, *_leaves(error)) if isinstance(each, InvalidRequest)), None)
                self.functions.set_exception(refused or InvalidRequest(self._refusal("could not be used")))

    async def _list(self, session: mcp.ClientSession) -> list[dict[str, Any]]:
        await session.initialize()
        tools: list[dict[str, Any]] = []
        page, wanted = None, self.server.tools
        for _ in range(TOOL_PAGES_MAX):
            listed = (await session.list_tools(page)) if page else await session.list_tools()
            answer = listed.model_dump(by_alias=True, mode="json")
            tools += [each for each in answer["tools"] if not wanted or each["name"] in wanted]
            page = answer.get("nextCursor")
            if len(tools) > TOOLS_MAX:
                raise InvalidRequest(
                    f"the MCP server {self.server.name!r} has more than {TOOLS_MAX} tools, and a session can have no "
                    'more; choose some: "tools": ["name", ...] in its description'
                )
            if not page:
                break
        if missing := set(wanted) - {each["name"] for each in tools}:
            raise InvalidRequest(f"the MCP server {self.server.name!r} has no tool {sorted(missing)[0]!r}")
        return tools

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Calls a tool, from another loop. A cancellation ends the call here; the server may go on."""
        if self._over.is_set():
            raise RuntimeError(self._refusal("can't be called"))
        called = asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)
        try:
            return await asyncio.wrap_future(called)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The end of the connection's loop cancelled the call.
            raise RuntimeError(self._refusal("did not answer")) from None

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        from mcp.shared import exceptions

        refused: type[Exception] = getattr(exceptions, "McpError", None) or vars(exceptions)["MCPError"]
        assert self._session is not None
        try:
            result = await self._answer(self._session.call_tool(name, arguments), CALL_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(
                f"the MCP server did not answer within {CALL_TIMEOUT_S:g} s{self._output_end()}"
            ) from None
        except refused as error:
            raise RuntimeError(str(error)) from None
        answer: dict[str, Any] = result.model_dump(by_alias=True, mode="json")
        return answer

    async def _answer(self, work: Any, timeout_s: float) -> Any:
        """Waits for an answer, or for the end of the connection, which the SDK does not report to each call.

        A cancelled call of the SDK may go on, so it is not waited for.
        """
        answer, over = asyncio.ensure_future(work), asyncio.ensure_future(self._over.wait())
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # marked as seen
        try:
            await asyncio.wait({answer, over}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if over.done():
                raise RuntimeError(self._refusal("did not answer"))
            raise TimeoutError
        finally:
            answer.cancel()
            over.cancel()

    def _refusal(self, what: str) -> str:
        return f"the MCP server {self.server.name!r} {what}: {self._why}{self._output_end()}"

    def _output_end(self) -> str:
        stderr_end = " ".join(self._stderr.split())[-_STDERR_CHARS:]
        stderr = f"; its stderr ends: {stderr_end}" if stderr_end else ""
        return (f"; its stdout has text that is no message: {self._garbage[:200]!r}" if self._garbage else "") + stderr

    # -----------------------------------------------------------------------------------------------------------------
    # Transports

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[mcp.ClientSession]:
        import mcp

        transport = self._process() if self.server.command else self._http()
        async with transport as (read, write), mcp.ClientSession(read, write) as session:
            yield session

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        # A compressed answer could be a thousand times as large as what was received.
        headers = {**self.server.headers, "Accept-Encoding": "identity"}
        async with create_mcp_http_client(headers=headers) as client:
            client.event_hooks = {"request": [], "response": [self._limit]}
            async with streamable_http_client(self.server.url, http_client=client) as streams:
                yield streams[:2]

    async def _limit(self, response: Any) -> None:
        """Limits the body of an HTTP response, or each of its events: a server may send these for ever."""
        if response.headers.get("content-encoding", "identity") != "identity":
            self._end("it compresses its answers, though asked not to")
            raise RuntimeError(self._why)
        stream, connection = response.stream, self
        is_events = response.headers.get("content-type", "").startswith("text/event-stream")

        class Limited(type(stream)):  # type: ignore[misc]  # httpx checks the class, which is another one in version 2
            def __init__(self) -> None:
                pass

            async def __aiter__(self) -> AsyncIterator[bytes]:
                left = MESSAGE_BYTES_MAX
                async for part in stream:
                    if is_events and _EVENT_END.search(part):
                        left = MESSAGE_BYTES_MAX
                    left -= len(part)
                    if left < 0:
                        connection._end(f"it sent more than {MESSAGE_BYTES_MAX >> 20} MiB in one answer")
                        raise RuntimeError(connection._why)
                    yield part

            async def aclose(self) -> None:
                await stream.aclose()

        response.stream = Limited()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[Any]:
        """Runs the server's command, in a process group of its own, and passes messages as lines."""
        import anyio
        from mcp.client.stdio import get_default_environment

        server = self.server
        try:
            process = await asyncio.create_subprocess_exec(
                server.command,
                *server.args,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=server.cwd,
                env={**get_default_environment(), **server.env},
                start_new_session=True,  # a Ctrl-C in this terminal is for this process
                limit=MESSAGE_BYTES_MAX,
            )
        except OSError as error:
            raise InvalidRequest(f"the MCP server {server.name!r} can't be started: {error}") from error
        to_session, received = anyio.create_memory_object_stream[Any](0)
        sent, from_session = anyio.create_memory_object_stream[Any](0)
        stderr = asyncio.create_task(self._read_stderr(process))
        reading = asyncio.create_task(self._read(process, to_session, stderr))
        tasks = [stderr, reading, asyncio.create_task(_write(process, from_session))]
        try:
            yield received, sent
        finally:
            await _ended(process)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_GRACE_S):
                    await process.communicate()  # asyncio closes a pipe only at its end
            for stream in (to_session, received, sent, from_session):
                stream.close()

    async def _read(self, process: asyncio.subprocess.Process, to_session: Any, stderr: asyncio.Task[None]) -> None:
        from mcp import types
        from mcp.shared.message import SessionMessage

        adapter: Any = getattr(types, "jsonrpc_message_adapter", None)
        parse = types.JSONRPCMessage.model_validate_json if adapter is None else adapter.validate_json
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                try:
                    message = parse(line)
                except ValueError:
                    self._garbage = self._garbage or line[:200].decode(errors="replace").strip()
                    continue
                await to_session.send(SessionMessage(message))
        except ValueError:  # a line over the limit
            self._end(f"it sent a message of more than {MESSAGE_BYTES_MAX >> 20} MiB")
            return
        waiting = asyncio.create_task(process.wait())
        await asyncio.wait([stderr, waiting], timeout=_EXIT_GRACE_S)
        waiting.cancel()
        code = process.returncode
        self._end("it closed its output" if code is None else f"its process ended with exit code {code}")

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(4096):
            self._stderr = (self._stderr + data.decode(errors="replace"))[-4 * _STDERR_CHARS :]


async def _write(process: asyncio.subprocess.Process, from_session: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # `_read` reports the end of the process
        async for each in from_session:
            text = each.message.model_dump_json(by_alias=True, exclude_none=True)
            process.stdin.write(text.encode("utf-8", "backslashreplace") + b"\n")
            await process.stdin.drain()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Ends a process: closes its input, then sends SIGTERM, then SIGKILL. Kills the rest of its process group."""
    assert process.stdin is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_GRACE_S):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number if process.returncode is None else signal.SIGKILL)
    await process.wait()


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]


def _cause(error: BaseException) -> str:
    """Returns the first error of a group, in words."""
    cause = _leaves(error)[0]
    if isinstance(cause, TimeoutError):
        return f"it did not list its tools within {START_TIMEOUT_S:g} s"
    return str(cause) or type(cause).__name__
