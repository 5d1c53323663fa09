"""The addresses of this host, which connections must not reach: services that trust the host listen there."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
import time
from typing import Union

_SIOCGIFCONF = 0x8912  # linux/sockios.h
_ENTRY_BYTES = 40  # struct ifreq: a name of 16 bytes and a struct sockaddr, padded
_ADDRESS = slice(20, 24)  # in an entry: behind the name, the family and the port
_ENTRIES = (256, 16_384)  # hardly any host has more than the first
_IPV6_TABLE = "/proc/net/if_inet6"
_KEPT_S = 1.0

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


class OwnAddresses:
    """Asks the kernel, at most once a second: containers and tunnels come and go."""

    def __init__(self) -> None:
        self._known: frozenset[Address] = frozenset()
        self._ask_again_at = 0.0

    def __call__(self) -> frozenset[Address]:
        """Raises OSError if the kernel gives no answer. Then nothing may be reached."""
        now = time.monotonic()
        if now >= self._ask_again_at:
            self._known = frozenset(_ipv4() | _ipv6())
            self._ask_again_at = now + _KEPT_S
        return self._known


def _ipv4() -> set[Address]:
    for entries in _ENTRIES:
        table = array.array("B", bytes(_ENTRY_BYTES * entries))
        where, size = table.buffer_info()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            used = struct.unpack("iP", fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", size, where)))[0]
        if used < size:  # a full table may have been cut
            starts = range(0, used, _ENTRY_BYTES)
            return {ipaddress.IPv4Address(table[at : at + _ENTRY_BYTES][_ADDRESS].tobytes()) for at in starts}
    raise OSError(0, f"this host has {_ENTRIES[-1]} addresses or more")


def _ipv6() -> set[Address]:
    try:
        # As bytes: a codec is imported at its first use, and the proxy's user may not find it any more.
        with open(_IPV6_TABLE, "rb") as table:
            lines = table.read().splitlines()
    except FileNotFoundError:  # a kernel without IPv6
        return set()
    return {ipaddress.IPv6Address(int(line.split()[0], 16)) for line in lines}
