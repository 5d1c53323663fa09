"""Flow control of a connection to a guest: what suspends reading, and what writers wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor_server.guest.wire.sequenced import Sequenced


class ReadingControl:
    """Suspends the reading of the current connection for two independent reasons.

    The owner pauses it when it has no room for more frames; the guest then blocks its program. Fairness among tenants
    suspends it when the tenant has had its share. The owner's pause takes effect only after READY: a guest whose
    connection is not read before that would look dead because its owner is busy.
    """

    def __init__(self) -> None:
        self._paused = False
        self._rests = False
        self._transport: asyncio.Transport | None = None
        self._greeted = False

    def attach(self, transport: asyncio.Transport) -> None:
        """Takes a new connection, whose guest has not answered yet: it is read even if the owner has paused reading."""
        self._transport, self._greeted = transport, False

    def detach(self) -> None:
        self._transport, self._greeted = None, False

    def greeted(self) -> None:
        """The guest has answered: now the owner's pause takes effect, even one from before this connection."""
        self._greeted = True
        self._update()

    def pause(self) -> None:
        """Suspends reading for the owner."""
        self._paused = True
        self._update()

    def resume(self) -> None:
        self._paused = False
        self._update()

    def rest(self) -> None:
        """Suspends reading for the other tenants."""
        self._rests = True
        self._update()

    def go_on(self) -> None:
        self._rests = False
        self._update()

    def _update(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        reads = not (self._rests or (self._paused and self._greeted))
        if reads and not self._transport.is_reading():
            self._transport.resume_reading()
        elif not reads and self._transport.is_reading():
            self._transport.pause_reading()


class WritingControl:
    """Knows whether a connection buffers more, and how far the guest has acknowledged the window's frames.

    Senders wait in `drain`, so that a guest that takes nothing does not make the daemon keep frames without bound.
    """

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
        """Ends all waits, later ones too."""
        self._closed = True
        self._room.set()
        self._delivery.set()

    async def drain(self) -> None:
        """Waits until there is room for another chunk, or the channel is closed."""
        while not self._room.is_set():  # a sender that was woken in the same moment may have taken the room
            await self._room.wait()

    async def delivered(self, ping: Callable[[], None]) -> None:
        """Waits until the guest has taken every frame that was sent so far, or the channel is closed."""
        sent = self._window.sent
        while self._window.acked < sent and not self._closed:
            self._delivery.clear()
            ping()
            await self._delivery.wait()
