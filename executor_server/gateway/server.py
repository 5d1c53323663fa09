"""The gateway as a process: from the configuration to an application that listens, until a signal stops it."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys

from granian.constants import HTTPModes
from granian.http import HTTP2Settings
from granian.server.embed import Server

from executor_client import TlsConfig
from executor_client.aio import AsyncExecutorClient
from executor_server import web
from executor_server.core import TcpAddress
from executor_server.core.config import Config, GatewaySection, StateDir
from executor_server.gateway.clients import Clients
from executor_server.gateway.connect import connect_app
from executor_server.gateway.e2b.envd_app import envd_app
from executor_server.gateway.e2b.interpreter import interpreter_app
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.e2b.sandboxes import rest_app
from executor_server.gateway.ports import ports_app
from executor_server.gateway.routing import ENVD_PORT, INTERPRETER_PORT, Applications, Router
from executor_server.web import IdleConnections

CONNECTIONS_MAX = 4096
"""Fewer if the process may not open four files for each."""
STREAMS_MAX = 256
"""Requests at a time on one connection of HTTP/2."""
HEAD_BYTES_MAX = 64 * 1024
PING_INTERVAL_MS = 30_000
"""Milliseconds between two pings on a connection of HTTP/2. A peer that does not answer is disconnected."""
RECONNECT_S = 20.0
"""Seconds to wait for a daemon that restarts. Clients of HTTP often give up after 30 or 60, and would see no reason."""
STOP_GRACE_S = 5.0
"""Seconds for running requests to end when the gateway stops. Then they are cut."""


def serve(config: Config) -> None:
    """Serves until SIGTERM or SIGINT. Raises AddressError, StateDirError and StartError."""
    web.run("gateway", config, _serve)


async def _serve(config: Config, state: StateDir, address: TcpAddress) -> None:
    section = config.gateway
    daemon = web.daemon_address(config, section)
    tls = TlsConfig(ca=section.daemon_tls_ca) if web.daemon_needs_tls(section, daemon) else None

    def connect(token: str) -> AsyncExecutorClient:
        return AsyncExecutorClient(daemon, token=token, tls=tls, reconnect_timeout_s=RECONNECT_S)

    idle = IdleConnections(address.port)
    async with (
        Clients(connect) as clients,
        Sandboxes(state.root / "sandboxes.db", clients.of, section.users) as sandboxes,
    ):
        router = Router(_applications(section, clients, sandboxes), clients, idle, section.domain)
        server = _server(section, address, router)
        url = f"{web.scheme(section)}://{address}"
        closing = asyncio.create_task(idle.close_late())
        try:
            await web.until_stopped(server, address, lambda: _announce(url, daemon), lambda: router.stop(STOP_GRACE_S))
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


def _announce(url: str, daemon: str) -> None:
    """Reports to people and to waiting programs that the socket accepts connections."""
    sys.stdout.write(f"executor-server gateway listens on {url}\n")
    sys.stdout.flush()
    if daemon.startswith("unix:") and not _accepts(daemon.removeprefix("unix:")):
        sys.stderr.write(
            f"No daemon listens on {daemon} yet, and requests get status 503. Start it with `executor-server serve` "
            "and the same state directory, or name another one with --daemon.\n"
        )
        sys.stderr.flush()


def _accepts(path: str) -> bool:
    """True if a process listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return True


def _applications(section: GatewaySection, clients: Clients, sandboxes: Sandboxes) -> Applications:
    return Applications(
        connect=connect_app(clients, section.allowed_origins),
        rest=rest_app(section, clients, sandboxes),
        ports={
            ENVD_PORT: envd_app(sandboxes),
            INTERPRETER_PORT: interpreter_app(sandboxes),
        },
        other_ports=ports_app(sandboxes),
    )


def _connections() -> int:
    """Raises the process's limit of open files as far as allowed. Returns how many connections that allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return CONNECTIONS_MAX if most == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, most // 4)


def _server(section: GatewaySection, address: TcpAddress, router: Router) -> Server:
    return web.server(
        section,
        address,
        router,
        http=HTTPModes.auto,
        http2_settings=HTTP2Settings(
            keep_alive_interval=PING_INTERVAL_MS,
            max_concurrent_streams=STREAMS_MAX,
            max_headers_size=HEAD_BYTES_MAX,
        ),
        backlog=_connections(),
    )
