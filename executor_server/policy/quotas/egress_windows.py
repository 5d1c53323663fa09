"""Windows: how a tenant's sessions share its quota of network traffic, which another process counts.

The egress proxy reports bytes after moving them, and the daemon may read the report late. If a quota were checked
against reports only, a fast network could exceed it by everything it carries until then. So a session moves at most one
window beyond its reported bytes, and requests the next window when half of this one is used.

A window is a quarter of the remaining quota, divided by the tenant's sessions, and at least `MIN_WINDOW_BYTES` and at
most `MAX_WINDOW_BYTES`. An open window becomes too large when other sessions use up the quota. So whenever half of the
remaining quota is used, all sessions of the tenant request new, smaller windows. All windows together are then at most
half of the remaining quota, until each session has the smallest window. A quota is exceeded by at most MIN_WINDOW_BYTES
per session, plus what the proxy reads at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MIN_WINDOW_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 64 * 1024 * 1024
_PART = 4
# The most seconds that sessions wait before they ask again. The use of this node may never make room: the front of a
# fleet allows a node 0 bytes if other nodes have spent the quota.
_MAX_WAIT_S = 60.0


class EgressWindows:
    """Grants windows. `ask_again` is called with a tenant whose sessions must renew their windows."""

    def __init__(self) -> None:
        self.ask_again: Callable[[str], None] = lambda tenant: None
        self._left: dict[str, float] = {}  # bytes left of the quota when the tenant's sessions last asked
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    def close(self) -> None:
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def grant(self, tenant: str, left_bytes: float, sessions: int, wait_s: float) -> int:
        """Returns the next window of one of `sessions`; 0 if the quota is spent for `wait_s` more seconds."""
        self._left[tenant] = max(left_bytes, self._left.get(tenant, 0.0))
        if left_bytes <= 0:
            if tenant not in self._waiting:
                delay_s = min(wait_s, _MAX_WAIT_S)
                self._waiting[tenant] = asyncio.get_running_loop().call_later(delay_s, self._on_room, tenant)
            return 0
        part = int(left_bytes) // (_PART * max(1, sessions))
        return max(MIN_WINDOW_BYTES, min(MAX_WINDOW_BYTES, part))

    def note_used(self, tenant: str, left_bytes: float) -> None:
        """Notes traffic of a tenant's sessions, and the bytes left of its quota."""
        before = self._left.get(tenant)
        if before is not None and before > 0 and left_bytes <= before / 2:
            self._left[tenant] = max(left_bytes, 0.0)
            self.ask_again(tenant)

    def note_bound(self, tenant: str, left_bytes: float) -> None:
        """Notes another quota: sessions that wait for it to have room ask again, and so do those with large windows."""
        if left_bytes > 0 and (timer := self._waiting.pop(tenant, None)) is not None:
            timer.cancel()
            self._left[tenant] = 0.0
            self.ask_again(tenant)
        elif tenant in self._left:
            self.note_used(tenant, left_bytes)

    def forget(self, tenant: str) -> None:
        """Forgets a tenant without a quota or without use."""
        self._left.pop(tenant, None)
        if (timer := self._waiting.pop(tenant, None)) is not None:
            timer.cancel()

    def _on_room(self, tenant: str) -> None:
        del self._waiting[tenant]
        self.ask_again(tenant)
