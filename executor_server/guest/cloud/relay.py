"""`python3 GUEST relay SOCKET NONCE`: carries a connection of the daemon between a command's streams and a socket.

Where the daemon can reach a sandbox only by starting commands in a cloud machine, each of its connections is such a
command: standard input goes to the socket, the socket to standard output, as lines of text (lines.py). It runs as root
next to the sandbox, outside its pid, mount and network namespaces: agent code can neither see nor signal it, and its
memory, which holds the daemon's frames for a moment, needs no other protection.

One thread; nothing in it blocks. Each direction holds a bounded number of bytes, so an end that does not read makes the
other end wait. It exits when either end closes, with one of these codes:

    0  the guest closed the socket, or another connection has taken its place
    66  no process listens at the socket (EX_NOINPUT: no code that a shell or Python ends with by itself)
    75  connecting failed for another reason, such as too little memory (EX_TEMPFAIL)
    3  standard input held something that is not a line: nothing of it was forwarded
    4  standard input or output was closed
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time

from ..wire.lean import socket
from ..wire.lines import (
    BAD_LINE,
    CANNOT_CONNECT,
    NO_LISTENER,
    SOCKET_CLOSED,
    STREAM_CLOSED,
    LineDecoder,
    LineError,
    encode_lines,
    start_line,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

_STDIN, _STDOUT = 0, 1
_READ_BYTES = 64 * 1024
# Bytes that wait in one direction, past which its source is not read; one more read may add to them, as lines.
_WAITING_BYTES = 256 * 1024
# Seconds to deliver the last bytes of an end that has closed to the other one.
_FLUSH_TIME_S = 2.0
_MAX_NONCE_CHARS = 64


def main(arguments: list[str]) -> int:
    """Relays until an end has closed; returns the exit code."""
    path, nonce = arguments
    if not (nonce.isascii() and nonce.isalnum() and len(nonce) <= _MAX_NONCE_CHARS):
        raise SystemExit("the nonce is not letters and digits")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sys.stderr.write(f"can't connect to {path}: {error.strerror}\n")
        return NO_LISTENER if error.errno in (errno.ECONNREFUSED, errno.ENOENT) else CANNOT_CONNECT
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
        self._exit_code: Optional[int] = None  # set once an end has closed

    def run(self) -> int:
        while self._exit_code is None:
            self._turn(None)
        deadline = time.monotonic() + _FLUSH_TIME_S
        while self._has_rest() and (left_s := deadline - time.monotonic()) > 0:
            self._turn(left_s * 1000)
        return self._exit_code

    def _has_rest(self) -> bool:
        """True while bytes of the end that has closed wait for the other one."""
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
                continue  # a shell that shares these streams has taken what was ready

    def _watch(self) -> None:
        """Reads from an end only while there is room for its bytes.

        A descriptor without wanted events is not registered at all: poll reports a closed end (POLLHUP) even for an
        empty mask, again and again, although its last bytes still wait for room.
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
            pass  # poll reported that it can be read, not written

    def _read_guest(self) -> None:
        data = self._sock.recv(_READ_BYTES)
        if not data:
            self._end(SOCKET_CLOSED)
            return
        lines, self._next_seq = encode_lines(data, self._next_seq)
        self._to_daemon += lines

    def _end(self, exit_code: int) -> None:
        """Sets the exit code; the end that closes first decides."""
        if self._exit_code is None:
            self._exit_code = exit_code
