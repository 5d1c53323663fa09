"""Timed requests with bare sockets, run inside and outside of a sandbox: only the route to the servers differs.

In a sandbox this source is executed as it stands, so it imports the standard library only. Each of its public functions
measures and returns the seconds of each round.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable

PROXY = ("127.0.0.1", 3128)
TIMEOUT_S = 60.0
PATH = "/hello.txt"


class Route:
    """The way to hosts: through the proxy, or to one address that serves them all."""

    def __init__(self, address: str | None = None, ca_file: str | None = None) -> None:
        self._address = address
        self._tls = ssl.create_default_context(cafile=ca_file)

    def tcp(self, host: str, port: int) -> socket.socket:
        """Connects to a host. Raises OSError with the proxy's answer when that refuses it."""
        connection = socket.create_connection((self._address, port) if self._address else PROXY, timeout=TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._address is None:
            connection.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            head, _ = _read_head(connection)
            if head.split(b" ")[1] != b"200":
                connection.close()
                raise OSError(head.decode())
        return connection

    def tls(self, host: str) -> ssl.SSLSocket:
        return self._tls.wrap_socket(self.tcp(host, 443), server_hostname=host)


def new_plain_connections(route: Route, host: str, port: int, rounds: int) -> list[float]:
    """Times a new connection without TLS, with a first word to a server that sends it back."""

    def once() -> None:
        with route.tcp(host, port) as connection:
            connection.sendall(b"echo\nword")
            assert connection.recv(4) == b"word"

    return [_timed(once) for _ in range(rounds)]


def new_connections(route: Route, host: str, rounds: int) -> list[float]:
    """Times a new connection over TLS, with a first request and its answer."""

    def once() -> None:
        with route.tls(host) as connection:
            _request(connection, host)

    return [_timed(once) for _ in range(rounds)]


def round_trips(route: Route, host: str, rounds: int) -> list[float]:
    """Times requests on a connection that stays."""
    with route.tls(host) as connection:
        _request(connection, host)
        return [_timed(lambda: _request(connection, host)) for _ in range(rounds)]


def downloads(route: Route, host: str, port: int, size: int, rounds: int) -> list[float]:
    """Times the bytes that a server without HTTP and without TLS sends."""
    buffer = bytearray(1 << 20)

    def once() -> None:
        received = 0
        with route.tcp(host, port) as connection:
            connection.sendall(b"source %d\n" % size)
            while count := connection.recv_into(buffer):
                received += count
        assert received == size, received

    return [_timed(once) for _ in range(rounds)]


def denials(route: Route, host: str, rounds: int) -> list[float]:
    """Times connections that the proxy refuses, from the first byte to the end of its answer."""

    def once() -> None:
        try:
            route.tcp(host, 443).close()
        except OSError:
            return
        raise AssertionError("it was not refused")

    return [_timed(once) for _ in range(rounds)]


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _request(connection: socket.socket, host: str) -> None:
    connection.sendall(f"GET {PATH} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, body = _read_head(connection)
    assert head.startswith(b"HTTP/1.1 200"), head
    (length,) = (int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(65536)


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """Returns a head, and what came with it."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (data := connection.recv(65536)):
            raise OSError(f"closed after {received!r}")
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body
