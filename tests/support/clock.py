"""A clock that stands still until a test moves it."""

from __future__ import annotations


class Clock:
    """Seconds, read by a call or, in the place of the module `time`, as `monotonic()`."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    monotonic = __call__
