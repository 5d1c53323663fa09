"""Connected sockets without transports: bytes are read only when there is room for them.

A transport reads ahead and buffers for slow peers. An endpoint keeps nothing: ten thousand idle connections cost only
their sockets, and back-pressure needs no bookkeeping. It works on asyncio's loops and on uvloop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any, Callable, Optional, Tuple

CHUNK_BYTES = 65536
_STEPS_AT_ONCE = 32
LINGER_BYTES = 2 * 2**20


class DeadlinePassed(Exception):
    """A socket was not ready in time. Not a TimeoutError: that is also what the kernel reports as ETIMEDOUT."""


# A buffer for discarded bytes; nothing reads it.
_WASTE = bytearray(CHUNK_BYTES)


class Endpoint:
    """A connected, non-blocking socket. One coroutine may receive while another one sends.

    Deadlines are in the loop's time.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    async def receive(self, size: int, deadline: Optional[float] = None) -> bytes:
        """Returns what there is, at most `size` bytes; nothing at the end. Raises OSError and DeadlinePassed."""
        while True:
            try:
                return self.sock.recv(size)
            except (BlockingIOError, InterruptedError):
                await self.readable(deadline)

    async def readable(self, deadline: Optional[float] = None) -> None:
        await self._ready(self.loop.add_reader, self.loop.remove_reader, deadline)

    async def send(self, data: bytes, deadline: Optional[float] = None) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.sock.send(rest) :]
            except (BlockingIOError, InterruptedError):
                await self._ready(self.loop.add_writer, self.loop.remove_writer, deadline)

    async def connect(self, address: Tuple[Any, ...], deadline: float) -> None:
        """Connects to a numeric address. Raises OSError and DeadlinePassed."""
        error = self.sock.connect_ex(address)
        if error in (errno.EINPROGRESS, errno.EINTR, errno.EAGAIN):
            await self._ready(self.loop.add_writer, self.loop.remove_writer, deadline)
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    async def linger(self, seconds: float) -> None:
        """Ends our side, then takes in what the peer still sends, within limits.

        A socket that is closed with unread bytes sends a reset, and a reset makes the peer's kernel drop the answer
        that its program has not read yet: the program would see a broken connection in place of the reason.
        """
        deadline = self.loop.time() + seconds
        taken = 0
        try:
            self.sock.shutdown(socket.SHUT_WR)
            while taken < LINGER_BYTES:
                try:
                    count = self.sock.recv_into(_WASTE)
                except (BlockingIOError, InterruptedError):
                    await self.readable(deadline)
                    continue
                if not count:
                    return
                taken += count
        except (OSError, DeadlinePassed):
            return  # the peer is gone, or will not go: either way the socket is closed next

    def close(self) -> None:
        self.sock.close()

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], Any], deadline: Optional[float]) -> None:
        future = self.loop.create_future()
        timer = None if deadline is None else self.loop.call_at(deadline, _expire, future)
        add(self.fd, _wake, future)
        try:
            await future
        finally:
            remove(self.fd)
            if timer is not None:
                timer.cancel()


class LoopShare:
    """Yields the loop to others now and then, in a coroutine between two fast peers.

    Neither a read nor a write waits while there are bytes and room, so without this such a coroutine would keep the
    loop. Steps are counted and not bytes: a body may come in chunks of one byte, and h11 takes 15 µs for each.
    """

    def __init__(self) -> None:
        self._steps = 0

    async def step(self) -> None:
        self._steps += 1
        if self._steps % _STEPS_AT_ONCE == 0:
            await asyncio.sleep(0)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_exception(DeadlinePassed())
