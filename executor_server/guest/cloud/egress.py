"""`python3 GUEST egress SOCKET NONCE`: runs the egress proxy of a sandbox in a cloud machine.

The daemon can't take the listener of a sandbox in a machine that is not its own, so the proxy comes to the listener: a
command like the relay (relay.py), as root next to the sandbox, in the machine's own network. Agent code can neither see
nor signal it. Its streams carry the protocol of egress/control_protocol.py as numbered lines of text (wire/lines.py),
and two messages more, before all others:

    listen   number, token, internal   take the listener from the guest at SOCKET, with the next token of its chain;
                                       `internal` are ranges of private addresses that names may resolve to
    done     number                    the listener is served as soon as a session is bound to it

Invariant: one process serves a listener. The daemon starts another one where a stream broke, and the earlier one may
not have noticed. So a process takes a lock next to the socket before it asks for the listener, and kills the process
that holds the lock. The directory is root's alone, so the number in the file is that of a predecessor.

A process without a daemon must not go on: the bytes that it moves would not be counted, and could not be forbidden. It
ends when a stream closes, and when nothing arrives for _SILENCE_S; the daemon sends requests more often than that.

No TLS is terminated here and no secret known: the machine is the cloud's.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import signal
import socket
import sys
import time
from typing import Any, Dict, Optional

from ..egress.addresses import AddressRules
from ..egress.control_protocol import MAX_COMMAND_BYTES, ControlError, ControlServer, LineReader, encode
from ..egress.host_resolver import HostResolver
from ..egress.own_addresses import OwnAddresses
from ..egress.protocols import Limits
from ..egress.proxy import Proxy
from ..wire.frames import PROTOCOL_VERSION, FrameDecoder, FrameError, encode_frame
from ..wire.lean import passed_descriptors
from ..wire.lines import BAD_LINE, CANNOT_CONNECT, STREAM_CLOSED, LineDecoder, LineError, encode_lines, start_line
from ..wire.messages import Listener, TakeListener
from ..wire.schema import message_of

_STDIN, _STDOUT = 0, 1
_READ_BYTES = 64 * 1024
# Bytes of reports that may wait for the daemon's stream; with more waiting, the stream has no reader.
_MAX_WAITING_BYTES = 2**23
_SILENCE_S = 45.0
_WATCH_S = 5.0
_ANSWER_S = 5.0
_ANSWER_BYTES = 1024
# Seconds for a predecessor to die of SIGKILL and to leave the lock.
_LOCK_S = 5.0
_MAX_NONCE_CHARS = 64
# The daemon answers through the cloud. A refusal waits this long for it, so that its notice reaches the step's log.
_LIMITS = Limits(notice_s=2.0)


def main(arguments: list[str]) -> int:
    """Serves until the daemon is gone; returns the exit code, one of the relay's."""
    path, nonce = arguments
    if not (nonce.isascii() and nonce.isalnum() and len(nonce) <= _MAX_NONCE_CHARS):
        raise SystemExit("the nonce is not letters and digits")
    os.set_blocking(_STDIN, False)
    os.set_blocking(_STDOUT, False)
    # Not by returning from here: threads that wait for a name server must not keep the process alive.
    os._exit(asyncio.run(_serve(path, nonce)))


async def _serve(path: str, nonce: str) -> int:
    server = _Server(path, nonce)
    return await server.ended


