"""Where the daemon is and how to prove who we are: address, token, TLS.

The token never travels where others could read it: only over a Unix socket, the loopback interface or TLS. And the
local daemon's own token, found in its file, is never sent to any other host.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from executor_client._limits import BACKOFF_FIRST_S, BACKOFF_MAX_S, KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S
from executor_client.errors import ConfigurationError

ADDRESS_VARIABLE = "EXECUTOR_ADDRESS"
TOKEN_VARIABLE = "EXECUTOR_TOKEN"
STATE_DIR_VARIABLE = "EXECUTOR_STATE_DIR"
TOKEN_BYTES_MAX = 4096


@dataclass(frozen=True)
class TlsConfig:
    """PEM files. `ca`: whom to trust, the public authorities when None. `cert` and `key`: our own certificate."""

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None


@dataclass(frozen=True)
class Endpoint:
    """A daemon's address and our credentials for it. The token is kept out of repr."""

    address: str
    token: str = field(repr=False)
    tls: TlsConfig | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    @property
    def options(self) -> list[tuple[str, int]]:
        options = [
            # A connection of one's own: closing the client closes it, and no other client's back-off delays it.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_FIRST_S * 1000)),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", int(BACKOFF_MAX_S * 1000)),
            ("grpc.keepalive_time_ms", KEEPALIVE_TIME_S * 1000),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ]
        if self.tls is None:
            # Otherwise http_proxy in the environment would carry a loopback connection, and the token, elsewhere.
            options.append(("grpc.enable_http_proxy", 0))
        return options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, None for a plain connection."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_pem(self.tls.ca), private_key=_pem(self.tls.key), certificate_chain=_pem(self.tls.cert)
        )


def resolve(address: str | None, token: str | None, tls: TlsConfig | bool | None) -> Endpoint:
    """Finds the daemon from what was given, the environment, and the local daemon's own files, in that order.

    Raises ConfigurationError when there is no token, or it would travel unprotected.
    """
    address = address or os.environ.get(ADDRESS_VARIABLE) or f"unix:{state_dir() / 'executor.sock'}"
    tls_config = TlsConfig() if tls is True else (tls or None)
    local = is_local(address)
    if tls_config is None and not local:
        raise ConfigurationError(
            f"{address} is not on this machine: the token would travel unprotected. Give tls=True or a TlsConfig"
        )
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        if not local:
            raise ConfigurationError(f"no token for {address}: give token=... or set {TOKEN_VARIABLE}")
        token = _read_token(state_dir() / "token")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigurationError("the token has characters that cannot be sent: printable ASCII without spaces only")
    return Endpoint(address, token, tls_config)


def state_dir() -> Path:
    """The directory where a daemon of this user keeps its socket and its token."""
    if own := os.environ.get(STATE_DIR_VARIABLE):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "remote-executor"


def is_local(address: str) -> bool:
    """Whether nobody outside this machine is on the way to the address."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    target = address.removeprefix("dns:///").removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:")
    host = target.rpartition(":")[0] if target.count(":") == 1 or "]" in target else target
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_token(path: Path) -> str:
    try:
        # Not blocking: in the place of the file there could be a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigurationError(
            f"no token: {TOKEN_VARIABLE} is not set and {path} does not exist. `executor-server serve` makes it"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the token file {path} cannot be read: {error.strerror}") from error
    try:
        # Asked of the open file, not of the path: nobody can exchange it in between.
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
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the TLS file {path} cannot be read: {error.strerror}") from error
