"""Windows: how the sessions of a tenant share its quota of network traffic, though they move bytes in another process.

The egress proxy reports bytes after it has moved them, and the daemon may be busy meanwhile. A quota that was only
checked against reports could be passed by as much as a fast network carries until a report is read. So a session moves
at most a window beyond what it has reported, and asks for the next one when half of it is used.

A window is a quarter of what is left, divided by the tenant's sessions, and lies between `MIN_WINDOW_BYTES` and
`MAX_WINDOW_BYTES`. Windows that are open when others use the quota up would be too large then. So whenever half of what
was left is used, all sessions of the tenant ask again, and their windows shrink with it. Hence all windows together are
at most half of what is left, until that is less than the smallest window for each session. A quota is passed by at most
MIN_WINDOW_BYTES for each session, beside what the proxy reads at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MIN_WINDOW_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 64 * 1024 * 1024
_PART = 4


class EgressWindows:
    """Grants windows. `ask_again` is called with a tenant whose sessions must ask for theirs again."""

    def __init__(self) -> None:
        self.ask_again: Callable[[str], None] = lambda tenant: None
        self._left: dict[str, float] = {}  # when the sessions of the tenant asked last
        self._waiting: dict[str, asyncio.TimerHandle] = {}

    def close(self) -> None:
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()

    def grant(self, tenant: str, left_bytes: float, sessions: int, wait_s: float) -> int:
        """Returns the next window of one of so many sessions; 0 when the quota is spent for `wait_s` more seconds."""
        self._left[tenant] = max(left_bytes, self._left.get(tenant, 0.0))
        if left_bytes <= 0:
            if tenant not in self._waiting:
                self._waiting[tenant] = asyncio.get_running_loop().call_later(wait_s, self._on_room, tenant)
            return 0
        part = int(left_bytes) // (_PART * max(1, sessions))
        return max(MIN_WINDOW_BYTES, min(MAX_WINDOW_BYTES, part))

    def note_used(self, tenant: str, left_bytes: float) -> None:
        """Notes that the sessions of a tenant have moved bytes, and how many are left of its quota."""
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
        """Drops what is known of a tenant that has no quota any more, or uses nothing."""
        self._left.pop(tenant, None)
        if (timer := self._waiting.pop(tenant, None)) is not None:
            timer.cancel()

    def _on_room(self, tenant: str) -> None:
        del self._waiting[tenant]
        self.ask_again(tenant)
