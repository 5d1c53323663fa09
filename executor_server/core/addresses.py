"""Addresses to listen on: parsed, checked and prepared before gRPC sees them.

gRPC itself would remove any file at a Unix socket's path, share a port with another process, and listen anywhere.
So a live daemon's socket is found by connecting to it, only a dead one's is removed, and a TCP address other than
loopback is refused unless TLS is configured.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its NUL
PROBE_TIMEOUT_S = 1.0

_TCP = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


class AddressError(Exception):
    """The daemon can't or won't listen there; the message is a sentence that says why."""


@dataclass(frozen=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Only literal addresses and "localhost" count, since the addresses of another name may change."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


Address = UnixAddress | TcpAddress


def checked_with_optional(
    listen: Sequence[str], optional: Set[str], *, has_tls: bool
) -> tuple[tuple[Address, ...], tuple[str, ...]]:
    """Returns the addresses, and a sentence for each `optional` one that can't be used. Raises AddressError."""
    usable: list[Address] = []
    problems: list[str] = []
    for text in listen:
        try:
            address = parse(text)
            check_exposure(address, has_tls=has_tls)
            usable.append(address)
        except AddressError as error:
            if text not in optional or len(listen) == 1:
                raise
            problems.append(str(error))
    return tuple(usable), tuple(problems)


def parse(text: str) -> Address:
    """Raises AddressError."""
    if text.startswith("unix:"):
        return unix_address(Path(text.removeprefix("unix:")))
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise AddressError(f"{text!r} is not an address; write HOST:PORT or unix:/PATH.")
    return TcpAddress(match["host"].strip("[]"), int(match["port"]))


def check_exposure(address: Address, *, has_tls: bool) -> None:
    """Raises AddressError when the network could read tokens and code there."""
    if isinstance(address, TcpAddress) and not address.is_loopback and not has_tls:
        raise AddressError(
            f"{address} is reachable from other machines, and traffic would be unencrypted. Set server.tls_cert and "
            "server.tls_key, or listen on 127.0.0.1 or a Unix socket."
        )


def clear_stale_socket(address: UnixAddress) -> None:
    """Removes the socket of a dead daemon. Raises AddressError if anything else or no directory is there."""
    try:
        found = address.path.lstat()
    except FileNotFoundError as error:
        if not address.path.parent.is_dir():  # gRPC would only say that it failed
            raise AddressError(f"Can't listen on {address}: there is no directory {address.path.parent}.") from error
        return
    except OSError as error:
        raise AddressError(f"Can't listen on {address}: {error.strerror}.") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise AddressError(f"Can't listen on {address}: the path is not a socket; remove it.")
    if _answers(address.path):
        raise AddressError(f"Can't listen on {address}: another process listens there.")
    address.path.unlink(missing_ok=True)


def check_port(address: TcpAddress) -> None:
    """Raises AddressError when the port can't be bound: gRPC gives no reason, and prints to stderr by itself."""
    if not address.port:
        return
    problems = []
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"Can't listen on {address}: {error.strerror}.") from error
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC will: connections in TIME_WAIT do not block the port, a listener does.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            problems.append(error)
    if any(error.errno == errno.EADDRINUSE for error in problems):
        raise AddressError(f"Can't listen on {address}: it is in use; choose another port with --listen.")
    if len(problems) == len(found):
        raise AddressError(f"Can't listen on {address}: {problems[0].strerror}.")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Files created inside lack these rights. The block must not await: other tasks would be affected."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def unix_address(path: Path) -> UnixAddress:
    """Raises AddressError when no socket can be bound at that path."""
    if not path.is_absolute() or ".." in path.parts:
        raise AddressError(f"'unix:{path}' needs an absolute path.")
    try:
        size_bytes = len(str(path).encode())
    except UnicodeEncodeError:
        text = f"The path of the Unix socket {path} is not UTF-8 text; choose another one with --listen or --state-dir."
        raise AddressError(text) from None
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise AddressError(
            f"The path of the Unix socket {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes, which the system can't "
            "bind; choose a shorter one with --listen or --state-dir."
        )
    return UnixAddress(path)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError as error:
            # A full backlog or another user's socket: a process listens, so the socket is not ours to remove.
            raise AddressError(f"Can't listen on unix:{path}: {error.strerror or error}.") from error
        return True
