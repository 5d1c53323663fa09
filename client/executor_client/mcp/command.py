"""`executor mcp` as the command line runs it. Nothing here imports the SDK before `serve` has found it installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from executor_client._core.convert import limits_to_wire
from executor_client._core.endpoint import TlsConfig, resolve
from executor_client.cli.console import Console
from executor_client.errors import ConfigurationError
from executor_client.mcp.host_input import relay_stdin

if TYPE_CHECKING:
    from executor_client.aio import AsyncExecutorClient
    from executor_client.mcp.sessions import SessionRequest

RECONNECT_TIMEOUT_S = 20.0
"""Seconds that a call waits for a lost daemon; hosts abort a call after a minute, without a reason."""

_SDK = ("mcp", "mcp_types", "pydantic", "anyio", "starlette", "uvicorn")
NO_SDK = "the MCP server needs the official SDK: pip install 'remote-executor[mcp]'"


def serve(options: argparse.Namespace, tls: TlsConfig | None, console: Console) -> int:
    """Serves until the host closes its side or a signal stops it. Returns the exit code.

    Raises ConfigurationError and InvalidRequest for options that no daemon would accept.
    """
    limits = dict(options.limits) or None
    limits_to_wire(limits)
    if options.http is not None and options.token is not None:
        raise ConfigurationError("with --http each request brings its own token: omit --token")
    # Over HTTP the tokens come later; any will do to check the rest.
    resolve(options.address, options.token if options.http is None else "unknown", tls).credentials()
    try:
        from executor_client.mcp.sessions import SessionRequest

        serve_transport = _serve_stdio if options.http is None else _serve_http
        request = SessionRequest(
            options.image, options.imports, limits, tuple(options.network), tuple(options.packages)
        )
        return serve_transport(options, tls, console, request)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _SDK:
            raise
        console.fail(NO_SDK)
        return 2


def _serve_stdio(options: argparse.Namespace, tls: TlsConfig | None, console: Console, request: SessionRequest) -> int:
    from executor_client.aio import AsyncExecutorClient
    from executor_client.mcp.live import show_wait
    from executor_client.mcp.server import connection_lifespan, make_server

    if sys.stdin is None or sys.stdout is None:
        console.fail("stdin or stdout is closed, and the MCP host needs both")
        return 2
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

    server = make_server(connection_lifespan(connect, request, sessions_max=options.max_sessions), named=False)
    exit_code = 0
    try:
        server.run("stdio")
    except* BrokenPipeError:
        exit_code = 1  # the host exited without closing its side; the sessions have ended anyway
    return exit_code


def _serve_http(options: argparse.Namespace, tls: TlsConfig | None, console: Console, request: SessionRequest) -> int:
    from executor_client.aio import AsyncExecutorClient
    from executor_client.mcp.callers import Callers
    from executor_client.mcp.http import HttpOptions, serve_http
    from executor_client.mcp.live import show_wait

    def connect(token: str) -> AsyncExecutorClient:
        return AsyncExecutorClient(
            options.address, token=token, tls=tls, reconnect_timeout_s=RECONNECT_TIMEOUT_S, on_wait=show_wait
        )

    host, port = options.http
    http = HttpOptions(
        host, port, options.public_url, options.http_cert, options.http_key, options.authorization_server
    )
    callers = Callers(connect, request, sessions_max=options.max_sessions)
    serve_http(http, callers, console.remark)
    return 0
