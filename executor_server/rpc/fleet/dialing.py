"""Dials nodes: learns from its certificate which node answers at an address, and opens a channel to that one.

An address says nothing about the node behind it: pods get another one at each start, and the name in DNS is that of all
of them. So one TLS handshake asks who is there, and gRPC's own connection, whose calls carry the names of clients, is
then made to this name only: if another node, or anybody else, has the address by then, it does not come about.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509

from executor_server.core import TcpAddress
from executor_server.fleet import Credentials, Member, member_in

DIAL_TIME_S = 3.0
"""Seconds for a TCP connection and its handshake."""
MAX_NODE_MESSAGE_BYTES = 32 * 1024 * 1024
"""Bytes of one answer of a node: a full report, or the sessions of all tenants there."""
MAX_NODE_METADATA_BYTES = 16 * 1024
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0


class DialError(Exception):
    """No member of the fleet answers there; the message says why, for an operator."""


@dataclass(frozen=True)
class Dialer:
    """Opens connections with the front's certificate."""

    credentials: Credentials
    context: ssl.SSLContext

    @classmethod
    def of(cls, credentials: Credentials) -> Dialer:
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=credentials.authority.decode("ascii"))
        context.check_hostname = False  # the name is what we ask for; the authority signs nothing but a fleet's members
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])  # a gRPC server ends a handshake that does not offer it
        # The standard library reads a key from a file only; it is private, and gone at the end of the block.
        with tempfile.TemporaryDirectory() as directory:
            pem = Path(directory) / "front.pem"
            pem.touch(mode=0o600)
            pem.write_bytes(credentials.key + credentials.certificate)
            context.load_cert_chain(pem)
        return cls(credentials, context)

    async def member_at(self, address: TcpAddress) -> Member:
        """Returns the node that answers there, by its certificate. Raises DialError."""
        try:
            async with asyncio.timeout(DIAL_TIME_S):
                _, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=self.context, server_hostname=""
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            raise DialError(f"{address}: {_why(error)}") from error
        # Not closed in order: a peer that takes its time with its goodbye would cost us that.
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        member = member_in(x509.load_der_x509_certificate(shown)) if shown else None
        if member is None or member.role != "node":
            raise DialError(f"{address}: the certificate there is not that of a node")
        return member

    def channel(self, address: TcpAddress, member: Member) -> grpc.aio.Channel:
        """Returns a channel that connects to this node at this address, and to no other peer."""
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self.credentials.authority,
            private_key=self.credentials.key,
            certificate_chain=self.credentials.certificate,
        )
        return grpc.aio.secure_channel(str(address), credentials, options=_options(member))


def _options(member: Member) -> Sequence[tuple[str, str | int]]:
    return (
        ("grpc.ssl_target_name_override", member.name),
        # A connection of its own: another channel's state must not hold this one back, nor end with it.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # a call that may have had an effect is ours to repeat
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(DIAL_TIME_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.max_receive_message_length", MAX_NODE_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_NODE_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_NODE_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_NODE_METADATA_BYTES),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {DIAL_TIME_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of this fleet: {error.verify_message}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
