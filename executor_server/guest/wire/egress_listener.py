"""The listener in a sandbox that the egress proxy serves: the sandbox's only way out, where it has one.

A socket stays in the network namespace that it was made in, also where a process of another one accepts on it. So a
proxy outside of the sandbox, which is given the descriptor, can serve programs that reach nothing but their own
loopback; and as each sandbox has a namespace of its own, the listener itself says which sandbox a connection is from.
"""

from __future__ import annotations

from .lean import socket

LISTENER_ADDRESS = ("127.0.0.1", 3128)
# Connections that wait for the proxy, also while no daemon runs. A program that opens more at once waits itself.
_BACKLOG = 128


def make_listener() -> socket.socket:
    """Makes the listener; to be called before any process runs in the sandbox that could take the port.

    No process can share the port later, as it has no SO_REUSEPORT, and none inherits the descriptor by executing a
    program. A forked child has to close it.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setblocking(False)
    listener.bind(LISTENER_ADDRESS)
    listener.listen(_BACKLOG)
    return listener
