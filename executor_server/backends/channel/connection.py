"""One connection to a guest, as the event loop sees it: bytes and flow control, passed on to the channel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from executor_server.guest.wire.frames import CHUNK_BYTES

if TYPE_CHECKING:
    from executor_server.backends.channel.daemon_channel import GuestChannel

common_space = memoryview(bytearray(CHUNK_BYTES // 4))
"""All connections of a process read into this memory: the bytes are taken before the event loop reads again."""


class DirectConnection(asyncio.BufferedProtocol):
    """A connection whose transport reads straight into the final buffer, without a bytes object in between."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._space = common_space
        self.connection_made = connection.connection_made  # type: ignore[method-assign]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        self._space = self._connection.space()
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        space, self._space = self._space, common_space
        self._connection.filled(space, nbytes)


class Connection(asyncio.Protocol):
    """One connection. It forgets its channel when it is released, so that late bytes and events go nowhere."""

    def __init__(self, channel: GuestChannel) -> None:
        self._channel: GuestChannel | None = channel
        self.transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()

    def release(self) -> None:
        self._channel = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, but are no subclass.
        self.transport = cast("asyncio.Transport", transport)
        if self._channel is None:
            self.transport.abort()
        else:
            self._channel.begin_connection(self.transport)

    def data_received(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.take_data(data)

    def space(self) -> memoryview:
        """Returns the buffer for a transport that can read into one."""
        return common_space if self._channel is None else self._channel.space()

    def filled(self, space: memoryview, size: int) -> None:
        """The first `size` bytes of a buffer from `space` have arrived."""
        if self._channel is not None:
            self._channel.take_filled(space, size)

    def pause_writing(self) -> None:
        if self._channel is not None:
            self._channel.note_writable(False)

    def resume_writing(self) -> None:
        if self._channel is not None:
            self._channel.note_writable(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        if self._channel is not None:
            self._channel.end_connection(exc)


def directly(protocol: asyncio.Protocol) -> asyncio.BaseProtocol:
    """Returns a protocol whose transport reads straight into the final buffer, if `protocol` supports that."""
    return DirectConnection(protocol) if isinstance(protocol, Connection) else protocol
