"""The memory that the journals of all sessions share: bounded for the daemon, fair among tenants.

A full journal without readers stops the reading from its guest, but the journals of many sessions together could still
fill the daemon. So their memory is counted by tenant. Once the sum passes `total_bytes`, each tenant with more than an
even share is short of memory: first, its executions that were read to the end are reduced to their results; then
reading from its guests stops until there is memory again or a reader catches up. Each execution may hold
`floor_bytes` in any case, so an execution with a reader goes on, whatever others hold.

The sum is at most the total, a floor for each running execution, and the even share of the last tenant. Unread output
waits in the sandboxes, and counts against their memory.
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from typing import Protocol

_MIN_FLOOR_BYTES = 64 * 1024


class JournalHolder(Protocol):
    """An execution or a process, as the memory uses it."""

    def trim(self) -> None:
        """Decides again whether its guest must be held back."""
        ...

    def drop_read(self) -> None:
        """Drops all events but the last, unless a reader follows them."""
        ...


class JournalMemory:
    """The memory of all tenants. Used in one event loop."""

    def __init__(self, total_bytes: int = sys.maxsize, max_sessions: int = 1) -> None:
        self.total_bytes = total_bytes
        # The floors of all sessions together take half of the total; more if that is below the least floor.
        self.floor_bytes = max(_MIN_FLOOR_BYTES, total_bytes // (2 * max_sessions))
        self.held_bytes = 0
        self.tenants: defaultdict[str, TenantMemory] = defaultdict(lambda: TenantMemory(self))
        self.waiting: dict[JournalHolder, None] = {}
        self._recheck: asyncio.Handle | None = None

    def of(self, tenant: str) -> TenantMemory:
        """Returns the part of one tenant."""
        return self.tenants[tenant]

    def recheck_soon(self) -> None:
        """Lets waiting executions decide again, after the caller has freed its memory."""
        if self.waiting and self._recheck is None:
            self._recheck = asyncio.get_running_loop().call_soon(self._recheck_all)

    def _recheck_all(self) -> None:
        self._recheck = None
        for holder in list(self.waiting):
            holder.trim()


class TenantMemory:
    """The part of the memory that one tenant's executions hold."""

    def __init__(self, memory: JournalMemory) -> None:
        self._memory = memory
        self._held_bytes = 0
        self._read: dict[JournalHolder, None] = {}  # read to their end, the oldest first

    def charge(self, size_bytes: int) -> None:
        """Adds to the memory in use; a negative size for dropped events."""
        self._held_bytes += size_bytes
        self._memory.held_bytes += size_bytes
        if size_bytes < 0:
            self._memory.recheck_soon()

    def is_short_for(self, journal_bytes: int) -> bool:
        """Returns True if a journal of this size must be held back. Drops fully read executions first."""
        if journal_bytes <= self._memory.floor_bytes:
            return False
        while self.is_short and self._read:
            holder = next(iter(self._read))
            del self._read[holder]
            holder.drop_read()
        return self.is_short

    @property
    def is_short(self) -> bool:
        """True when the daemon holds too much, and this tenant more than an even share of the total."""
        memory = self._memory
        if memory.held_bytes <= memory.total_bytes:
            return False
        tenants = sum(each._held_bytes > 0 for each in memory.tenants.values())
        return self._held_bytes * tenants > memory.total_bytes

    def note_read(self, holder: JournalHolder) -> None:
        """Notes an ended execution that was read to its end."""
        self._read[holder] = None

    def set_waiting(self, holder: JournalHolder, waits: bool) -> None:
        """Adds or removes an execution that is held back, and decides again when there is more memory."""
        if waits:
            self._memory.waiting[holder] = None
        else:
            self._memory.waiting.pop(holder, None)

    def leave(self, holder: JournalHolder, size_bytes: int) -> None:
        """Removes an execution and all that it holds."""
        self.set_waiting(holder, False)
        self._read.pop(holder, None)
        self.charge(-size_bytes)


def unlimited() -> TenantMemory:
    """Returns memory that is shared with no other journal and never short."""
    return JournalMemory().of("")
