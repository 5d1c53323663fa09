"""Bounds how much is read from one tenant's guests while other tenants are active.

A tenant that reads files, or prints, as fast as it can would keep the event loop, its threads and a processor busy with
nothing else. So the bytes that are read for each tenant are counted in short windows: a tenant that has used up
`WINDOW_BYTES` is read again in the next window, unless no other tenant's guest has sent anything lately. Small frames
are never delayed by this. A guest that is not read blocks its program, as when a journal is full.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

WINDOW_S = 0.02
# About 100 MiB a second: a tenth of what the daemon can pass on.
WINDOW_BYTES = 2 * 1024 * 1024
# Seconds after its last frame in which a tenant counts as active.
ACTIVE_S = 1.0


class Reading(Protocol):
    """A source whose reading can be suspended."""

    def rest(self) -> None: ...

    def go_on(self) -> None: ...


class ReadingShares:
    """Counts and suspends the reading of all channels. For use in one event loop."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # the last frame by tenant
        self._read_bytes: dict[str, int] = {}  # by tenant, in this window
        self._resting: dict[Reading, None] = {}
        self._window: asyncio.TimerHandle | None = None

    def note(self, tenant: str, channel: Reading, size_bytes: int, now_s: float) -> None:
        """Counts read bytes, and suspends the channel when its tenant is over its share. `now_s` is monotonic."""
        self._heard_s[tenant] = now_s
        read_bytes = self._read_bytes.get(tenant, 0) + size_bytes
        self._read_bytes[tenant] = read_bytes
        if read_bytes > WINDOW_BYTES and self._others_are_active(now_s):
            channel.rest()
            self._resting[channel] = None
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(WINDOW_S, self._end_window)

    def close(self) -> None:
        """Resumes every suspended channel."""
        if self._window is not None:
            self._window.cancel()
            self._end_window()

    def _others_are_active(self, now_s: float) -> bool:
        if len(self._heard_s) < 2:
            return False
        for tenant in [tenant for tenant, heard_s in self._heard_s.items() if now_s - heard_s > ACTIVE_S]:
            del self._heard_s[tenant]
        return len(self._heard_s) > 1

    def _end_window(self) -> None:
        self._window = None
        self._read_bytes.clear()
        resting, self._resting = self._resting, {}
        for channel in resting:
            channel.go_on()
