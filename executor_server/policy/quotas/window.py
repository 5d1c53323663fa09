"""A sliding window over amounts: memory is bounded, because the span is divided into parts of equal length."""

from __future__ import annotations

import math
from collections import deque


class Window:
    """The sum of the amounts that were added within the last `parts * part_s` seconds."""

    def __init__(self, parts: int, part_s: float) -> None:
        self._parts = parts
        self._part_s = part_s
        self._amounts: deque[tuple[int, float]] = deque()  # number of the part since the epoch, amount

    def add(self, amount: float, now_s: float) -> tuple[int, float]:
        """Returns the part that the amount went into, and its sum. A clock that runs backwards counts as stopped."""
        part = int(now_s // self._part_s)
        if self._amounts and self._amounts[-1][0] >= part:
            part, before = self._amounts.pop()
            amount += before
        self._amounts.append((part, amount))
        self._drop_old(now_s)
        return part, amount

    def total(self, now_s: float) -> float:
        self._drop_old(now_s)
        return math.fsum(amount for _, amount in self._amounts)

    def wait_s(self, limit: float, now_s: float) -> float:
        """Returns the seconds until the sum is below the limit, if nothing is added; 0 when it is, inf if never."""
        if limit <= 0:
            return math.inf
        total = self.total(now_s)
        for part, amount in self._amounts:
            if total < limit:
                break
            total -= amount
            wait_s = self._end_s(part) - now_s
            if total < limit:
                return wait_s
        return 0.0

    def _drop_old(self, now_s: float) -> None:
        while self._amounts and self._end_s(self._amounts[0][0]) <= now_s:
            self._amounts.popleft()

    def _end_s(self, part: int) -> float:
        """Returns the time at which a part leaves the span."""
        return (part + 1 + self._parts) * self._part_s
