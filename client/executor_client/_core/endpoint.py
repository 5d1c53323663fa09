"""Finds the daemon and the credentials for it: address, token, TLS.

The token is sent only over a Unix socket, the loopback interface or TLS, where others cannot read it. The local
daemon's own token, read from its file, is never sent to another host, nor to another user's Unix socket.

No token is needed where the daemon can identify the caller otherwise: by its certificate, or by the user of a Unix
socket.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from executor_api.tokens import can_be_sent
from executor_client._core.arguments import checks_calls
from executor_client._core.limits import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    KEEPALIVE_TIME_S,
    KEEPALIVE_TIMEOUT_S,
)
from executor_client._core.quiet_grpc import grpc
from executor_client._core.short_repr import ShortRepr
from executor_client.errors import ConfigurationError

ADDRESS_VARIABLE = "EXECUTOR_ADDRESS"
TOKEN_VARIABLE = "EXECUTOR_TOKEN"
STATE_DIR_VARIABLE = "EXECUTOR_STATE_DIR"
TOKEN_BYTES_MAX = 4096
PEM_BYTES_MAX = 1 << 20

DEFAULT_PORT = 50051
_TARGET_SCHEMES = ("dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
_UNIX_SCHEMES = ("unix:", "unix-abstract:")
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
)
# The daemon serves 256 calls at a time on one connection; then gRPC opens another. In an old gRPC, calls wait.
_CONNECTIONS = ("grpc.service_config", '{"connectionScaling": {"maxConnectionsPerSubchannel": 8}}')


@checks_calls
@dataclass(frozen=True)
class TlsConfig(ShortRepr):
    """Paths of PEM files. `ca`: the CAs to trust; None for the public CAs. `cert` and `key`: the client's certificate.

    If the daemon maps the certificate to a tenant, no token is needed.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None


@dataclass(frozen=True)
class Endpoint:
    """A daemon's address and the credentials for it. `repr` does not show the token."""

    address: str
    token: str | None = field(repr=False)
    tls: TlsConfig | None = None
    token_from: str = "token="
    """Where the token comes from, for messages."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [
            # The connection is not shared with other clients: closing the client closes it, and no other client's
            # back-off delays it.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_FIRST_S * 1000)),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", int(BACKOFF_MAX_S * 1000)),
            *_KEEPALIVE,
            _CONNECTIONS,
        ]
        if self.tls is None:
            # Otherwise http_proxy in the environment would send a loopback connection, and the token, to another host.
            options.append(("grpc.enable_http_proxy", 0))
        return options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns gRPC's TLS credentials, None for a plain connection. Raises ConfigurationError for unusable files."""
        if self.tls is None:
            return None
        ca, cert, key = _pem(self.tls.ca), _pem(self.tls.cert), _pem(self.tls.key)
        _check_tls(self.tls)
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    @property
    def why_refused(self) -> str:
        """Explains a rejected caller: which credentials were sent and which to send. The daemon gives no reason."""
        where = f"the daemon at {self.address}"
        if self.token is not None:
            return (
                f"{where} does not accept the token from {self.token_from}: it belongs to another daemon, was revoked, "
                f"or has expired; pass another one (token=..., {TOKEN_VARIABLE}, --token), made by "
                "`executor-server token new`"
            )
        if self.tls is not None and self.tls.cert is not None:
            return (
                f"{where} does not know the client certificate, and no token was sent; add the certificate to its "
                f"policy, or pass a token (token=..., {TOKEN_VARIABLE}, --token)"
            )
        return (
            f"{where} requires a credential, and no token was found: {TOKEN_VARIABLE} is not set, and {state_dir()} "
            f"has none; pass a token (token=..., {TOKEN_VARIABLE}, --token)"
        )


def resolve(address: str | None, token: str | None, tls: TlsConfig | bool | None) -> Endpoint:
    """Finds the daemon by the arguments, the environment, and the local daemon's own files, in that order.

    Raises ConfigurationError when there are no credentials, or when the token would be sent unprotected.
    """
    named = address or os.environ.get(ADDRESS_VARIABLE)
    address = named or f"unix:{state_dir() / 'executor.sock'}"
    _check_form(address)
    tls_config = TlsConfig() if tls is True else (tls or None)
    local = is_local(address)
    if tls_config is None and not local:
        raise ConfigurationError(
            f"{address} is not on this machine, so the token would be sent unprotected; pass tls=True or a TlsConfig"
        )
    token_from = "token=" if token else TOKEN_VARIABLE
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        token_from = str(state_dir() / "token")
        # The user's own daemon requires its token; a daemon at a given Unix socket may identify users by their sockets.
        token = _own_token(address, tls_config, needed=named is None or not address.startswith(_UNIX_SCHEMES))
    if token is not None and not can_be_sent(token):
        raise ConfigurationError("the token has characters that can't be sent; use printable ASCII without spaces")
    return Endpoint(address, token, tls_config, token_from)


