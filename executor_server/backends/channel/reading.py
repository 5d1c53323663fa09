"""Flow control of reading from a guest: which reasons suspend it, and when it resumes."""

from __future__ import annotations

import asyncio


class ReadingControl:
    """Suspends the reading of the current connection for two independent reasons.

    The owner pauses it when it has no room for more frames; the guest then blocks its program. The fairness among
    tenants rests it when the tenant has had its share. The owner's pause waits for READY: a connection that is not
    read before that would look like a dead guest because its owner is busy.
    """

    def __init__(self) -> None:
        self._paused = False
        self._rests = False
        self._transport: asyncio.Transport | None = None
        self._greeted = False

    def attach(self, transport: asyncio.Transport) -> None:
        """Takes a new connection, whose guest has not answered yet: it is read, whatever the owner has paused."""
        self._transport, self._greeted = transport, False

    def detach(self) -> None:
        self._transport, self._greeted = None, False

    def greeted(self) -> None:
        """The guest has answered: from here on the owner's pause holds, also one from before this connection."""
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
