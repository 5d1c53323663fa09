"""`executor mcp` as the command line runs it. Nothing here imports the SDK before `serve` has found it installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from executor_client._core.convert import limits_to_wire
from executor_client._core.endpoint import TlsConfig, resolve
from executor_client.cli.console import Console
from executor_client.mcp.host_input import relay_stdin

RECONNECT_TIMEOUT_S = 20.0
"""Seconds that a call waits for a lost daemon; hosts abort a call after a minute, without a reason."""

NO_SDK = "the MCP server needs the official SDK: pip install 'remote-executor[mcp]'"


def serve(options: argparse.Namespace, tls: TlsConfig | None, console: Console) -> int:
    """Serves until the host closes its side or a signal stops it. Returns the exit code.

    Raises ConfigurationError and InvalidRequest for options that no daemon would accept.
    """
    limits = dict(options.limits) or None
    limits_to_wire(limits)
    resolve(options.address, options.token, tls).credentials()
    try:
        from executor_client.aio import AsyncExecutorClient
        from executor_client.mcp.live import show_wait
        from executor_client.mcp.server import make_server
        from executor_client.mcp.sessions import SessionRequest
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "pydantic", "anyio"):
            raise
        console.fail(NO_SDK)
        return 2
    if sys.stdin is None or sys.stdout is None:
        console.fail("stdin or stdout is closed, and the MCP host needs both")
        return 2
    request = SessionRequest(options.image, options.imports, limits, tuple(options.network), tuple(options.packages))
    if sys.stdin.isatty():
        console.remark("waiting for an MCP host on stdin; see docs/mcp.md for its configuration")
    end_input = relay_stdin(console.fail)

    @asynccontextmanager
    async def connect() -> AsyncIterator[AsyncExecutorClient]:
        try:
            async with AsyncExecutorClient(
                options.address,
                token=options.token,
                tls=tls,
                reconnect_timeout_s=RECONNECT_TIMEOUT_S,
                on_wait=show_wait,
            ) as client:
                yield client
        finally:
            # After broken output the SDK still waits for the end of its input, which the host may never close.
            end_input()

    server = make_server(connect, request, sessions_max=options.max_sessions)
    exit_code = 0
    try:
        server.run("stdio")
    except* BrokenPipeError:
        exit_code = 1  # the host exited without closing its side; the sessions have ended anyway
    return exit_code
