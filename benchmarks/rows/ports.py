"""The cost of a forwarded port: a round trip, and many bytes each way, compared with a direct connection."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.figures import AtLeast, AtMostMore, Figure, Reference, timed

_PORT = 9000
_TRIPS = 300
_BYTES = 100_000_000
_ROUNDS = 5
_PIECE = bytes(262_144)

# Answers a byte with a byte; after a "d" it sends many bytes, and after a "u" it receives as many.
_SERVER = f"""
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while kind := connection.recv(1):
        if kind == b"d":
            for _ in range({_BYTES} // {len(_PIECE)}):
                connection.sendall(bytes({len(_PIECE)}))
        elif kind == b"u":
            left = {_BYTES} // {len(_PIECE)} * {len(_PIECE)}
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b".")
    connection.close()
"""


def forward(bench: Bench) -> Iterator[Figure]:
    """One connection through `session.ports.forward`, and one to the same program on this machine."""
    with ExitStack() as stack:
        session = stack.enter_context(bench.local.cold_session())
        process = session.processes.start(["python3", "-c", _SERVER, str(_PORT)])
        next(iter(process))  # it listens
        listener = stack.enter_context(session.ports.forward(_PORT))
        direct = subprocess.Popen([sys.executable, "-c", _SERVER, "0"], stdout=subprocess.PIPE, text=True)
        stack.callback(direct.wait)
        stack.callback(direct.kill)
        assert direct.stdout is not None
        stack.enter_context(direct.stdout)
        ours = stack.enter_context(_connected(listener.address))
        theirs = stack.enter_context(_connected(("127.0.0.1", int(direct.stdout.readline()))))
        trip_ms, direct_ms = bench.in_turns(
            _TRIPS, lambda: timed(lambda: _trip(ours)), lambda: timed(lambda: _trip(theirs))
        )
        reference = Reference("direct", direct_ms)
        yield Figure("a round trip through a forwarded port", "ms", trip_ms, reference, AtMostMore(1))
        moved, direct_moved = bench.in_turns(_ROUNDS, lambda: _down(ours), lambda: _down(theirs), warm_up=1)
        reference = Reference("direct", direct_moved)
        yield Figure("100 MB from a forwarded port", "MB/s", moved, reference, AtLeast(200))
        moved, direct_moved = bench.in_turns(_ROUNDS, lambda: _up(ours), lambda: _up(theirs), warm_up=1)
        reference = Reference("direct", direct_moved)
        yield Figure("100 MB to a forwarded port", "MB/s", moved, reference, AtLeast(200))


def _connected(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _trip(connection: socket.socket) -> None:
    connection.sendall(b"x")
    assert connection.recv(1) == b"."


def _down(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(b"d")
    total = left = _BYTES // len(_PIECE) * len(_PIECE) + 1
    while left:
        left -= len(connection.recv(1 << 20))
    return total / (time.perf_counter() - start) / 1e6


def _up(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(b"u")
    pieces = _BYTES // len(_PIECE)
    for _ in range(pieces):
        connection.sendall(_PIECE)
    assert connection.recv(1) == b"."
    return pieces * len(_PIECE) / (time.perf_counter() - start) / 1e6
