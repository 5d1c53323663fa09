"""When to try again: growing delays with jitter, until a deadline. Knows no clock and does not sleep."""

from __future__ import annotations

import random

from executor_client import _status
from executor_client._limits import BACKOFF_FIRST_S, BACKOFF_MAX_S, BUSY_SPREAD
from executor_client._watch import Awaited
from executor_client.errors import ExecutorClientError
from executor_client.waits import WaitKind


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

    For absence, for the want of room and for the fetching of an image there is a time each; 0 is not at all.
    """

    def __init__(self, *, away_timeout_s: float, busy_timeout_s: float, image_timeout_s: float = 0.0) -> None:
        self._timeouts_s = {
            WaitKind.DAEMON: away_timeout_s,
            WaitKind.ROOM: busy_timeout_s,
            WaitKind.IMAGE: image_timeout_s,
        }
        self._backoffs: dict[WaitKind, Backoff] = {}  # of the troubles since the daemon was last heard of

    def heard(self) -> None:
        """The daemon has answered: each time begins anew at the next trouble."""
        self._backoffs.clear()

    def timeout_s(self, kind: WaitKind) -> float:
        return self._timeouts_s[kind]

    def away_delay_s(self, now_s: float) -> float | None:
        """How long to wait for a daemon that is not there; None when that has been tried long enough."""
        return self._backoff(WaitKind.DAEMON).delay_s(now_s)

    def told_delay_s(self, error: ExecutorClientError, now_s: float) -> float | None:
        """How long to wait for a daemon that said when to ask again; None for another refusal, and when too long."""
        for kind, told_s in (
            (WaitKind.ROOM, _status.retry_after_s(error)),
            (WaitKind.IMAGE, _status.image_retry_after_s(error)),
        ):
            if told_s is not None:
                return self._backoff(kind).delay_s(now_s, told_s=told_s)
        return None

    def delay_s(self, error: ExecutorClientError, now_s: float) -> float | None:
        """How long to wait before a call that failed like this is made again; None when it is not."""
        if _status.is_transport_failure(error):
            return self.away_delay_s(now_s)
        return self.told_delay_s(error, now_s)

    def _backoff(self, kind: WaitKind) -> Backoff:
        if kind not in self._backoffs:
            self._backoffs[kind] = Backoff(self._timeouts_s[kind])
        return self._backoffs[kind]


def trouble(error: ExecutorClientError, address: str) -> tuple[Awaited, str]:
    """What is waited for after a failure that `Retries` gives a delay for, and why, in words for a person."""
    if _status.is_transport_failure(error):
        # Without a reason it is gRPC's own report, of more addresses and errors than are of use while we wait.
        reason = error.message if error.reason else "not reachable"
        return Awaited(WaitKind.DAEMON, f"the daemon at {address}"), reason
    if _status.image_retry_after_s(error) is not None:
        return Awaited(WaitKind.IMAGE, "the image"), error.message
    return Awaited(WaitKind.ROOM, f"the daemon at {address} to take this"), error.message
