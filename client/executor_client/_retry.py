"""When to try again: growing delays with jitter, until a deadline. Knows no clock and does not sleep."""

from __future__ import annotations

import random

from executor_client import _status
from executor_client._limits import BACKOFF_FIRST_S, BACKOFF_MAX_S, BUSY_SPREAD
from executor_client.errors import ExecutorClientError


class Backoff:
    """The delays of one series of attempts. Its time begins with the first of them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._next_s = BACKOFF_FIRST_S

    def delay_s(self, now_s: float, *, told_s: float = 0.0) -> float | None:
        """How long to wait before the next attempt; None when there is no time for one.

        Never less than `told_s`, which is the daemon's word, and a random part of it more, as far as there is time.
        """
        if self._deadline_s is None:
            self._deadline_s = now_s + self._timeout_s
        left_s = self._deadline_s - now_s
        own_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, BACKOFF_MAX_S)
        least_s = max(told_s, own_s)
        if least_s >= left_s:
            return None
        return min(max(own_s, told_s * random.uniform(1.0, 1.0 + BUSY_SPREAD)), left_s)


class Retries:
    """The attempts of one call: made again while nobody is there, and while the daemon says when to ask again.

    For either there is a time of its own; 0 is not at all.
    """

    def __init__(self, *, away_timeout_s: float, busy_timeout_s: float) -> None:
        self._away_timeout_s = away_timeout_s
        self._busy_timeout_s = busy_timeout_s
        self.heard()

    def heard(self) -> None:
        """The daemon has answered: both times begin anew at the next trouble."""
        self._away = Backoff(self._away_timeout_s)
        self._busy = Backoff(self._busy_timeout_s)

    def away_delay_s(self, now_s: float) -> float | None:
        """How long to wait for a daemon that is not there; None when that has been tried long enough."""
        return self._away.delay_s(now_s)

    def busy_delay_s(self, error: ExecutorClientError, now_s: float) -> float | None:
        """How long to wait for a daemon that is busy; None for another refusal, and for a time too far off."""
        told_s = _status.retry_after_s(error)
        return None if told_s is None else self._busy.delay_s(now_s, told_s=told_s)

    def delay_s(self, error: ExecutorClientError, now_s: float) -> float | None:
        """How long to wait before a call that failed like this is made again; None when it is not."""
        if _status.is_transport_failure(error):
            return self.away_delay_s(now_s)
        return self.busy_delay_s(error, now_s)
