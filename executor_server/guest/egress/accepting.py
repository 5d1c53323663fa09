"""Accepts from a listener whose other holder may be hostile, without waiting for ever.

Attack. The listener was made inside the sandbox, and a process there has a descriptor of the same open socket.
O_NONBLOCK belongs to the open socket and not to a descriptor. So the other holder can clear it, and take a connection
out of the queue after the loop has seen it and before the accept. The accept would then wait for the next connection,
and all sessions with it. No flag of accept prevents that (those of accept4 are for the new socket), the other holder
can also change a time limit of the socket (SO_RCVTIMEO), and a socket can't be opened again.

So a timer interrupts the call. Its handler makes the listener non-blocking again; then the interpreter repeats the
call, which returns at once. An exception would lose a connection that the kernel has accepted already, and its
descriptor: on a busy host, this process may have to wait for a processor at that moment. The other holder could clear
the flag again and again, so the second interruption of a call raises. A call thus takes at most twice MAX_ACCEPT_S. The
timer repeats, since a signal just before the call does not interrupt it.
A call that was interrupted and accepts nothing counts against its session (session.py). One that gets a connection
within the time does not: a busy host looks the same, and the session's share of the loop bounds such calls.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from typing import Any, Optional

# Fifty times what the call takes on a busy host.
MAX_ACCEPT_S = 0.025
_DO_NOT_LINGER = struct.pack("ii", 0, 0)


class AcceptInterrupted(Exception):
    """The call had to be interrupted, and gave no connection."""


class Acceptor:
    """Accepts for all sessions. It owns the handler of SIGALRM until `close`, so it is made in the main thread. A
    foreign signal goes to the earlier handler."""

    def __init__(self) -> None:
        self._listener: Optional[socket.socket] = None  # during a call
        self._is_interrupted = False
        self._handler_before = signal.signal(signal.SIGALRM, self._interrupt)

    def close(self) -> None:
        if signal.getsignal(signal.SIGALRM) == self._interrupt:
            signal.signal(signal.SIGALRM, self._handler_before)

    def accept(self, listener: socket.socket) -> socket.socket:
        """Accepts a connection. Raises OSError, and AcceptInterrupted after at most twice MAX_ACCEPT_S."""
        self._is_interrupted = False
        timer_before = signal.setitimer(signal.ITIMER_REAL, MAX_ACCEPT_S, MAX_ACCEPT_S)
        try:
            try:
                self._listener = listener
                sock, _ = listener.accept()
            except BlockingIOError:
                if self._is_interrupted:
                    raise AcceptInterrupted from None
                raise
            finally:
                self._listener = None
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer_before)
        try:
            reset_inherited_options(sock)
        except OSError:
            sock.close()
            raise
        return sock

    def _interrupt(self, number: int, frame: Any) -> None:
        if self._listener is not None:
            if self._is_interrupted:
                # Once, and never outside the call's `try`: another signal could interrupt the lines behind it.
                self._listener = None
                raise AcceptInterrupted
            self._is_interrupted = True
            os.set_blocking(self._listener.fileno(), False)
            # Else one long wait for a processor could end with two signals.
            signal.setitimer(signal.ITIMER_REAL, MAX_ACCEPT_S, MAX_ACCEPT_S)
            return
        # The timer that this one replaced, or a late signal of our own.
        if callable(self._handler_before) and signal.getitimer(signal.ITIMER_REAL)[1] != MAX_ACCEPT_S:
            self._handler_before(number, frame)


def reset_inherited_options(sock: socket.socket) -> None:
    """Undoes options that the listener's other holder may have set, where they would cost other sessions.

    On close, Linux waits for the time of SO_LINGER, even if the socket does not block. Sandboxes can't set it under
    their system call filter. Where the proxy has the same filter, this raises OSError, and the connection is closed
    before anything was sent, which does not wait. Other options slow down only the session's own connections.
    """
    lingers, _ = struct.unpack("ii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))
    if lingers:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DO_NOT_LINGER)
