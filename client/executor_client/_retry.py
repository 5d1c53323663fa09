"""When to try again: growing delays with jitter, until a deadline. Knows no clock and does not sleep."""

from __future__ import annotations

import random

from executor_client._limits import BACKOFF_FIRST_S, BACKOFF_MAX_S


class Backoff:
    """The delays of one series of attempts."""

    def __init__(self, *, now_s: float, timeout_s: float) -> None:
        self._deadline_s = now_s + timeout_s
        self._next_s = BACKOFF_FIRST_S

    def delay_s(self, now_s: float, *, at_least_s: float = 0.0) -> float | None:
        """How long to wait before the next attempt; None when there is no time for one."""
        delay_s = max(at_least_s, self._next_s * random.uniform(0.5, 1.0))
        self._next_s = min(self._next_s * 2, BACKOFF_MAX_S)
        return delay_s if now_s + delay_s < self._deadline_s else None
