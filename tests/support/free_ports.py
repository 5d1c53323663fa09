"""Ports of the loopback interface for servers whose address has to be known before they listen."""

from __future__ import annotations

import secrets
import socket

# Below what the kernel hands out itself (ip_local_port_range), to connections of other tests as well, before the server
# listens, or while a test has killed it.
_FIRST_PORT, _PORTS = 16_000, 16_000


def free_port() -> int:
    """Returns a port that no process had a moment ago."""
    while True:
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
