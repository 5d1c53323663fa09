"""The listener in a sandbox that the egress proxy serves: the sandbox's only way out, if it has one.

A socket stays in the network namespace where it was made, even if a process of another namespace accepts connections on
it. So a proxy outside of the sandbox, given the descriptor, can serve programs that reach only their own loopback. Each
sandbox has its own namespace, so the listener itself identifies the sandbox of a connection.
"""

from __future__ import annotations

from .lean import socket

LISTENER_ADDRESS = ("127.0.0.1", 3128)
# Connections that wait for the proxy, also while no daemon runs. A program that opens more has to wait.
_BACKLOG = 128


def make_listener() -> socket.socket:
    """Makes the listener. Call it before any process of the sandbox runs that could take the port.

    Without SO_REUSEPORT no process can share the port later, and executed programs don't inherit the descriptor. A
    forked child has to close it.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(LISTENER_ADDRESS)
    listener.listen(_BACKLOG)
    return listener
