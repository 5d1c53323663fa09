"""The gateway as a process: from the configuration to an application that listens, until a signal stops it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

import uvicorn

from executor_client import TlsConfig
from executor_client.aio import AsyncExecutorClient
from executor_client.errors import ConfigurationError
from executor_server.core import AddressError, TcpAddress, UnixAddress, addresses
from executor_server.core.config import Config, GatewaySection, StateDir, claim
from executor_server.gateway.clients import Clients
from executor_server.gateway.connect import connect_app
from executor_server.gateway.e2b.envd_app import envd_app
from executor_server.gateway.e2b.interpreter import interpreter_app
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.e2b.sandboxes import rest_app
from executor_server.gateway.missing import not_there_yet
from executor_server.gateway.routing import ENVD_PORT, INTERPRETER_PORT, Applications, Router

CONNECTIONS_MAX = 2048
STOP_GRACE_S = 10
"""Seconds that running requests have to end when the gateway stops. Then they are cancelled."""


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
    with claim(config.server.state_dir / "gateway") as state, _listener(address) as listener:
        asyncio.run(_serve(config, state, listener))


def _listener(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family)
        # Accepted connections inherit it. asyncio would set it only on sockets of its own, and without it an answer in
        # two parts waits 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise AddressError(f"Can't listen on {address}: {error.strerror}.") from error


async def _serve(config: Config, state: StateDir, listener: socket.socket) -> None:
    section = config.gateway
    daemon = section.daemon or f"unix:{StateDir(config.server.state_dir).socket_path}"
    tls = _tls(daemon, section)

    def connect(token: str) -> AsyncExecutorClient:
        return AsyncExecutorClient(daemon, token=token, tls=tls)

    async with Clients(connect) as clients, Sandboxes(state.root / "sandboxes.db", clients.of) as sandboxes:
        router = Router(_applications(section, clients, sandboxes), clients, section.domain)
        server = uvicorn.Server(_uvicorn(section, router))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when it has stopped
        scheme = "http" if section.tls_cert is None else "https"
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"executor-server gateway listens on {scheme}://{TcpAddress(host, port)}\n")
        sys.stdout.flush()
        await server.serve(sockets=[listener])


def _applications(section: GatewaySection, clients: Clients, sandboxes: Sandboxes) -> Applications:
    return Applications(
        connect=connect_app(clients, section.allowed_origins),
        rest=rest_app(section, clients, sandboxes),
        ports={
            ENVD_PORT: envd_app(sandboxes),
            INTERPRETER_PORT: interpreter_app(sandboxes),
        },
        other_ports=not_there_yet("gateway/ports.py"),
    )


def _tls(daemon: str, section: GatewaySection) -> TlsConfig | None:
    """Returns the TLS of connections to the daemon. None: a plain connection, on this machine."""
    if section.daemon_tls_ca is not None:
        return TlsConfig(ca=section.daemon_tls_ca)
    try:
        found = addresses.parse(daemon)
    except AddressError:
        return TlsConfig()
    return None if isinstance(found, UnixAddress) or found.is_loopback else TlsConfig()


def _uvicorn(section: GatewaySection, router: Router) -> uvicorn.Config:
    config = uvicorn.Config(
        router,
        loop="asyncio",
        http="httptools",
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_GRACE_S,
        ssl_certfile=section.tls_cert,
        ssl_keyfile=section.tls_key,
    )
    try:
        config.load()
    except OSError as error:  # SSLError is one
        raise ConfigurationError(f"{section.tls_cert} and {section.tls_key} can't be used: {error}") from error
    return config
