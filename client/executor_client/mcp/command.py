"""`executor mcp` on the command line. Nothing here needs the SDK until the command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from executor_client._convert import limits_to_wire
from executor_client._endpoint import TlsConfig, resolve
from executor_client._terminal import Console
from executor_client.mcp.host_input import relay_stdin

SESSIONS_MAX = 4
RECONNECT_TIMEOUT_S = 20.0
"""How long a call waits for a daemon that has gone: hosts give up on a call after a minute, without a reason."""

DESCRIPTION = """\
Serve sandboxed Python to an MCP host (an assistant, an editor, an agent), which starts this command and talks to it
over stdin and stdout. docs/mcp.md shows the entry for a host's configuration.
"""
NO_SDK = "the MCP server needs the official SDK: pip install 'remote-executor[mcp]'"


def add_parser(commands: Any) -> None:
    """Adds the command to those of `executor`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "mcp", help="serve sandboxed Python to an MCP host, over stdin and stdout", description=DESCRIPTION
    )
    parser.add_argument("--image", help="the sandboxes' image (default: the policy's)")
    parser.add_argument(
        "--authorized-imports",
        "--imports",
        type=_names,
        default=(),
        metavar="A,B",
        help="more modules to authorize: numpy.*,os.path",
    )
    parser.add_argument(
        "--limit",
        type=_limit,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit of each session, such as wall_time_s=30 or memory_bytes=500000000; can be repeated",
    )
    parser.add_argument(
        "--max-sessions",
        type=_positive,
        default=SESSIONS_MAX,
        metavar="N",
        help="how many sessions the host may have at a time (default: %(default)s)",
    )
    parser.set_defaults(serve=serve)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _limit(text: str) -> tuple[str, float | int]:
    name, _, value = text.partition("=")
    number: float | int
    try:
        number = int(value)
    except ValueError:
        number = float(value)
    return name, number


def serve(options: argparse.Namespace, tls: TlsConfig | None, console: Console) -> int:
    """Serves until the host closes its side or a signal asks to stop. Returns the exit code.

    Raises ConfigurationError and InvalidRequest for what no daemon could be asked.
    """
    limits = dict(options.limit) or None
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
        console.fail("the MCP host is talked to over stdin and stdout, and one of them is closed")
        return 2
    request = SessionRequest(options.image, options.authorized_imports, limits)
    if sys.stdin.isatty():
        console.remark("waiting for an MCP host on stdin; docs/mcp.md shows how one starts this command")
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
            # Else the SDK, when it is the output that broke, waits for the end of an input that may never come.
            end_input()

    server = make_server(connect, request, sessions_max=options.max_sessions)
    exit_code = 0
    try:
        server.run("stdio")
    except* BrokenPipeError:
        exit_code = 1  # the host has gone without closing its side first; the sessions are ended all the same
    return exit_code
