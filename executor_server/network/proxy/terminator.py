"""Terminates TLS for rules with secrets, so that requests can be read, checked, and get their header.

The sandbox sees a certificate of the daemon's own authority, which it trusts; the server is verified against the
system's authorities. In between, h11 parses and writes requests and responses. Everything that leaves was framed here,
so nothing ambiguous reaches the server (exchange.py). Only HTTP/1.1 is offered.
"""

from __future__ import annotations

import asyncio
import ssl

from executor_server.guest.egress import reasons
from executor_server.guest.egress.connection import Connection
from executor_server.guest.egress.endpoint import DeadlinePassed, Endpoint
from executor_server.guest.egress.refusals import Refusal
from executor_server.network.proxy.authority import Authority
from executor_server.network.proxy.exchange import Client, Exchange
from executor_server.network.proxy.secrets import Secrets
from executor_server.network.proxy.server_names import NamedServer
from executor_server.network.proxy.tls import Intake, TlsStream
from executor_server.network.proxy.upstream_servers import Servers

HANDSHAKE_S = 30.0
_CLOSE_S = 2.0
_OLD_TLS = {"UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "WRONG_SSL_VERSION"}


class TlsTerminator:
    """The proxy's Terminator, one for all sessions; the state of a connection is in its tunnel."""

    def __init__(self, authority: Authority, upstream: ssl.SSLContext, secrets: Secrets) -> None:
        """`upstream` is the context for connections to servers, as `upstream_context` makes it."""
        self._authority = authority
        self._upstream = upstream
        self._secrets = secrets

    async def terminate(self, tunnel: Connection) -> None:
        client = Client(await self._accept(tunnel))
        servers = Servers(tunnel, self._upstream)
        try:
            while await Exchange(tunnel, client, servers, self._secrets).run():
                pass
            await client.stream.close(asyncio.get_running_loop().time() + _CLOSE_S)
        except DeadlinePassed as error:
            raise OSError(0, "the peer did not go on in time") from error
        finally:
            servers.close()

    async def _accept(self, tunnel: Connection) -> TlsStream:
        """Does the handshake with the sandbox: the server name must be the name of the CONNECT."""
        tunnel.count_sent(len(tunnel.buffered))
        stream = TlsStream(
            Endpoint(tunnel.client),
            self._authority.context_for(tunnel.target.host),
            server_name=None,
            intake=Intake(tunnel.send_room, tunnel.room_opened, tunnel.count_sent),
            received=tunnel.buffered,
        )
        server = stream.ssl
        assert isinstance(server, NamedServer)
        server.expect(tunnel.target.host, is_address=tunnel.target.is_address)
        try:
            await stream.handshake(asyncio.get_running_loop().time() + HANDSHAKE_S)
        except ssl.SSLError as error:
            raise _refused(tunnel, server, error) from error
        except DeadlinePassed:
            raise Refusal(reasons.SERVER_NAME, f"{tunnel.target} expects TLS, and no handshake came in time") from None
        return stream


def _refused(tunnel: Connection, server: NamedServer, error: ssl.SSLError) -> Refusal | OSError:
    """Returns a refusal of the name or TLS version; an OSError if the client itself broke off the handshake."""
    opening = f"the connection to {tunnel.target} was closed:"
    if server.refusal:
        return Refusal(reasons.SERVER_NAME, f"{opening} {server.refusal}")
    if error.reason in _OLD_TLS:
        return Refusal(reasons.OLD_TLS, f"{opening} it offers no TLS from version 1.2 on")
    if error.reason in ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER"):
        return Refusal(reasons.SERVER_NAME, f"{tunnel.target} expects TLS, and the client sent something else")
    return OSError(0, "the client broke the handshake off")


def upstream_context(ca_file: str | None) -> ssl.SSLContext:
    """Returns the context for connections to servers, which trusts the system's authorities and those of `ca_file`.

    Raises OSError and ssl.SSLError for a file that holds no certificates.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context
