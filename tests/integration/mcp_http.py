"""`executor mcp --http` as a process, and hosts and plain requests that speak to it."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from anyio.from_thread import start_blocking_portal
from mcp.types import LoggingMessageNotificationParams

from tests.support.fork_server import EXECUTOR, popen
from tests.support.mcp_host import McpHost
from tests.support.mcp_sdk import client_of, http_transport

HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
TIMEOUT_S = 60.0


@dataclass
class HttpServer:
    process: subprocess.Popen[str]
    url: str
    verify: Any = True

    def post(self, body: object, token: str | None = None, **headers: str) -> httpx.Response:
        """Sends a body, as JSON unless it is bytes. `_` in the names of headers stands for `-`."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            self.url, content=content, headers=self.headers(token, **headers), timeout=TIMEOUT_S, verify=self.verify
        )

    def headers(self, token: str | None, **headers: str) -> dict[str, str]:
        credential = {} if token is None else {"Authorization": f"Bearer {token}"}
        return {**HEADERS, **credential, **{name.replace("_", "-"): value for name, value in headers.items()}}

    def stop(self) -> str:
        """Stops it by a signal, which must succeed. Returns what it wrote on stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0, said
        return said


def run_python(code: str, session: str = "s") -> dict[str, Any]:
    """The request of a call."""
    params = {"name": "run_python", "arguments": {"code": code, "session": session}}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


@contextmanager
def http_server(env: Mapping[str, str], *options: str, patch: str = "") -> Iterator[HttpServer]:
    """A server at a free port. `patch` is a statement that runs first, with its modules `http` and `callers`."""
    program = (
        "import sys\nfrom executor_client.mcp import callers, http\nfrom executor_client.cli import main\n"
        f"{patch}\nsys.exit(main(sys.argv[1:]))"
    )
    start = (sys.executable, "-c", program) if patch else EXECUTOR
    command = [*start, "mcp", "--http", "127.0.0.1:0", *options]
    with popen(command, env=dict(env), text=True, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.fullmatch(r"\[serving MCP at (https?://)([^/]+)/mcp(?:, listening at (\S+))?\]\n", line)
            assert found is not None, line + process.stderr.read()
            yield HttpServer(process, f"{found[1]}{found[3] or found[2]}/mcp")
        finally:
            process.kill()


@contextmanager
def http_host(url: str, token: str, mode: str = "auto") -> Iterator[McpHost]:
    """The official client, connected over HTTP."""
    hosts: list[McpHost] = []

    async def on_log(params: LoggingMessageNotificationParams) -> None:
        await hosts[0]._on_log(params)

    with start_blocking_portal() as portal:
        connecting = client_of(http_transport(url, token), mode, on_log)
        with portal.wrap_async_context_manager(connecting) as client:
            hosts.append(McpHost(portal, client, io.StringIO()))
            yield hosts[0]
