"""Decides when to retry: growing delays with jitter, until a deadline. It reads no clock and does not sleep."""

from __future__ import annotations

import random

from executor_client._core import status
from executor_client._core.limits import (
    APPROVAL_WAIT_MAX_S,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    BUILD_RETRY_MIN_S,
    BUSY_SPREAD,
)
from executor_client._core.waiting import Awaited
from executor_client.errors import ExecutorClientError
from executor_client.waits import WaitKind


class Backoff:
    """The delays of a series of attempts. Its timeout starts with the first delay."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._next_s = BACKOFF_FIRST_S

    def delay_s(self, now_s: float, *, retry_after_s: float = 0.0, is_growing: bool = True) -> float | None:
        """Returns the seconds to wait before the next attempt; None when there is no time for one.

        The delay is at least `retry_after_s`, the daemon's retry time, plus a random part of it, up to the deadline.
        With `is_growing` False, it does not grow with the number of attempts.
        """
        if self._deadline_s is None:
            self._deadline_s = now_s + self._timeout_s
        left_s = self._deadline_s - now_s
        own_s = self._next_s * random.uniform(0.5, 1.0) if is_growing else BUILD_RETRY_MIN_S
        self._next_s = min(self._next_s * 2, BACKOFF_MAX_S)
        least_s = max(retry_after_s, own_s)
        if least_s >= left_s:
            return None
        return min(max(own_s, retry_after_s * random.uniform(1.0, 1.0 + BUSY_SPREAD)), left_s)


class Retries:
    """The retries of one call: while no daemon answers, and while the daemon names a time to retry.

    Absence, lack of capacity, the fetching of an image and an approval have a timeout each; 0 means no retry.
    """

    def __init__(self, *, away_timeout_s: float, busy_timeout_s: float, image_timeout_s: float = 0.0) -> None:
        self._timeouts_s = {
            WaitKind.DAEMON: away_timeout_s,
            WaitKind.ROOM: busy_timeout_s,
            WaitKind.IMAGE: image_timeout_s,
            WaitKind.APPROVAL: APPROVAL_WAIT_MAX_S,
        }
        self._backoffs: dict[WaitKind, Backoff] = {}  # one for each trouble since the daemon last answered

    def answered(self) -> None:
        """Restarts the timeouts, because the daemon has answered."""
        self._backoffs.clear()

    def timeout_s(self, kind: WaitKind) -> float:
        return self._timeouts_s[kind]

    def away_delay_s(self, error: ExecutorClientError | None, now_s: float) -> float | None:
        """Returns the seconds to wait for a daemon that does not answer; None when its timeout is over."""
        # Within seconds the front of a fleet knows whether a node is back or lost.
        is_growing = error is None or error.reason != "NODE_FENCED"
        return self._backoff(WaitKind.DAEMON).delay_s(now_s, is_growing=is_growing)

    def delay_s(self, error: ExecutorClientError, now_s: float) -> float | None:
        """Returns the seconds until a call that failed with this error is repeated; None if it is not."""
        kind = status.waits_for(error)
        if kind is None:
            return None
        if kind is WaitKind.DAEMON:
            return self.away_delay_s(error, now_s)
        # During an approval or a build, a person may be watching and steps are short: the daemon chooses the interval.
        is_growing = kind is not WaitKind.APPROVAL and getattr(error, "progress", None) is None
        retry_after_s: float = getattr(error, "retry_after_s", 0.0)
        return self._backoff(kind).delay_s(now_s, retry_after_s=retry_after_s, is_growing=is_growing)

    def _backoff(self, kind: WaitKind) -> Backoff:
        if kind not in self._backoffs:
            self._backoffs[kind] = Backoff(self._timeouts_s[kind])
        return self._backoffs[kind]


def trouble(error: ExecutorClientError, address: str) -> tuple[Awaited, str]:
    """Describes the wait after an error that is retried, and its reason, for people."""
    kind, progress = status.waits_for(error), getattr(error, "progress", None)
    if kind is WaitKind.DAEMON:
        # An error without a reason is gRPC's own, a long list of addresses and errors.
        return Awaited(kind, f"the daemon at {address}"), error.message if error.reason else "not reachable"
    if kind is WaitKind.IMAGE:
        if progress is not None:
            return Awaited(kind, "the environment", progress), str(progress)
        return Awaited(kind, "the image"), error.message
    if kind is WaitKind.APPROVAL:
        return Awaited(kind, "an approval"), error.message
    return Awaited(WaitKind.ROOM, f"capacity of the daemon at {address}"), error.message
