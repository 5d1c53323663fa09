"""The tools of `executor mcp` for a shell, and for edits and searches of files.

`executor_client.aio_computer` does the work, also for the tools of smolagents.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from pydantic import Field

from executor_client._core.computer import TIMEOUT_S, WAIT_S, WAIT_S_MAX
from executor_client._core.terminal import sendable
from executor_client.aio_computer import AsyncComputer
from executor_client.events import LogEvent
from executor_client.mcp.calls import FilePath, SessionName, call, sessions_of
from executor_client.mcp.live import Live
from executor_client.mcp.sdk import CallToolResult, Ctx, text_block, tool_result
from executor_client.mcp.sessions import DEFAULT_NAME

ProcessId = Annotated[str, Field(description="the id that shell has returned")]


async def shell(
    ctx: Ctx,
    command: Annotated[str, Field(description="the command line, such as `python -m pytest -q`")],
    timeout_s: Annotated[
        float, Field(gt=0, allow_inf_nan=False, description="seconds after which it is killed; not for the background")
    ] = TIMEOUT_S,
    background: Annotated[bool, Field(description="start it and return at once, for servers and long work")] = False,
    session: SessionName = DEFAULT_NAME,
) -> str:
    """Run a command with bash in a sandbox; returns its exit code and output, cut in the middle when it is long.

    Every call is a new shell that starts in the working directory: chain with `cd dir && ...`. There is no terminal and
    no input. In the background the command keeps running, and its process id is returned.
    """

    async def work(computer: AsyncComputer, live: Live) -> str:
        if background:
            return await computer.start(command)

        async def show(stream: Any, data: bytes) -> None:
            await live.show(LogEvent(0, stream, data.decode("utf-8", "replace")))

        return await computer.run(command, timeout_s, show)

    async with call(ctx, "shell") as live:
        named = await sessions_of(ctx).get(session, make=True)
        said = await named.use(lambda computer: work(computer, live))
    return sendable("\n".join(filter(None, [said, named.note])))


async def shell_output(
    ctx: Ctx,
    process: ProcessId,
    wait_s: Annotated[float, Field(ge=0, le=WAIT_S_MAX, description="seconds to wait for its end")] = WAIT_S,
    text: Annotated[str | None, Field(description="written to its standard input before")] = None,
    session: SessionName = DEFAULT_NAME,
) -> str:
    """Return the output of a background process, the new part where that is known, and whether it still runs."""
    return await _use(ctx, session, lambda computer: computer.output(process, wait_s, text))


async def shell_kill(ctx: Ctx, process: ProcessId, session: SessionName = DEFAULT_NAME) -> str:
    """Kill a background process with its descendants; returns its last output."""
    return await _use(ctx, session, lambda computer: computer.kill(process))


async def edit_file(
    ctx: Ctx,
    path: FilePath,
    old: Annotated[str, Field(description="the text to replace, exactly as in the file, where it must occur once")],
    new: Annotated[str, Field(description="the replacement")],
    session: SessionName = DEFAULT_NAME,
) -> str:
    """Replace text in a file. It must occur exactly once, including its spaces and line breaks."""
    return await _use(ctx, session, lambda computer: computer.edit_file(path, old, new))


async def search_files(
    ctx: Ctx,
    expression: Annotated[str, Field(description="a regular expression of Python")],
    path: Annotated[str, Field(description="a directory in the working directory; empty for all")] = "",
    pattern: Annotated[str, Field(description="a glob that paths must match, such as *.py; empty for all")] = "",
    session: SessionName = DEFAULT_NAME,
) -> str:
    """Search the text files of a sandbox for a regular expression; returns path, line number and line."""
    return await _use(ctx, session, lambda computer: computer.search_files(expression, path, pattern))


async def read_lines(
    ctx: Ctx, path: str, first_line: int | None, last_line: int | None, session: str
) -> CallToolResult:
    """Returns lines of a file with their numbers: `read_file` with a range."""
    text = await _use(ctx, session, lambda computer: computer.read_file(path, first_line, last_line))
    return tool_result([text_block(text)])


async def _use(ctx: Ctx, session: str, work: Callable[[AsyncComputer], Coroutine[Any, Any, str]]) -> str:
    async with call(ctx):
        named = await sessions_of(ctx).get(session, make=False)
        return sendable(await named.use(work))
