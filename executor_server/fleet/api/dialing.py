"""Dials nodes: identifies the node at an address by its certificate, and opens a channel to that node.

An address does not identify a node: pods get another one at each start, and they share a DNS name. So a TLS handshake
first finds out which node is there. gRPC then connects to this name only; the connection fails if another node, or
anybody else, has the address by then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import structlog
from cryptography import x509

from executor_server.core import TcpAddress
from executor_server.fleet.api.wire import MAX_REPORT_BYTES
from executor_server.fleet.membership import (
    CERTIFICATE_NAME,
    KEY_NAME,
    CertificateError,
    Credentials,
    Member,
    member_in,
    read_credentials,
)

DIAL_TIME_S = 1.0
"""Seconds for a TCP connection and its handshake: after a path was cut, the next attempt must come soon."""
MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""Bytes of one answer of a node, which may list the sessions of all tenants there."""
MAX_REQUEST_BYTES = 32 * 1024 * 1024
"""Bytes of one message to a node: the policy with its lock files, or a client's."""
MAX_NODE_METADATA_BYTES = 16 * 1024
EXPIRY_WARNING = timedelta(days=30)
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0


_log = structlog.get_logger(__name__)


class DialError(Exception):
    """No member of the fleet answers there; the message says why, for an operator."""


@dataclass(frozen=True)
class Dialer:
    """Opens connections with the front's certificate."""

    credentials: Credentials
    context: ssl.SSLContext

    @classmethod
    def of(cls, credentials: Credentials, folder: Path) -> Dialer:
        """Returns a dialer that shows this certificate, which was read from the folder."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=credentials.authority.decode("ascii"))
        context.check_hostname = False  # the name is what we want to learn; the CA signs members of the fleet only
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["h2"])  # a gRPC server ends a handshake that does not offer it
        context.load_cert_chain(folder / CERTIFICATE_NAME, folder / KEY_NAME)  # the standard library takes files only
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
        # Aborted below: an orderly TLS close would wait for a slow peer.
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        member = member_in(x509.load_der_x509_certificate(shown)) if shown else None
        if member is None or member.role != "node":
            raise DialError(f"{address}: the certificate there is not that of a node")
        return member

    def link_channel(self, address: TcpAddress, member: Member) -> grpc.aio.Channel:
        """Returns a channel for the link alone, to this node at this address and to no other peer."""
        return self._channel(address, member, MAX_REPORT_BYTES)

    def channel(self, address: TcpAddress, member: Member) -> grpc.aio.Channel:
        """Returns a channel for calls, to this node at this address and to no other peer."""
        return self._channel(address, member, MAX_ANSWER_BYTES)

    def _channel(self, address: TcpAddress, member: Member, max_receive_bytes: int) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self.credentials.authority,
            private_key=self.credentials.key,
            certificate_chain=self.credentials.certificate,
        )
        return grpc.aio.secure_channel(str(address), credentials, options=_options(member, max_receive_bytes))


class Dialers:
    """The dialer with the certificate that is in the front's folder now: a renewed one is used without a restart."""

    def __init__(self, folder: Path) -> None:
        """Reads the folder. Raises CertificateError."""
        self._folder = folder
        self._seen = self._versions()
        self._current = self._read()

    def current(self) -> Dialer:
        """Returns the current dialer; the previous one while the folder can't be used."""
        versions = self._versions()
        if versions != self._seen:
            self._seen = versions
            try:
                self._current = self._read()
                _log.info("fleet_certificate_renewed", until=str(self._current.credentials.expire_time))
            except CertificateError as error:
                _log.error("fleet_certificate_refused", problem=str(error))
        return self._current

    def _read(self) -> Dialer:
        credentials = read_credentials(self._folder, "front")
        left = credentials.expire_time - datetime.now(UTC)
        if left < EXPIRY_WARNING:
            _log.warning("fleet_certificate_expires", days=left.days, remedy="executor-server fleet init")
        return Dialer.of(credentials, self._folder)

    def _versions(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in sorted(self._folder.iterdir()))
        except OSError:
            return ()


def _options(member: Member, max_receive_bytes: int) -> Sequence[tuple[str, str | int]]:
    return (
        ("grpc.ssl_target_name_override", member.name),
        # A separate connection: the state of another channel must neither delay this one nor end it.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # we decide whether to repeat a call that may have had an effect
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(DIAL_TIME_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
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
