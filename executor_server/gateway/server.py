"""The gateway as a process: from the configuration to an application that listens, until a signal stops it.

It runs on granian, whose HTTP/2 holds back a response if its reader is slow; uvicorn with zttp and hypercorn keep the
whole response in memory. granian parses HTTP with hyper, and waits 30 seconds for the head of a request.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import ssl
import sys

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP2Settings
from granian.server.embed import Server

from executor_client import TlsConfig
from executor_client.aio import AsyncExecutorClient
from executor_client.errors import ConfigurationError
from executor_server.core import AddressError, TcpAddress, UnixAddress, addresses
from executor_server.core.config import AlreadyRunning, Config, GatewaySection, StateDir, StateDirError, claim
from executor_server.gateway.clients import Clients
from executor_server.gateway.connect import connect_app
from executor_server.gateway.e2b.envd_app import envd_app
from executor_server.gateway.e2b.interpreter import interpreter_app
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.e2b.sandboxes import rest_app
from executor_server.gateway.ports import ports_app
from executor_server.gateway.routing import ENVD_PORT, INTERPRETER_PORT, Applications, Router

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
    """Serves until SIGTERM or SIGINT. Raises AddressError, StateDirError and ConfigurationError."""
    section = config.gateway
    address = addresses.parse(section.listen)
    assert isinstance(address, TcpAddress)  # checked by the section
    if not address.is_loopback and section.tls_cert is None:
        raise AddressError(
            f"{address} is reachable from other machines, and tokens would be sent unencrypted. Set gateway.tls_cert "
            "and gateway.tls_key, or listen on 127.0.0.1."
        )
    addresses.check_port(address)  # granian would share the port with another gateway
    try:
        with claim(config.server.state_dir / "gateway") as state:
            asyncio.run(_serve(config, state, address))
    except AlreadyRunning as error:
        raise StateDirError(
            f"Another gateway is running with the state directory {config.server.state_dir}. Stop it, or start this "
            "one with --state-dir for another directory and --daemon for the daemon's address."
        ) from error


async def _serve(config: Config, state: StateDir, address: TcpAddress) -> None:
    section = config.gateway
    daemon = section.daemon or f"unix:{StateDir(config.server.state_dir).socket_path}"
    tls = _tls(daemon, section)

    def connect(token: str) -> AsyncExecutorClient:
        return AsyncExecutorClient(daemon, token=token, tls=tls, reconnect_timeout_s=RECONNECT_S)

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with (
        Clients(connect) as clients,
        Sandboxes(state.root / "sandboxes.db", clients.of, section.users) as sandboxes,
    ):
        router = Router(_applications(section, clients, sandboxes), clients, section.domain)
        server = _server(section, address, router)
        scheme = "http" if section.tls_cert is None else "https"
        server.on_startup(lambda: _announce(f"{scheme}://{address}", daemon))
        serving = asyncio.create_task(server.serve())
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.stop()  # type: ignore[no-untyped-call]
        await router.stop(STOP_GRACE_S)
        await serving


def _announce(url: str, daemon: str) -> None:
    """Tells people, and programs that wait, that the socket accepts connections."""
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


def _tls(daemon: str, section: GatewaySection) -> TlsConfig | None:
    """Returns the TLS of connections to the daemon; None for plain ones, on this machine."""
    if section.daemon_tls_ca is not None:
        return TlsConfig(ca=section.daemon_tls_ca)
    try:
        found = addresses.parse(daemon)
    except AddressError:
        return TlsConfig()
    return None if isinstance(found, UnixAddress) or found.is_loopback else TlsConfig()


def _connections() -> int:
    """Raises the process's limit of open files as far as allowed. Returns how many connections that allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return CONNECTIONS_MAX if most == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, most // 4)


def _server(section: GatewaySection, address: TcpAddress, router: Router) -> Server:
    try:
        return Server(
            router,
            address=socket.gethostbyname(address.host) if ":" not in address.host else address.host,
            port=address.port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            http2_settings=HTTP2Settings(
                keep_alive_interval=PING_INTERVAL_MS,
                max_concurrent_streams=STREAMS_MAX,
                max_headers_size=HEAD_BYTES_MAX,
            ),
            backlog=_connections(),
            log_enabled=False,  # the router logs
            ssl_cert=section.tls_cert,
            ssl_key=section.tls_key,
            ssl_protocol_min=SSLProtocols.tls12,
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{section.tls_cert} and {section.tls_key} can't be used: {error}") from error
