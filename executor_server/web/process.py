"""From a section of the configuration to an application that is served with granian, until a signal stops it.

granian was chosen because its HTTP/2 holds back a response if its reader is slow; uvicorn with zttp and hypercorn keep
the whole response in memory. It parses HTTP with hyper, and waits 30 seconds for the head of a request.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

from granian.constants import Interfaces, SSLProtocols
from granian.server.embed import Server
from starlette.types import ASGIApp

from executor_server.core import AddressError, TcpAddress, UnixAddress, addresses
from executor_server.core.config import (
    AlreadyRunning,
    Config,
    ConsoleSection,
    GatewaySection,
    StateDir,
    StateDirError,
    claim,
)

ACCEPT_POLL_S = 0.01
END_S = 2.0
"""Seconds for responses to end when the process stops."""

Section = GatewaySection | ConsoleSection


class StartError(Exception):
    """The process can't start with this configuration; the message is a sentence that says why."""


def run(
    name: Literal["gateway", "console"],
    config: Config,
    serve: Callable[[Config, StateDir, TcpAddress], Coroutine[Any, Any, None]],
) -> None:
    """Runs `serve` with a private directory and the address to listen on, both checked.

    Raises AddressError, StateDirError and StartError.
    """
    section: Section = getattr(config, name)
    address = addresses.parse(section.listen)
    assert isinstance(address, TcpAddress)  # checked by the section
    if not address.is_loopback and section.tls_cert is None:
        raise AddressError(
            f"{address} is reachable from other machines, and what it serves would be sent unencrypted. Set "
            f"{name}.tls_cert and {name}.tls_key, or listen on 127.0.0.1."
        )
    addresses.check_port(address)  # granian would share the port with another process
    try:
        with claim(config.server.state_dir / name) as state:
            asyncio.run(serve(config, state, address))
    except AlreadyRunning as error:
        raise StateDirError(
            f"Another {name} is running with the state directory {config.server.state_dir}. Stop it, or start this "
            "one with --state-dir for another directory and --daemon for the daemon's address."
        ) from error


def server(section: Section, address: TcpAddress, app: ASGIApp, **options: Any) -> Server:
    """Returns a server with granian's `options`. Raises StartError for a certificate or a key that can't be used."""
    try:
        return Server(
            app,
            address=socket.gethostbyname(address.host) if ":" not in address.host else address.host,
            port=address.port,
            interface=Interfaces.ASGINL,
            log_enabled=False,  # the applications log
            ssl_cert=section.tls_cert,
            ssl_key=section.tls_key,
            ssl_protocol_min=SSLProtocols.tls12,
            **options,
        )
    except (OSError, ssl.SSLError) as error:
        raise StartError(f"{section.tls_cert} and {section.tls_key} can't be used: {error}") from error


async def until_stopped(
    server: Server, address: TcpAddress, announce: Callable[[], None], stop: Callable[[], Awaitable[None]]
) -> None:
    """Serves until SIGTERM or SIGINT, then no longer accepts, calls `stop` to end what runs, and waits for its end.

    Calls `announce` once it accepts connections.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(server.serve())
    stopping = asyncio.create_task(stopped.wait())
    announcing = asyncio.create_task(_announce(address, announce))
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    announcing.cancel()
    server.stop()  # type: ignore[no-untyped-call]
    await stop()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await serving


async def _announce(address: TcpAddress, announce: Callable[[], None]) -> None:
    """Waits until the port accepts: granian's hook for its start comes before it listens."""
    while True:
        try:
            _, writer = await asyncio.open_connection(address.host, address.port)
        except OSError:
            await asyncio.sleep(ACCEPT_POLL_S)
        else:
            writer.close()
            return announce()


def scheme(section: Section) -> str:
    return "http" if section.tls_cert is None else "https"


def daemon_address(config: Config, section: Section) -> str:
    return section.daemon or f"unix:{StateDir(config.server.state_dir).socket_path}"


def daemon_needs_tls(section: Section, daemon: str) -> bool:
    """True if the daemon is on another machine, or the configuration has a CA for it. Raises AddressError."""
    found = addresses.parse(daemon)
    return section.daemon_tls_ca is not None or not (isinstance(found, UnixAddress) or found.is_loopback)
