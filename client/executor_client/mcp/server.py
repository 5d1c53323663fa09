"""The tools and resources of `executor mcp`, on the official SDK's server.

The SDK turns a `ToolError` into a result marked as an error, so the model can read the reason of a refusal.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import Field

import executor_client
from executor_client._core.policy_text import policy_lines
from executor_client._core.terminal import aligned
from executor_client.aio import AsyncExecutorClient
from executor_client.events import ExecutionEvent
from executor_client.mcp import computer_tools, sdk
from executor_client.mcp.calls import FilePath, SessionName, call, sessions_of
from executor_client.mcp.content import Transcript, execution_content, file_content
from executor_client.mcp.sdk import CallToolResult, Ctx, ResourceError, ToolAnnotations, ToolError, tool_hints
from executor_client.mcp.sessions import DEFAULT_NAME, ConnectionSessions, SessionRequest, Sessions

FILE_READ_BYTES_MAX = 4 << 20
FILE_WRITE_BYTES_MAX = 8 << 20
FILES_LISTED_MAX = 1_000

INSTRUCTIONS = """\
Runs Python in a sandbox: an isolated, limited interpreter that keeps variables, imports and files from call to call.

run_python runs code and returns the value of a trailing expression, the output, and displayed images and figures
(display(image), plt.show()). Files are in the sandbox's working directory.

shell runs commands in the same sandbox: tests, compilers, git, servers in the background.

{sessions} If a result says that the interpreter
was restarted, define your variables and imports again. If it says that a session is gone, call reset_session.

get_policy lists the modules that can be imported and the limits; list_sessions lists the hosts that a sandbox may
reach. A refused import or connection names the authorized ones.
"""

SESSIONS = 'Calls use the session "default"; another session name creates a separate sandbox.'
NAMED_SESSIONS = """\
Each call names its session. Invent a name at the first call, such as "sales-7f3a", and keep it: other conversations of
the same user have sandboxes, too, and would share one of the same name. An unused sandbox ends after a while."""

READ_ONLY = tool_hints(read_only=True)
DESTROYS = tool_hints(read_only=False)


def make_server(lifespan: Callable[[Any], AbstractAsyncContextManager[Callable[[], Sessions]]], *, named: bool) -> Any:
    """Returns a server. The context manager gives a function that returns the sessions of the running call's caller.

    `named`: each call must name its session, since without a connection no session can be the default.
    """
    tools: dict[sdk.Tool, ToolAnnotations] = {
        run_python: DESTROYS,
        list_files: READ_ONLY,
        read_file: READ_ONLY,
        write_file: DESTROYS,
        computer_tools.edit_file: DESTROYS,
        computer_tools.search_files: READ_ONLY,
        computer_tools.shell: DESTROYS,
        computer_tools.shell_output: DESTROYS,
        computer_tools.shell_kill: DESTROYS,
        list_sessions: READ_ONLY,
        reset_session: DESTROYS,
        close_session: DESTROYS,
        get_policy: READ_ONLY,
    }
    return sdk.make_server(
        name="remote-executor",
        title="Python sandbox",
        version=executor_client.__version__,
        instructions=INSTRUCTIONS.format(sessions=NAMED_SESSIONS if named else SESSIONS),
        tools=[
            (_with_required_session(tool) if named else tool, inspect.cleandoc(tool.__doc__ or ""), hints)
            for tool, hints in tools.items()
        ],
        read_file=file_resource,
        lifespan=lifespan,
    )


def connection_lifespan(
    connect: Callable[[], AbstractAsyncContextManager[AsyncExecutorClient]],
    request: SessionRequest,
    *,
    sessions_max: int,
) -> Callable[[Any], AbstractAsyncContextManager[Callable[[], Sessions]]]:
    """For `make_server`: sessions that live as long as the connection. `connect` is called when it starts."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[Callable[[], Sessions]]:
        async with connect() as client, ConnectionSessions(client, request, sessions_max=sessions_max) as sessions:
            yield lambda: sessions

    return lifespan


def _with_required_session(tool: sdk.Tool) -> sdk.Tool:
    """Returns the tool without the default of its argument `session`."""
    signature = inspect.signature(tool, eval_str=True)

    @functools.wraps(tool)
    async def call(**arguments: Any) -> Any:
        return await tool(**arguments)

    parameters = [
        each.replace(kind=each.KEYWORD_ONLY, default=each.empty if each.name == "session" else each.default)
        for each in signature.parameters.values()
    ]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


# ---------------------------------------------------------------------------------------------------------------------
# Code


