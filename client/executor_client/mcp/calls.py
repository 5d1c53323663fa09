"""The common parts of the tools: their sessions, and the daemon's refusals as errors for a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated

from pydantic import Field

from executor_client.errors import ExecutorClientError
from executor_client.mcp.live import Live
from executor_client.mcp.sdk import Ctx, ToolError
from executor_client.mcp.sessions import SessionRefused, Sessions

SessionName = Annotated[str, Field(description="which sandbox; a new name creates another one, with its own variables")]
FilePath = Annotated[str, Field(description="relative to the sandbox's working directory")]


def sessions_of(ctx: Ctx) -> Sessions:
    find: Callable[[], Sessions] = ctx.request_context.lifespan_context
    return find()


@asynccontextmanager
async def call(ctx: Ctx, tool: str = "") -> AsyncIterator[Live]:
    """Wraps a call's requests to the daemon: shows waits to the host, and turns refusals into ToolErrors."""
    async with Live(ctx, tool) as live:
        try:
            yield live
        except ExecutorClientError as error:
            raise ToolError(error.message) from error
        except SessionRefused as refused:
            raise ToolError(str(refused)) from refused
