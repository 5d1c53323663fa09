"""Connects through an upstream proxy, for networks without direct access."""

from __future__ import annotations

import asyncio
import socket
import urllib.parse

import h11

from executor_server.guest.egress.endpoint import Endpoint
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_resolver import HostResolver
from executor_server.guest.egress.protocols import Unresolved

_HEAD_BYTES = 2**14


class UpstreamProxy:
    """Asks an HTTP proxy for a tunnel to the target, by its name.

    The classified address is not used: the upstream proxy resolves names itself, and is trusted.
    """

    def __init__(self, url: str) -> None:
        """`url` is http://HOST:PORT. The administrator chose the host, so its address is not classified."""
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host = parts.hostname
        self._port = parts.port
        self._resolver = HostResolver()

    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        """Returns a socket that leads to the target. Raises OSError and DeadlinePassed."""
        sock = await self._reach(deadline)
        try:
            await _ask(Endpoint(sock), target, deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _reach(self, deadline: float) -> socket.socket:
        try:
            async with asyncio.timeout_at(deadline):
                addresses = await self._resolver.resolve(self._host)
        except (Unresolved, TimeoutError) as error:
            raise OSError(0, "the upstream proxy's name can't be resolved") from error
        failure: OSError | None = None
        for each in addresses:
            family = socket.AF_INET6 if ":" in each else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                await Endpoint(sock).connect((each, self._port), deadline)
                return sock
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise OSError(0, "the upstream proxy can't be reached") from failure


async def _ask(endpoint: Endpoint, target: Target, deadline: float) -> None:
    """Sends CONNECT and reads the head of the answer byte by byte, since the tunnel's bytes follow."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
    request = h11.Request(method="CONNECT", target=str(target), headers=[("Host", str(target))])
    await endpoint.send(connection.send(request) + connection.send(h11.EndOfMessage()), deadline)
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await endpoint.receive(1, deadline))
            elif isinstance(event, h11.Response):
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise OSError(0, "the upstream proxy closed the connection")
    except h11.RemoteProtocolError as error:
        raise OSError(0, "the upstream proxy does not answer in HTTP") from error
    if not 200 <= event.status_code < 300:
        raise OSError(0, f"the upstream proxy refused it with status {event.status_code}")
