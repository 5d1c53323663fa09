"""Finds out why no daemon answers, by connecting again without gRPC, whose errors are free text.

Used after a call failed because there was no connection. Each step has a time limit, and no token is sent. The
diagnosis ends a sentence that begins with "no daemon answers at ADDRESS:" and tells what to do. It is None if the
connection works or can't be diagnosed.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor_client._core.endpoint import Endpoint, TlsConfig
from executor_client._core.limits import PROBE_TIMEOUT_S
from executor_client._core.quiet_grpc import grpc

SERVE = "`executor-server serve`"

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex(
    "000000040000000000"
)  # and an empty SETTINGS frame
_FRAME_HEAD_BYTES = 9
_SETTINGS = 4
_ROOTS_VARIABLE = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
# From OpenSSL's x509_vfy.h.
_EXPIRED = 10
_NOT_YET_VALID = 9
_WRONG_NAMES = frozenset((62, 64))

_USE_TLS = "tls=True or tls=TlsConfig(ca=FILE); --tls or --tls-ca FILE on the command line"
_USE_CA = "tls=TlsConfig(ca=FILE), or --tls-ca FILE on the command line"
_USE_CERT = "tls=TlsConfig(cert=FILE, key=FILE), or --tls-cert and --tls-key on the command line"


@dataclass(frozen=True)
class _Place:
    """The socket address to connect to; `host` is the name that the certificate must have."""

    family: socket.AddressFamily
    address: str | tuple[str, int]
    host: str = ""

    def connected(self) -> socket.socket:
        """Connects within the time limit. Raises OSError."""
        if isinstance(self.address, tuple):
            return socket.create_connection(self.address, PROBE_TIMEOUT_S)
        connection = socket.socket(self.family, socket.SOCK_STREAM)
        try:
            connection.settimeout(PROBE_TIMEOUT_S)
            connection.connect(self.address)
        except BaseException:
            connection.close()
            raise
        return connection


def listens(endpoint: Endpoint) -> bool:
    """True when a process listens there, as far as can be found out. Takes microseconds on this host."""
    place = _place_of(endpoint.address)
    if place is None or _uses_proxy(endpoint):
        return False
    try:
        place.connected().close()
    except OSError:
        return False
    return True


def diagnosis(endpoint: Endpoint) -> str | None:
    """Returns the diagnosis within a few times PROBE_TIMEOUT_S. Never raises because of the other end."""
    place = _place_of(endpoint.address)
    if place is None:
        return None
    if _uses_proxy(endpoint):
        return None
    try:
        with place.connected():
            pass
    except OSError as error:
        return _why_not_connected(place, endpoint.address, error)
    if endpoint.tls is None:
        return _why_not_plain(place)
    return _why_not_tls(place, endpoint.tls)


def _uses_proxy(endpoint: Endpoint) -> bool:
    """True when gRPC connects through a proxy, which the functions here do not."""
    return endpoint.tls is not None and any(os.environ.get(name) for name in _PROXY_VARIABLES)


# ---------------------------------------------------------------------------------------------------------------------
# No process listens


def _why_not_connected(place: _Place, address: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {place.host!r} can't be resolved; check the spelling, also in EXECUTOR_ADDRESS"
    if isinstance(error, TimeoutError):
        return f"nothing accepts a connection there within {PROBE_TIMEOUT_S:g} s; check the address and the firewall"
    if isinstance(error, PermissionError):
        return (
            "this user may not use that socket; ask the daemon's operator for `server.peer_socket` or another address"
        )
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        if place.family is socket.AF_UNIX:
            return f"no daemon is running there; start one with {SERVE}, or set another address (EXECUTOR_ADDRESS)"
        return f"nothing listens there; start a daemon with `executor-server serve --listen {address}`"
    return error.strerror or type(error).__name__


# ---------------------------------------------------------------------------------------------------------------------
# A process listens but speaks another protocol


def _why_not_plain(place: _Place) -> str | None:
    if _speaks_http2(place):
        return None
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE  # this only finds out whether it is TLS; nothing is sent
    try:
        with _handshaken(place, unverified):
            return f"it uses TLS, and this client does not; pass {_USE_TLS}"
    except (OSError, ValueError):
        return "the program that listens there is not an executor daemon: it speaks neither gRPC nor TLS"


def _why_not_tls(place: _Place, tls: TlsConfig) -> str | None:
    context = _context(tls)
    try:
        with _handshaken(place, context) as connection:
            return None if _answers_http2(connection) else _why_closed(tls)
    except ssl.SSLCertVerificationError as error:
        return _why_not_trusted(place, tls, error)
    except (OSError, ValueError):
        if _speaks_http2(place):
            return "it does not use TLS, and this client does; omit tls (--tls, --tls-ca …)"
        return _why_closed(tls)


def _why_closed(tls: TlsConfig) -> str:
    if tls.cert is None:
        return f"it closes the TLS connection, probably because it requires a client certificate; pass {_USE_CERT}"
    return "it closes the TLS connection, probably because it does not accept the client certificate (--tls-cert)"


def _why_not_trusted(place: _Place, tls: TlsConfig, error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _WRONG_NAMES:
        names = _names_of(place, tls)
        listed = f" but for {', '.join(names)}" if names else ""
        return (
            f"its certificate is not for the name {place.host!r}{listed}; use a name of the certificate as the address"
        )
    if error.verify_code == _EXPIRED:
        return "its certificate has expired; ask the daemon's operator to renew it (server.tls_cert)"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet; compare the clocks of both machines"
    if tls.ca is None:
        return f"its certificate is not signed by a CA that this client trusts; pass the CA: {_USE_CA}"
    return f"its certificate is not signed by the CA in {tls.ca}; pass the right CA file: {_USE_CA}"


def _names_of(place: _Place, tls: TlsConfig) -> tuple[str, ...]:
    """Returns the first names of a certificate whose authority is trusted."""
    context = _context(tls)
    context.check_hostname = False
    try:
        with _handshaken(place, context) as connection:
            found = (connection.getpeercert() or {}).get("subjectAltName", ())
    except (OSError, ValueError):
        return ()
    return tuple(str(name) for _kind, name in list(found)[:4] if str(name).isprintable())


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


@contextmanager
def _handshaken(place: _Place, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    context.set_alpn_protocols(["h2"])
    with (
        place.connected() as raw,
        context.wrap_socket(raw, server_hostname=place.host or None) as connection,
    ):
        yield connection


def _context(tls: TlsConfig) -> ssl.SSLContext:
    """Returns a context that trusts the same authorities as gRPC. Raises OSError for files that became unreadable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    own_roots = Path(grpc.__file__).parent / "_cython" / "_credentials" / "roots.pem"
    context.load_verify_locations(tls.ca or os.environ.get(_ROOTS_VARIABLE) or own_roots)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key, password="")
    return context


