"""Flow control of writing to a guest: writers wait for room or for an acknowledgement.

A guest that takes nothing must not make the daemon keep frames without bound: senders wait in `drain`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor_server.guest.wire.sequenced import Sequenced


class WritingControl:
    """Knows whether a connection buffers more, and how far the guest has acknowledged the window's frames."""

    def __init__(self, window: Sequenced) -> None:
        self._window = window
        self._writable = True
        self._closed = False
        self._room = asyncio.Event()
        self._room.set()
        self._delivery = asyncio.Event()  # cleared while `delivered` waits for an acknowledgement
        self._delivery.set()

    @property
    def awaits_delivery(self) -> bool:
        return not self._delivery.is_set()

    def note_writable(self, writable: bool) -> None:
        """The connection's buffer is full, or has room again."""
        self._writable = writable
        self.update()

    def note_acknowledged(self, acked_before: int) -> None:
        """Frames above this number may have been acknowledged."""
        if self._window.acked > acked_before:
            self._delivery.set()
            self.update()

    def update(self) -> None:
        """The window has changed."""
        if self._closed or (self._writable and not self._window.full):
            self._room.set()
        else:
            self._room.clear()

    def close(self) -> None:
        """Ends all waits, also those that come."""
        self._closed = True
        self._room.set()
        self._delivery.set()

    async def drain(self) -> None:
        """Waits until there is room for another chunk, or the channel is closed."""
        await self._room.wait()

    async def delivered(self, ping: Callable[[], None]) -> None:
        """Waits until the guest has taken every frame that was sent so far, or the channel is closed."""
        sent = self._window.sent
        while self._window.acked < sent and not self._closed:
            self._delivery.clear()
            ping()
            await self._delivery.wait()
