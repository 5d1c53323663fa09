"""How much of what its guests send is read for one tenant while others want something, too.

A tenant that reads files, or prints, as fast as it can keeps the event loop, the threads behind it and a processor busy
with nothing else. So what is read for each tenant is counted, in short windows: who has had `WINDOW_BYTES` reads on in
the next one, unless it is the only tenant whose guests have said anything lately. Small frames are never held up by
this, and a guest that is not read holds its program back, as when a journal is full.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

WINDOW_S = 0.02
# About 100 MiB in a second: a tenth of what the daemon can pass on.
WINDOW_BYTES = 2 * 1024 * 1024
# After its last frame, a tenant counts as one that wants something.
ACTIVE_S = 1.0


class Reading(Protocol):
    """What can rest."""

    def rest(self) -> None: ...

    def go_on(self) -> None: ...


class ReadingShares:
    """Owned by whoever owns the sessions. Used in one event loop."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # by tenant, of the last second or two
        self._read_bytes: dict[str, int] = {}  # by tenant, in this window
        self._resting: dict[Reading, None] = {}
        self._window: asyncio.TimerHandle | None = None

    def note(self, tenant: str, channel: Reading, size_bytes: int, now_s: float) -> None:
        """So much was read; the channel may have to rest now. `now_s` is monotonic."""
        self._heard_s[tenant] = now_s
        read_bytes = self._read_bytes.get(tenant, 0) + size_bytes
        self._read_bytes[tenant] = read_bytes
        if read_bytes > WINDOW_BYTES and self._others_are_active(now_s):
            channel.rest()
            self._resting[channel] = None
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(WINDOW_S, self._end_window)

    def close(self) -> None:
        """Nothing rests any more."""
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
