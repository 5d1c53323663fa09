"""Accepting from a listener whose other holder may be hostile, without waiting for ever.

Attack. The listener was made inside the sandbox, and a process there has a descriptor of the same open socket.
O_NONBLOCK belongs to the open socket and not to a descriptor. So the other holder can clear it, and take a connection
out of the queue between the moment in which the loop sees it and the accept. The accept would then wait for the
next connection, and with it all sessions would. No accept takes a flag against that (those of accept4 are for the new
socket), a time limit of the socket (SO_RCVTIMEO) is the other holder's as well, and a socket can't be opened again.

So a timer interrupts the call, by a handler that raises. It repeats, since a first signal that comes just before the
call is entered does not interrupt it. The handler raises once at most, and never outside of the call's `try`: another
signal could otherwise interrupt the lines that put the timer back. What was accepted at the very end of the time is
lost, with its descriptor; a session may cause that as often as it may cause interruptions at all (session.py).
"""

from __future__ import annotations

import signal
import socket
import struct
from typing import Any

# A hundred times what the call takes on a busy host.
MAX_ACCEPT_S = 0.05
_DO_NOT_LINGER = struct.pack("ii", 0, 0)


class AcceptInterrupted(Exception):
    """The call had to be interrupted: the listener blocks, or the process did not run for a while just then."""


class Acceptor:
    """Accepts for all sessions. Has the handler of SIGALRM from when it is made until `close`, so it is made in the
    main thread. A signal that it did not ask for goes to the handler of before."""

    def __init__(self) -> None:
        self._raises = False
        self._handler_before = signal.signal(signal.SIGALRM, self._interrupt)

    def close(self) -> None:
        if signal.getsignal(signal.SIGALRM) == self._interrupt:
            signal.signal(signal.SIGALRM, self._handler_before)

    def accept(self, listener: socket.socket) -> socket.socket:
        """Accepts a connection. Raises OSError, and AcceptInterrupted after MAX_ACCEPT_S."""
        timer_before = signal.setitimer(signal.ITIMER_REAL, MAX_ACCEPT_S, MAX_ACCEPT_S)
        try:
            try:
                self._raises = True
                sock, _ = listener.accept()
            finally:
                self._raises = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer_before)
        try:
            reset_inherited_options(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._raises:
            self._raises = False
            raise AcceptInterrupted
        # The timer that this one took the place of, or a signal of our own that came late.
        if callable(self._handler_before) and signal.getitimer(signal.ITIMER_REAL)[1] != MAX_ACCEPT_S:
            self._handler_before(number, frame)


def reset_inherited_options(sock: socket.socket) -> None:
    """Undoes what the listener's other holder may have set for all connections, where it would cost other sessions.

    Linux waits in close, even of a socket that does not block, for as long as SO_LINGER says. Sandboxes can't set it
    under their system call filter, and the proxy can't either where it has the same one: then this raises OSError, and
    the connection is closed before anything was sent, which does not wait. Other options slow down the session's own
    connections alone.
    """
    lingers, _ = struct.unpack("ii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))
    if lingers:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DO_NOT_LINGER)
