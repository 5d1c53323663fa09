"""The link between the daemon and the proxy's process: messages over a Unix socket, with descriptors in one direction.

Theory of operation. A message is one line of JSON (guest/egress/control_protocol.py). The daemon may send one
descriptor with a message, which then has the field `descriptor: true`; the kernel delivers it with the first byte of
that message or earlier, in order, so a queue matches them. Only the process takes descriptors. The daemon reads without
room for any, so the kernel closes those that a proxy sends after it was taken over.

Both ends read a bounded piece per turn of their loop. Unwritten data waits in memory; an end that does not read is
given up after `max_backlog_bytes`.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from executor_server.guest.egress.control_protocol import ControlError, LineReader, encode

_READ_BYTES = 65_536
# Descriptors of one read: the kernel ends a read at a message with descriptors.
_MAX_DESCRIPTORS = 4

Message = dict[str, Any]


class Link:
    """One end. Works with asyncio's loops and uvloop. `on_message` owns the descriptor that it gets."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_line_bytes: int,
        max_backlog_bytes: int,
        takes_descriptors: bool,
        on_message: Callable[[Message, int | None], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`on_end` is called once, with the reason as a clause, when the other end is gone or broke the protocol."""
        sock.setblocking(False)
        self._sock = sock
        self._lines = LineReader(max_line_bytes)
        self._max_backlog_bytes = max_backlog_bytes
        self._takes_descriptors = takes_descriptors
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._received: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._backlog_bytes = 0
        self._is_open = True
        self._loop.add_reader(sock.fileno(), self._read)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that the other end has not read yet."""
        return self._backlog_bytes

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Sends a message, with a copy of the descriptor. Never blocks, and does nothing after the end."""
        if descriptor is not None:
            message = {**message, "descriptor": True}
        self.send_line(encode(message), descriptor)

    def send_line(self, line: bytes, descriptor: int | None = None) -> None:
        if not self._is_open:
            return
        # Copied, since the caller may close its own before this is sent, and the number may be reused.
        self._unsent.append((memoryview(line), os.dup(descriptor) if descriptor is not None else None))
        self._backlog_bytes += len(line)
        if self._backlog_bytes > self._max_backlog_bytes:
            self._end("it does not read what it is sent")
        elif len(self._unsent) == 1:
            self._write()

    def read_arrived(self) -> None:
        """Delivers the messages that have arrived, without waiting for the loop. A handler must not call it."""
        while self._is_open and self._read():
            pass

    def close(self) -> None:
        """Closes this end, without a call of `on_end`. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for descriptor in (*self._received, *(each for _, each in self._unsent if each is not None)):
            os.close(descriptor)
        self._received.clear()
        self._unsent.clear()
        self._backlog_bytes = 0

    def _end(self, why: str) -> None:
        if self._is_open:
            self.close()
            self._on_end(why)

    def _read(self) -> bool:
        """Reads a piece and delivers its messages. Returns False if there was none, or the link has ended."""
        try:
            data = self._receive()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(f"the link broke: {error.strerror}")
            return False
        if not data:
            self._end("it closed the link")
            return False
        try:
            for message in self._lines.feed(data):
                self._deliver(message)
                if not self._is_open:  # the handler closed it
                    return False
        except ControlError as error:
            self._end(str(error))
            return False
        return True

    def _receive(self) -> bytes:
        if not self._takes_descriptors:
            return self._sock.recv(_READ_BYTES)
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = self._sock.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._received.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise OSError(0, "descriptors were lost")
        return data

    def _deliver(self, message: Message) -> None:
        descriptor = None
        if message.get("descriptor") is True:
            if not self._received:
                raise ControlError("a message lacks its descriptor")
            descriptor = self._received.popleft()
        self._on_message(message, descriptor)

    def _write(self) -> None:
        while self._unsent:
            line, descriptor = self._unsent[0]
            numbers = array.array("i", [] if descriptor is None else [descriptor])
            try:
                sent = self._sock.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else [])
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._write)
                return
            except OSError as error:
                self._end(f"the link broke: {error.strerror}")
                return
            self._backlog_bytes -= sent
            if descriptor is not None:
                os.close(descriptor)
            if sent < len(line):
                self._unsent[0] = (line[sent:], None)
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())
