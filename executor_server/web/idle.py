"""Closes connections without requests, so that no client can use up all connections.

granian limits the time for the head of a request of HTTP/1.1. It waits for ever for the first bytes of a connection
that may become HTTP/2, for a handshake of TLS, and for requests on a connection of HTTP/2. It has no list of its
connections either. The kernel has one: they are sockets of this process whose own port is the one that the server
listens on. Applications report which of them have requests. A request ends there once its answer is in buffers, so a
late connection stays while its peer still reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from starlette.types import Scope

FIRST_REQUEST_S = 15.0
"""Seconds for the first request of a connection, the handshake of TLS included."""
IDLE_S = 120.0
"""Seconds between two requests of a connection. Clients keep unused ones for up to 90."""
SCANS = 3
"""Scans during `FIRST_REQUEST_S`."""

_BYTES_ACKED_AT, _TCP_INFO_BYTES = 120, 128  # tcpi_bytes_acked of struct tcp_info (linux/tcp.h), from Linux 4.1 on

Peer = tuple[str, int]


class IdleConnections:
    """The connections of a server at `port`; one object for the process."""

    def __init__(self, port: int, *, first_request_s: float = FIRST_REQUEST_S, idle_s: float = IDLE_S) -> None:
        self._port = port
        self._first_request_s, self._idle_s = first_request_s, idle_s
        self._running: Counter[Peer] = Counter()
        self._until: dict[Peer, float] = {}  # monotonic: when a connection without a request is closed
        self._received: dict[Peer, int] = {}  # bytes that a late peer, which still read its answer, had received

    @contextlib.contextmanager
    def request(self, scope: Scope) -> Iterator[None]:
        """Wraps a request, or a WebSocket: its connection stays open."""
        peer = _peer(*scope["client"])
        self._running[peer] += 1
        try:
            yield
        finally:
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
                self._until[peer] = time.monotonic() + self._idle_s

    async def close_late(self) -> None:
        """Closes late connections until it is cancelled."""
        while True:
            await asyncio.sleep(self._first_request_s / SCANS)
            now = time.monotonic()
            late = [peer for peer, until in self._until.items() if until <= now and peer not in self._running]
            found = await asyncio.to_thread(_scan, self._port, {peer: self._received.get(peer, 0) for peer in late})
            for peer in found.keys() & late:
                self._until[peer], self._received[peer] = now + self._idle_s, found[peer]
            self._until = {peer: self._until.get(peer, now + self._first_request_s) for peer in found}
            self._received = {peer: received for peer, received in self._received.items() if peer in found}


def _scan(port: int, late: Mapping[Peer, int]) -> dict[Peer, int]:
    """Shuts down late connections to this process's port, unless the peer has received more than the given bytes.

    Returns the peers of the others, with the bytes that late ones have received.
    """
    peers: dict[Peer, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or the listener, which has no peer
            if not str(entry.readlink()).startswith("socket:"):
                continue
            # A duplicate: the number may become another connection's while this one is examined.
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
                    continue
                peer = _peer(*connection.getpeername()[:2])
                received = _received(connection) if peer in late else 0
                if peer in late and received <= late[peer]:
                    connection.shutdown(socket.SHUT_RDWR)
                else:
                    peers[peer] = received
    return peers


def _received(connection: socket.socket) -> int:
    """Returns how many bytes the peer has received; 0 if nothing is left that it could receive."""
    (waiting,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return struct.unpack_from("Q", info, _BYTES_ACKED_AT)[0] if waiting and len(info) == _TCP_INFO_BYTES else 0


def _peer(host: str, port: int | str) -> Peer:
    """Returns one form of an address: for a listener of both versions, IPv4 ones can be written as IPv6."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), int(port)  # granian passes a string
