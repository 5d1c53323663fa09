"""`python3 GUEST relay SOCKET NONCE`: carries a connection of the daemon between a command's streams and a socket.

Where a sandbox can be reached only by starting commands in a machine of the cloud, each connection of the daemon is
such a command: standard input to the socket, the socket to standard output, as lines of text (lines.py). It runs as
root beside the sandbox, outside of its pid, mount and network namespaces: agent code can neither see nor signal it, and
its memory, in which the daemon's frames are for a moment, needs no other protection.

One thread; nothing in it blocks, and each direction holds a bounded number of bytes: who does not read makes the other
end wait. It ends when either end does, with one of these exit codes:

    0  the guest closed the socket, or another connection has taken its place
    66  nobody listens at the socket (EX_NOINPUT: no code that a shell or Python ends with by itself)
    75  it can't connect for another reason, such as too little memory (EX_TEMPFAIL)
    3  what came on standard input is not a line: nothing of it went on
    4  standard input or output was closed
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time

from .lean import socket
from .lines import LineDecoder, LineError, encode_lines, start_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

SOCKET_CLOSED, BAD_LINE, STREAM_CLOSED = 0, 3, 4
NOBODY_LISTENS, CANNOT_CONNECT = 66, 75

_STDIN, _STDOUT = 0, 1
_READ_BYTES = 64 * 1024
# In each direction, past which no more is read; one reading more may be there, as lines.
_WAITING_BYTES = 256 * 1024
# For what one end has said to reach the other one, when the first one has ended.
_FLUSH_TIME_S = 2.0
_MAX_NONCE_CHARS = 64


def main(arguments: list[str]) -> int:
    """Runs until an end has ended; the exit code."""
    path, nonce = arguments
    if not (nonce.isascii() and nonce.isalnum() and len(nonce) <= _MAX_NONCE_CHARS):
        raise SystemExit("the nonce is not letters and digits")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sys.stderr.write(f"can't connect to {path}: {error.strerror}\n")
        return NOBODY_LISTENS if error.errno in (errno.ECONNREFUSED, errno.ENOENT) else CANNOT_CONNECT
    sock.setblocking(False)
    os.set_blocking(_STDIN, False)
    os.set_blocking(_STDOUT, False)
    return _Relay(sock, nonce).run()


class _Relay:
    def __init__(self, sock: socket.socket, nonce: str) -> None:
        self._sock = sock
        self._guest = sock.fileno()
        self._decoder = LineDecoder()
        self._next_seq = 1
        self._to_guest = bytearray()
        self._to_daemon = bytearray(start_line(nonce))
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        self._exit_code: Optional[int] = None  # once an end has ended

    def run(self) -> int:
        while self._exit_code is None:
            self._turn(None)
        deadline = time.monotonic() + _FLUSH_TIME_S
        while self._has_rest() and (left_s := deadline - time.monotonic()) > 0:
            self._turn(left_s * 1000)
        return self._exit_code

    def _has_rest(self) -> bool:
        """Whether the end that is still there can get something that the other one has said."""
        if self._exit_code == SOCKET_CLOSED:
            return bool(self._to_daemon)
        return self._exit_code == STREAM_CLOSED and bool(self._to_guest)

    def _turn(self, timeout_ms: Optional[float]) -> None:
        self._watch()
        handlers = {_STDIN: self._on_stdin, _STDOUT: self._on_stdout, self._guest: self._on_guest}
        for fd, events in self._poll.poll(timeout_ms):
            try:
                handlers[fd](events)
            except BlockingIOError:
                continue  # somebody else has taken what was ready: these streams may be shared with a shell

    def _watch(self) -> None:
        """Reads from an end only while there is room for what it says.

        What nothing is wanted of is not watched at all: a closed end would wake us for ever, and what it said before
        would still be there to be read.
        """
        reads = self._exit_code is None
        wanted = {
            _STDIN: select.POLLIN if reads and len(self._to_guest) < _WAITING_BYTES else 0,
            _STDOUT: select.POLLOUT if self._to_daemon else 0,
            self._guest: (select.POLLIN if reads and len(self._to_daemon) < _WAITING_BYTES else 0)
            | (select.POLLOUT if self._to_guest else 0),
        }
        for fd, events in wanted.items():
            if events and events != self._watched.get(fd):
                self._poll.register(fd, events)
            elif not events and self._watched.get(fd):
                self._poll.unregister(fd)
        self._watched = wanted

    def _on_stdin(self, _events: int) -> None:
        data = os.read(_STDIN, _READ_BYTES)
        if not data:
            self._end(STREAM_CLOSED)
            return
        try:
            for piece in self._decoder.feed(data):
                self._to_guest += piece
        except LineError as error:
            sys.stderr.write(f"{error}\n")
            self._end(BAD_LINE)

    def _on_stdout(self, _events: int) -> None:
        try:
            del self._to_daemon[: os.write(_STDOUT, self._to_daemon)]
        except BrokenPipeError:
            self._to_daemon.clear()
            self._end(STREAM_CLOSED)

    def _on_guest(self, _events: int) -> None:
        try:
            if self._watched[self._guest] & select.POLLOUT:
                self._write_guest()
            if self._watched[self._guest] & select.POLLIN:
                self._read_guest()
        except (BrokenPipeError, ConnectionResetError):
            self._to_guest.clear()
            self._end(SOCKET_CLOSED)

    def _write_guest(self) -> None:
        try:
            del self._to_guest[: self._sock.send(self._to_guest)]
        except BlockingIOError:
            pass  # it is for reading that we were woken

    def _read_guest(self) -> None:
        data = self._sock.recv(_READ_BYTES)
        if not data:
            self._end(SOCKET_CLOSED)
            return
        lines, self._next_seq = encode_lines(data, self._next_seq)
        self._to_daemon += lines

    def _end(self, exit_code: int) -> None:
        """The first end that ends says how."""
        if self._exit_code is None:
            self._exit_code = exit_code
