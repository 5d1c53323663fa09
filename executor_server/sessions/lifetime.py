"""The time that a session may go on, counted from when it was made and when it was last used.

Measured with a clock that only goes forward, also while the host sleeps: setting the host's time neither ends a session
nor keeps one. Unix time is shown and written down. Only what an earlier daemon wrote is compared with Unix time, once,
and a time in the future counts as now: a clock that was set meanwhile changes the remaining time by less than its
limits.

It also has the time until which nothing has to be done in an unused session: hundreds may be idle, and must cost the
others nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from executor_server.core import Limits


def _steady_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SessionLife:
    """The clock of one session."""

    def __init__(
        self,
        create_time_s: float,
        last_used_s: float,
        *,
        in_use: Callable[[], bool] = lambda: False,
        steady: Callable[[], float] = _steady_s,
        unix: Callable[[], float] = time.time,
    ) -> None:
        """`create_time_s`, `last_used_s`: Unix time. `in_use` is asked each time, and postpones the idle end."""
        self.look_at_s = 0.0  # the monotonic time at which the session has something to do; each use puts it back to 0
        self._in_use = in_use
        self._steady, self._unix = steady, unix
        now_s, unix_s = steady(), unix()
        self._created_s = now_s - max(unix_s - create_time_s, 0.0)
        self._used_s = now_s - max(unix_s - last_used_s, 0.0)

    def touch(self) -> None:
        """Notes a use."""
        self._used_s, self.look_at_s = self._steady(), 0.0

    def rest(self, limits: Limits, *due_s: float) -> None:
        """Notes that until the first of these monotonic times, or its end, it has nothing to do if it is not used."""
        self.look_at_s = min(*due_s, time.monotonic() + self.left_s(limits))

    def _note_use(self) -> None:
        if self._in_use():
            self.touch()

    @property
    def last_used_s(self) -> float:
        """Unix time of the last use, by the host's clock of now."""
        self._note_use()
        return self._unix() - (self._steady() - self._used_s)

    def left_s(self, limits: Limits) -> float:
        """Returns the seconds until it ends if it is not used any more; zero or less when it is over."""
        self._note_use()
        return min(self._created_s + limits.session_time_s, self._used_s + limits.idle_time_s) - self._steady()

    def expire_time_s(self, limits: Limits) -> float:
        """Returns the Unix time when it ends if it is not used any more, by the host's clock of now."""
        return self._unix() + self.left_s(limits)
