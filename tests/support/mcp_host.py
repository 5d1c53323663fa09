"""An MCP host: the official client, which starts `executor mcp` and talks to it over stdin and stdout."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import CallToolResult, LoggingMessageNotificationParams, TextContent

from tests.support.daemon import Daemon
from tests.support.mcp_sdk import client_of, is_error

COMMAND = ["-m", "executor_client.cli"]


def environment(daemon: Daemon) -> dict[str, str]:
    """The environment of a user whose daemon this is."""
    return {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}


def text_of(result: CallToolResult) -> str:
    """All its text, a block after the other."""
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


@dataclass
class McpHost:
    """A connected host. The client runs in a thread of its own, so that tests that are no coroutines can share it."""

    portal: BlockingPortal
    client: Any
    """The client of the SDK, version 2, or what does the same with version 1."""
    errors: TextIO
    logs: list[LoggingMessageNotificationParams] = field(default_factory=list)
    progress: list[tuple[float, str | None]] = field(default_factory=list)

    def call(self, tool: str, **arguments: Any) -> CallToolResult:
        return self.start(tool, **arguments).result()

    def start(self, tool: str, **arguments: Any) -> Future[CallToolResult]:
        """Calls a tool and does not wait; cancelling what this returns cancels the call."""
        self.logs.clear()
        self.progress.clear()
        call = partial(self.client.call_tool, tool, arguments, progress_callback=self._on_progress)
        return self.portal.start_task_soon(call)

    def run(self, code: str, **arguments: Any) -> str:
        """Runs code that must succeed; returns the text."""
        result = self.call("run_python", code=code, **arguments)
        assert not is_error(result), text_of(result)
        return text_of(result)

    def refusal(self, tool: str, **arguments: Any) -> str:
        """The text of a call that must be refused."""
        result = self.call(tool, **arguments)
        assert is_error(result)
        return text_of(result)

    def said_on_stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    async def _on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        self.progress.append((progress, message))

    async def _on_log(self, params: LoggingMessageNotificationParams) -> None:
        self.logs.append(params)


@contextmanager
def connected(env: dict[str, str], *options: str, first: tuple[str, ...] = (), mode: str = "auto") -> Iterator[McpHost]:
    """A host whose server has these options; `first` are those of `executor` itself."""
    parameters = StdioServerParameters(command=sys.executable, args=[*COMMAND, *first, "mcp", *options], env=env)
    hosts: list[McpHost] = []

    async def on_log(params: LoggingMessageNotificationParams) -> None:
        await hosts[0]._on_log(params)

    with tempfile.TemporaryFile("w+") as errors, start_blocking_portal() as portal:
        connecting = client_of(stdio_client(parameters, errlog=errors), mode, on_log)
        with portal.wrap_async_context_manager(connecting) as client:
            hosts.append(McpHost(portal, client, errors))
            yield hosts[0]
