"""The remaining time of a session, counted from its creation and its last use.

The clock is monotonic and runs while the host sleeps, so setting the host's time neither ends a session nor prolongs
it. Unix time is shown and stored. Times that an earlier daemon stored are compared with Unix time once; a time in the
future counts as now.

It also holds the time at which an unused session next needs attention, so that hundreds of idle sessions cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from executor_server.core import Limits


def steady_s() -> float:
    """Returns the seconds of a clock that runs while the host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SessionLife:
    """The clock of one session."""

    def __init__(
        self,
        create_time_s: float,
        last_used_s: float,
        *,
        in_use: Callable[[], bool] = lambda: False,
        steady: Callable[[], float] = steady_s,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`create_time_s`, `last_used_s`: Unix time. While `in_use` returns True, the idle time does not run."""
        self.look_at_s = 0.0  # the monotonic time at which the session needs attention; each use sets it to 0
        self._in_use = in_use
        self._steady, self._unix = steady, unix
        now_s, unix_s = steady(), unix()
        self._created_s = now_s - max(unix_s - create_time_s, 0.0)
        self._used_s = now_s - max(unix_s - last_used_s, 0.0)

    def touch(self) -> None:
        """Notes a use."""
        self._used_s, self.look_at_s = self._steady(), 0.0

    def rest(self, limits: Limits, *due_s: float) -> None:
        """Notes that, while unused, it needs no attention before the first of these monotonic times or its end."""
        self.look_at_s = min(*due_s, time.monotonic() + self.left_s(limits))

    def _note_use(self) -> None:
        if self._in_use():
            self.touch()

    @property
    def last_used_s(self) -> float:
        """Unix time of the last use, by the host's current clock."""
        self._note_use()
        return self._unix() - (self._steady() - self._used_s)

    def left_s(self, limits: Limits) -> float:
        """Returns the seconds until it ends if it stays unused; zero or less at its end."""
        self._note_use()
        return min(self._created_s + limits.session_time_s, self._used_s + limits.idle_time_s) - self._steady()

    def expire_time_s(self, limits: Limits) -> float:
        """Returns the Unix time at which it ends if it stays unused, by the host's current clock."""
        return self._unix() + self.left_s(limits)
