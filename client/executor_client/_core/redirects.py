"""Decides whether a session is followed to the address of its node, and with which credentials.

A front names the address of the node that has a session, and the calls of the session go there, with the token of the
front. So the address must be one that the token may be sent to:

- From a front at a Unix socket or a loopback address: other loopback addresses, and Unix sockets of this user or of
  root, in a directory where no other user can replace them.
- From a front whose TLS has an authority of the user's own (`TlsConfig.ca`): each host that this authority vouches for;
  of those the hosts below `fleet_domain`, where one is given.
- From a front with a certificate of the public authorities: the front's own host, and hosts below `fleet_domain`, by
  default those below the front's own host. Its siblings may be strangers (`me.github.io`), who have certificates too.

Each other address raises ConfigurationError, and nothing is sent there. An address is a text from the network: only the
forms HOST:PORT, [IPV6]:PORT and unix:/PATH are read, not the other targets that gRPC knows.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import stat
from pathlib import Path

from executor_client._core.endpoint import FLEET_DOMAIN_VARIABLE, Endpoint, host_of, is_local, is_loopback, is_name
from executor_client.errors import ConfigurationError

_ADDRESS_CHARS_MAX = 512
_UNIX = re.compile(r"unix:(?://(?=/))?(/[^\x00-\x1f\x7f]*)")
_TCP = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+)):([0-9]{1,5})", re.ASCII)
# gRPC takes HOST:PORT with one of these names for a target of that scheme.
_SCHEMES = frozenset(
    ("dns", "google-c2p", "google-c2p-experimental", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds")
)
_OWN_AUTHORITIES_MAX = 16


def redirected(front: Endpoint, address: str) -> Endpoint:
    """Returns the endpoint of a node at an address that the front has named. Raises ConfigurationError."""
    if address == front.address:
        return front
    tls = front.tls
    if (found := _UNIX.fullmatch(address)) is not None:
        _check_unix(front, address, Path(found[1]))
        tls = None
    else:
        host, port = _host_and_port(front, address)
        _check_host(front, address, host)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return dataclasses.replace(front, address=address, tls=tls, is_node=True)


def _check_unix(front: Endpoint, address: str, path: Path) -> None:
    if not is_local(front.address):
        raise _refusal(front, address, "a daemon on another machine can't name a socket of this one")
    try:
        directory = path.parent.stat()
        owner = path.stat().st_uid if path.exists() else directory.st_uid
    except OSError as error:
        raise _refusal(front, address, f"that socket can't be examined: {error.strerror}") from error
    users = (os.geteuid(), 0)
    if owner not in users or directory.st_uid not in users:
        raise _refusal(front, address, "that socket is another user's")
    if stat.S_IMODE(directory.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(front, address, "other users can replace that socket: they may write to its directory")


def _check_host(front: Endpoint, address: str, host: str) -> None:
    if is_local(front.address):
        if not is_loopback(host):
            raise _refusal(front, address, "a daemon on this machine may name addresses of this machine only")
        return
    assert front.tls is not None, "resolve() gives TLS to each address of another machine"
    own = host_of(front.address).lower().removesuffix(".")
    if host == own:
        return
    if front.fleet_domain is None and front.tls.ca is not None and not _is_bundle(front.tls.ca):
        return  # the handshake fails unless that authority vouches for the host
    domain = front.fleet_domain or own
    if _is_ip(domain) or not host.endswith(f".{domain}"):
        raise _refusal(
            front, address, f"that is not below {domain}; fleet_domain=... or {FLEET_DOMAIN_VARIABLE} names another"
        )


def _host_and_port(front: Endpoint, address: str) -> tuple[str, int]:
    """Returns the host in lower case, without a trailing dot, and the port."""
    found = _TCP.fullmatch(address.lower()) if len(address) <= _ADDRESS_CHARS_MAX and address.isascii() else None
    port = int(found[3]) if found is not None else 0
    if found is None or not 0 < port < 65_536:
        raise _refusal(front, address, "that is neither HOST:PORT, in ASCII, nor unix:/PATH")
    if found[1] is not None:
        try:
            return str(ipaddress.IPv6Address(found[1])), port
        except ValueError as error:
            raise _refusal(front, address, "that is no address of IPv6") from error
    host = found[2].removesuffix(".")
    if not is_name(host) or host in _SCHEMES:
        raise _refusal(front, address, "that is no name of a host")
    return host, port


def _is_bundle(ca: Path | str) -> bool:
    """True for a file of so many authorities that they are the public ones."""
    try:
        return Path(ca).read_bytes().count(b"-----BEGIN CERTIFICATE-----") > _OWN_AUTHORITIES_MAX
    except OSError:
        return False  # then no connection is made


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _refusal(front: Endpoint, address: str, why: str) -> ConfigurationError:
    shown = ascii(address[:_ADDRESS_CHARS_MAX])
    return ConfigurationError(
        f"the daemon at {front.address} says that the session is at {shown}, where the token is not sent: {why}. "
        "A front can pass the calls on instead (fleet.proxy)"
    )
