"""One connection to a guest, as the event loop sees it: bytes and flow control, passed on to the channel."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast


class ConnectionOwner(Protocol):
    """The channel that a connection reports to."""

    def begin_connection(self, transport: asyncio.Transport) -> None:
        """The connection is open."""

    def end_connection(self, exc: Exception | None) -> None:
        """The connection ended, and the owner had not released it."""

    def take_data(self, data: bytes) -> None:
        """Bytes arrived."""

    def note_writable(self, writable: bool) -> None:
        """The transport takes more bytes, or takes no more for now."""


class Connection(asyncio.Protocol):
    """One connection. It forgets its channel when it is released, so that late bytes and events go nowhere."""

    def __init__(self, channel: ConnectionOwner) -> None:
        self._channel: ConnectionOwner | None = channel
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