async def run_python(
    ctx: Ctx,
    code: Annotated[str, Field(description="Python source; top-level await works")],
    session: SessionName = DEFAULT_NAME,
    timeout_s: Annotated[
        float | None,
        Field(gt=0, allow_inf_nan=False, description="time limit in seconds; default: the policy's"),
    ] = None,
) -> CallToolResult:
    """Run Python code in a sandbox.

    Variables, imports and functions are kept for later calls with the same session. Returns the output, displayed
    images and figures, and the value of a trailing expression; if the code failed, the error and its location.
    """
    transcript = Transcript()

    async def on_event(event: ExecutionEvent) -> None:
        transcript.add(event)
        await live.show(event)

    async with call(ctx, "run_python") as live:
        named = await sessions_of(ctx).get(session, make=True)
        limits = None if timeout_s is None else {"wall_time_s": timeout_s}
        result, replaced = await named.run(code, on_event, limits)
    # In a thread, because formatting a large value and scaling an image take time.
    return await asyncio.to_thread(
        execution_content,
        result,
        transcript,
        code,
        named.session.limits,
        session=session,
        replaced=replaced,
        note=named.note,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Files


async def list_files(
    ctx: Ctx,
    path: Annotated[str, Field(description="a directory in the working directory; empty for all")] = "",
    session: SessionName = DEFAULT_NAME,
) -> str:
    """List the files in a sandbox's working directory, or in a directory of it, recursively."""
    async with call(ctx):
        named = await sessions_of(ctx).get(session, make=False)
        with named.watched() as open_session:
            listed = await open_session.list_files(path)
    lines = [
        f"{file.path!r} (directory)" if file.is_directory else f"{file.path!r} ({file.size_bytes:,} bytes)"
        for file in listed.files[:FILES_LISTED_MAX]
    ]
    if listed.truncated or len(listed) > FILES_LISTED_MAX:
        lines.append("and more")
    return "\n".join(lines) or "no files"


async def read_file(
    ctx: Ctx,
    path: FilePath,
    first_line: Annotated[int | None, Field(ge=1, description="for text: the first line, counted from 1")] = None,
    last_line: Annotated[int | None, Field(ge=1, description="for text: the last line")] = None,
    session: SessionName = DEFAULT_NAME,
) -> CallToolResult:
    """Read a file from a sandbox's working directory: text, an image (PNG, JPEG), or the bytes of anything else.

    The middle of long text is omitted. With first_line or last_line, returns numbered lines.
    """
    if first_line is not None or last_line is not None:
        return await computer_tools.read_lines(ctx, path, first_line, last_line, session)
    async with call(ctx):
        data = await _read(ctx, session, path)
    return await asyncio.to_thread(file_content, session, path, data)


async def write_file(
    ctx: Ctx,
    path: FilePath,
    content: Annotated[str, Field(description="text, or bytes in base64")],
    encoding: Annotated[Literal["utf-8", "base64"], Field(description="base64 for binary content")] = "utf-8",
    session: SessionName = DEFAULT_NAME,
) -> str:
    """Write a file in a sandbox's working directory; replaces an existing file and creates missing directories."""
    data = _bytes_of(content, encoding)
    if len(data) > FILE_WRITE_BYTES_MAX:
        raise ToolError(f"the content has {len(data):,} bytes; at most {FILE_WRITE_BYTES_MAX:,} can be written at once")
    async with call(ctx):
        named = await sessions_of(ctx).get(session, make=True)
        with named.watched() as open_session:
            written = await open_session.put_file(path, data)
    return f"wrote {written.path!r} ({written.size_bytes:,} bytes){named.note and f' {named.note}'}"


def _bytes_of(content: str, encoding: Literal["utf-8", "base64"]) -> bytes:
    try:
        return content.encode() if encoding == "utf-8" else base64.b64decode(content, validate=True)
    except UnicodeEncodeError as error:
        raise ToolError(f"the content can't be encoded as UTF-8: {error.reason}") from error
    except (binascii.Error, ValueError) as error:
        raise ToolError(f"the content is not base64: {error}") from error


async def file_resource(ctx: Ctx, session: str, path: str) -> bytes:
    """Returns a file in a sandbox's working directory, as an MCP resource."""
    try:
        async with call(ctx):
            return await _read(ctx, session, path)
    except ToolError as error:
        raise ResourceError(str(error)) from error


async def _read(ctx: Ctx, session: str, path: str) -> bytes:
    named = await sessions_of(ctx).get(session, make=False)
    with named.watched() as open_session:
        data = await open_session.files.read(path, max_bytes=FILE_READ_BYTES_MAX + 1)
    if len(data) > FILE_READ_BYTES_MAX:
        raise ToolError(f"{path!r} has more than {FILE_READ_BYTES_MAX:,} bytes; read a part of it with run_python")
    return data


# ---------------------------------------------------------------------------------------------------------------------
# Sessions


async def list_sessions(ctx: Ctx) -> str:
    """List your sandboxes with their states."""
    async with call(ctx):
        described = await sessions_of(ctx).described()
    if not described:
        return "no sessions yet; run_python creates one"
    rows: list[tuple[str, ...]] = [("SESSION", "STATE", "PYTHON", "IMAGE", "IMPORTS", "NETWORK")]
    for name, state, info in described:
        cells = ("", "", "", "")
        if info is not None:
            network = ", ".join(info.network) or "none"
            cells = (info.python_version, info.image, ", ".join(info.authorized_imports), network)
        rows.append((name, state, *cells))
    return "\n".join(aligned(rows))


async def reset_session(ctx: Ctx, session: SessionName = DEFAULT_NAME) -> str:
    """End a sandbox with its variables, files and processes, and start an empty one with its name."""
    async with call(ctx):
        await sessions_of(ctx).reset(session)
    return f"the session {session!r} is new and empty"


async def close_session(ctx: Ctx, session: Annotated[str, Field(description="which sandbox")]) -> str:
    """End a sandbox with its variables, files and processes."""
    async with call(ctx):
        await sessions_of(ctx).close(session)
    return f"the session {session!r} was closed"


async def get_policy(ctx: Ctx) -> str:
    """Show what sandboxes may do: imports, limits, images, files, network."""
    async with call(ctx):
        policy = await sessions_of(ctx).policy()
    return "\n".join(policy_lines(policy))