def _check_form(address: str) -> None:
    """Raises ConfigurationError for an address that gRPC would take for a host name and fail to resolve."""
    scheme, is_url, rest = address.partition("://")
    if is_url and scheme not in _TARGET_SCHEMES:
        host = rest.partition("/")[0] or "HOST"
        port = "" if _has_port(host) else ":443" if scheme == "https" else f":{DEFAULT_PORT}"
        tls = " with tls=True (--tls)" if scheme == "https" else ""
        raise ConfigurationError(f"{address} is a URL; a daemon's address has no scheme: write {host}{port}{tls}")
    if address.startswith(tuple(f"{each}:" for each in _TARGET_SCHEMES)):
        return
    if not _has_port(address):
        host = f"[{address}]" if address.count(":") > 1 and "]" not in address else address.rstrip(":")
        raise ConfigurationError(
            f"the address {address!r} has no port: write {host}:PORT, most often {host}:{DEFAULT_PORT}, or unix:PATH "
            "for a socket"
        )


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return port.isdecimal() and 0 < int(port) < 1 << 16 and bool(host) and (":" not in host or host.endswith("]"))


def _own_token(address: str, tls: TlsConfig | None, *, needed: bool) -> str | None:
    """Reads the local daemon's token from its file; None if no token is needed and this daemon must not see one.

    A certificate that the caller chose identifies the caller, so a token that happens to exist is not sent as well.
    """
    if tls is not None and tls.cert is not None:
        return None
    if not is_local(address):
        raise ConfigurationError(
            f"no token for {address}: pass token=... or a TlsConfig with cert and key, or set {TOKEN_VARIABLE}"
        )
    if not needed and _is_of_another_user(address):
        return None
    path = state_dir() / "token"
    token = _read_token(path)
    if token is None and needed:
        raise ConfigurationError(
            f"no token: {TOKEN_VARIABLE} is not set, and {path} does not exist because no daemon of this user has run "
            "here; start one with `executor-server serve`, or pass the address and token of another daemon"
        )
    return token


def _is_of_another_user(address: str) -> bool:
    """True when another user's process listens at a Unix socket. An abstract socket could be any user's."""
    if address.startswith("unix-abstract:"):
        return True
    try:
        return Path(address.removeprefix("unix:")).stat().st_uid != os.geteuid()
    except OSError:
        return False  # no process listens, or none that we can reach


def state_dir() -> Path:
    """Returns the directory where a daemon of this user keeps its socket and its token."""
    if own := os.environ.get(STATE_DIR_VARIABLE):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "remote-executor"


def is_local(address: str) -> bool:
    """True when the connection to the address does not leave this machine."""
    return address.startswith(_UNIX_SCHEMES) or is_loopback(_host_of(address))


def _host_of(target: str) -> str:
    """Returns the host in a gRPC target that is no Unix socket."""
    for scheme in ("dns:///", "dns:", "ipv4:", "ipv6:"):
        target = target.removeprefix(scheme)
    host = target.rpartition(":")[0] if target.count(":") == 1 or "]" in target else target
    return host.strip("[]")


def is_loopback(host: str) -> bool:
    """True for "localhost" and for addresses of this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(path: Path) -> str | None:
    """Reads a token file; None if it is missing. Raises ConfigurationError for an untrusted file."""
    try:
        # Not blocking: the path could be a pipe that no process writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be read: {error.strerror}") from error
    try:
        # Checked on the open file, not on the path, which could be exchanged in between.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            raise ConfigurationError(f"the token file {path} is not a regular file of yours")
        if status.st_mode & 0o077:
            raise ConfigurationError(f"the token file {path} can be read by others: chmod 600 it and make a new token")
        token = os.read(descriptor, TOKEN_BYTES_MAX + 1).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    if not token or len(token) > TOKEN_BYTES_MAX:
        raise ConfigurationError(f"the token file {path} holds no token")
    return token


def _pem(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            pem = file.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"the TLS file {path} cannot be read: {error.strerror}") from error
    if len(pem) > PEM_BYTES_MAX:
        raise ConfigurationError(f"the TLS file {path} has more than {PEM_BYTES_MAX:,} bytes")
    return pem


def _check_tls(tls: TlsConfig) -> None:
    """Loads the files once: gRPC takes any bytes, and then fails at each handshake without a reason."""
    if (tls.cert is None) != (tls.key is None):
        raise ConfigurationError("a certificate needs its key: set both cert and key of the TlsConfig")
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.ca is not None:
            trial.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"the TLS file {tls.ca} holds no certificate in PEM form: {error}") from error
    try:
        if tls.cert is not None:
            trial.load_cert_chain(
                tls.cert, tls.key, password=""
            )  # without a callback OpenSSL would ask at the terminal
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"the TLS files {tls.cert} and {tls.key} are not a certificate and its key in PEM form without a "
            f"passphrase: {error}"
        ) from error