class _Server:
    def __init__(self, path: str, nonce: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: "asyncio.Future[int]" = self._loop.create_future()
        self._path = path
        self._lines = LineDecoder()
        self._messages = LineReader(MAX_COMMAND_BYTES)
        self._next_seq = 1
        self._waiting = bytearray(start_line(nonce))
        self._control = ControlServer(self._send, lambda: len(self._waiting))
        self._listener: Optional[socket.socket] = None
        self._lock_fd = -1  # held until the process ends
        self._heard_at = time.monotonic()
        self._loop.add_reader(_STDIN, self._on_stdin)
        self._write()
        self._loop.call_later(_WATCH_S, self._watch)

    def _end(self, exit_code: int, why: str = "") -> None:
        if not self.ended.done():
            if why:
                sys.stderr.write(f"{why}\n")
            self.ended.set_result(exit_code)

    def _watch(self) -> None:
        if time.monotonic() - self._heard_at > _SILENCE_S:
            self._end(STREAM_CLOSED, f"nothing was heard for {_SILENCE_S:g} s")
        self._loop.call_later(_WATCH_S, self._watch)

    # -- streams -------------------------------------------------------------------------------------------------

    def _on_stdin(self) -> None:
        try:
            data = os.read(_STDIN, _READ_BYTES)
        except BlockingIOError:
            return  # a shell that shares the stream has taken what was ready
        if not data:
            self._end(STREAM_CLOSED)
            return
        self._heard_at = time.monotonic()
        try:
            for piece in self._lines.feed(data):
                for message in self._messages.feed(piece):
                    self._handle(message)
        except (LineError, ControlError) as error:
            self._end(BAD_LINE, str(error))

    def _send(self, line: bytes) -> None:
        lines, self._next_seq = encode_lines(line, self._next_seq)
        idle = not self._waiting
        self._waiting += lines
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self._end(STREAM_CLOSED, "the daemon reads nothing")
        elif idle:
            self._write()

    def _write(self) -> None:
        try:
            del self._waiting[: os.write(_STDOUT, self._waiting)]
        except BlockingIOError:
            pass
        except OSError:
            self._waiting.clear()
            self._end(STREAM_CLOSED)
        if self._waiting:
            self._loop.add_writer(_STDOUT, self._write)
        else:
            self._loop.remove_writer(_STDOUT)

    # -- commands ------------------------------------------------------------------------------------------------

    def _handle(self, message: Dict[str, Any]) -> None:
        if message["type"] == "listen":
            self._listen(message)
        elif self._listener is None:
            raise ControlError("the first message is not `listen`")
        else:
            self._control.handle(message, self._listener.dup() if message["type"] == "bind" else None)

    def _listen(self, message: Dict[str, Any]) -> None:
        try:
            self._lock_fd = _replace_predecessor(os.path.join(os.path.dirname(self._path), "egress.pid"))
            self._listener = _take_listener(self._path, str(message["token"]))
            classifier = AddressRules([str(text) for text in message["internal"]], OwnAddresses())
        except (OSError, FrameError, LookupError, TypeError, ValueError) as error:
            self._end(CANNOT_CONNECT, f"no listener: {type(error).__name__}: {error}")
            return
        proxy = Proxy(resolver=HostResolver(), classifier=classifier, reporter=self._control, limits=_LIMITS)
        self._control.drive(proxy)
        self._send(encode({"type": "done", "number": message["number"]}))


def _replace_predecessor(path: str) -> int:
    """Ends the process that serves this listener, if there is one; returns the descriptor that holds the lock.

    Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        _kill_holder(fd)
        time.sleep(0.01)  # nothing else is served yet
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d" % os.getpid(), 0)
    return fd


def _kill_holder(fd: int) -> None:
    """Kills the process that wrote its number, which it does just after it got the lock."""
    text = os.pread(fd, 20, 0)
    if text.isdigit() and int(text) > 1:
        try:
            os.kill(int(text), signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has just ended


def _take_listener(path: str, token: str) -> socket.socket:
    """Asks the guest for its listener over a connection of its own. Raises OSError, FrameError."""
    request = encode_frame(TakeListener.kind, TakeListener(token=token, protocol=PROTOCOL_VERSION).head())
    room = socket.CMSG_LEN(array.array("i").itemsize)  # for one descriptor: the kernel closes others
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(path)
        connection.sendall(request)
        data, ancillary, _, _ = connection.recvmsg(_ANSWER_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    finally:
        connection.close()
    passed = passed_descriptors(ancillary)
    frames = FrameDecoder().feed(data) if data else []
    if len(passed) != 1 or not frames or not isinstance(message_of(frames[0]), Listener):
        raise FrameError("the guest did not hand its listener out")
    listener = socket.socket(fileno=passed[0])
    listener.setblocking(False)
    return listener
