"""The memory that the journals of all sessions share: a bound for the daemon, fair among tenants.

A journal that nobody reads holds its guest back once it is full; those of many sessions together would still fill the
daemon. So what all of them hold is counted, for each tenant. Once that is more than `total_bytes`, a tenant that has
more than an even part of it is short of room: first what its clients have been given to the end is let go, but for the
results; then its executions are held back, as if their journals were full, until there is room or a reader takes what
they hold. Each execution has `floor_bytes` in any case, so one that is read goes on whatever others hold.

What is held in all is thus at most the total, a floor for each execution that runs, and the even part of a tenant that
came last; the rest waits in the sandboxes, where it counts as theirs.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from typing import Protocol

_MIN_FLOOR_BYTES = 64 * 1024


class JournalHolder(Protocol):
    """An execution, as far as this is concerned."""

    def trim(self) -> None:
        """Looks again whether its guest is to be held back."""
        ...

    def let_go_of_read(self) -> None:
        """Keeps nothing but its result."""
        ...


class JournalRoom:
    """Owned by whoever owns the sessions. Used in one event loop."""

    def __init__(self, total_bytes: int, max_sessions: int = 1) -> None:
        self.total_bytes = total_bytes
        # The floors of all sessions together are half of the total; more where there are too many for the least floor.
        self.floor_bytes = max(_MIN_FLOOR_BYTES, total_bytes // (2 * max_sessions))
        self.held_bytes = 0
        self.tenants: defaultdict[str, TenantRoom] = defaultdict(lambda: TenantRoom(self))
        self.waiting: dict[JournalHolder, None] = {}
        self._recheck: asyncio.Handle | None = None

    def of(self, tenant: str) -> TenantRoom:
        """The part of it that a tenant has."""
        return self.tenants[tenant]

    def recheck_soon(self) -> None:
        """There is more room: those who wait look again, in a moment, when whoever makes room has made it."""
        if self.waiting and self._recheck is None:
            self._recheck = asyncio.get_running_loop().call_soon(self._recheck_all)

    def _recheck_all(self) -> None:
        self._recheck = None
        for holder in list(self.waiting):
            holder.trim()


class TenantRoom:
    """The part of the memory that one tenant's executions hold."""

    def __init__(self, room: JournalRoom) -> None:
        self._room = room
        self._held_bytes = 0
        self._read: dict[JournalHolder, None] = {}  # ended, and given to a client to the end; the oldest first

    def charge(self, size_bytes: int) -> None:
        """So much more is held; less than 0 when something was let go."""
        self._held_bytes += size_bytes
        self._room.held_bytes += size_bytes
        if size_bytes < 0:
            self._room.recheck_soon()

    def is_short_for(self, journal_bytes: int) -> bool:
        """True when a journal that holds so much is to be held back. Lets go of what has been read, before it is."""
        if journal_bytes <= self._room.floor_bytes:
            return False
        while self.is_short and self._read:
            holder = next(iter(self._read))
            del self._read[holder]
            holder.let_go_of_read()
        return self.is_short

    @property
    def is_short(self) -> bool:
        """True when the daemon holds too much, and this tenant more than an even part of what there may be."""
        room = self._room
        if room.held_bytes <= room.total_bytes:
            return False
        tenants = sum(each._held_bytes > 0 for each in room.tenants.values())
        return self._held_bytes * tenants > room.total_bytes

    def note_read(self, holder: JournalHolder) -> None:
        """It has ended, and a client has been given all of it."""
        self._read[holder] = None

    def set_waiting(self, holder: JournalHolder, waits: bool) -> None:
        """True when it is held back, and wants to be told when there is more room."""
        if waits:
            self._room.waiting[holder] = None
        else:
            self._room.waiting.pop(holder, None)

    def leave(self, holder: JournalHolder, size_bytes: int) -> None:
        """It holds nothing any more."""
        self.set_waiting(holder, False)
        self._read.pop(holder, None)
        self.charge(-size_bytes)


class _Unshared(TenantRoom):
    """For whoever shares with nobody: nothing is counted, and nothing is short."""

    is_short = False

    def charge(self, size_bytes: int) -> None:
        return

    def is_short_for(self, journal_bytes: int) -> bool:
        return False

    def note_read(self, holder: JournalHolder) -> None:
        return

    def set_waiting(self, holder: JournalHolder, waits: bool) -> None:
        return


UNSHARED: TenantRoom = _Unshared(JournalRoom(sys.maxsize))