def _speaks_http2(place: _Place) -> bool:
    try:
        with place.connected() as connection:
            return _answers_http2(connection)
    except OSError:
        return False


def _answers_http2(connection: socket.socket) -> bool:
    """True when the answer is the first frame of an HTTP/2 server."""
    try:
        connection.sendall(_HTTP2_PREFACE)
        head = b""
        while len(head) < _FRAME_HEAD_BYTES and (data := connection.recv(_FRAME_HEAD_BYTES - len(head))):
            head += data
    except OSError:
        return False
    return len(head) == _FRAME_HEAD_BYTES and head[3] == _SETTINGS


def _place_of(target: str) -> _Place | None:
    """Returns the socket address of a gRPC target; None for one that only gRPC can resolve."""
    if target.startswith("unix-abstract:"):
        return _Place(socket.AF_UNIX, "\0" + target.removeprefix("unix-abstract:"))
    if target.startswith("unix:"):
        path = target.removeprefix("unix:")
        return _Place(socket.AF_UNIX, path.removeprefix("//") if path.startswith("///") else path)
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        target = target.removeprefix(scheme)
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65_536 or "/" in host or "," in host:
        return None
    if ":" in host and not host.startswith("["):
        return None
    host = host.strip("[]")
    return _Place(socket.AF_UNSPEC, (host, int(port)), host)
