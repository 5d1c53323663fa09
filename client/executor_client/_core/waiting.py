"""Reports long waits to `on_wait`: after the first second, then at growing intervals, and on each change of progress.

A call opens `Waits` and records the start and end of each wait there. Without a hook this costs nothing. With a hook, a
`WaitTimer` makes the reports: in a thread of the blocking client, or by timers of the asyncio client's loop.

Invariant: a wait is never reported after its end. So recording the end blocks while the hook is running.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from executor_client._core.limits import WAIT_REASON_CHARS_MAX, WAIT_REPORTED_AFTER_S, WAIT_REPORTED_EVERY_S
from executor_client.waits import OnWait, Progress, Wait, WaitKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Awaited:
    """What a call waits for, with its progress if known."""

    kind: WaitKind
    what: str
    progress: Progress | None = None


@dataclass
class _Lasting:
    """One wait, and when to report it."""

    awaited: Awaited
    reason: str
    gives_up_after_s: float | None
    began_s: float
    due_s: float
    pause_s: float = 2.0
    """Seconds until the next report; doubles up to a bound."""
    is_held: bool = False

    def report(self, now_s: float) -> Wait:
        self.due_s = now_s + self.pause_s
        self.pause_s = min(self.pause_s * 2, WAIT_REPORTED_EVERY_S)
        waited_s = now_s - self.began_s
        awaited = self.awaited
        return Wait(awaited.kind, awaited.what, self.reason, waited_s, self.gives_up_after_s, awaited.progress)


class Waits:
    """The waits of one call. Thread-safe. As a context manager it ends them all."""

    def __init__(self, timer: WaitTimer | None) -> None:
        self._timer = timer
        self._lock = threading.RLock()
        self._waits: dict[str, _Lasting] = {}
        self.due_s: float | None = None

    def begin(self, key: str, awaited: Awaited, *, reason: str = "", gives_up_after_s: float | None = None) -> None:
        """Records a wait. A wait with the same key and kind continues with the new reason, timeout and progress."""
        if self._timer is None:
            return
        now_s = time.monotonic()
        reason = reason[:WAIT_REASON_CHARS_MAX]
        with self._lock:
            lasting = self._waits.get(key)
            if lasting is not None and lasting.awaited.kind is awaited.kind:
                if awaited.progress is not None and awaited.progress != lasting.awaited.progress:
                    lasting.due_s = min(lasting.due_s, max(now_s, lasting.began_s + WAIT_REPORTED_AFTER_S))
                lasting.awaited, lasting.reason, lasting.gives_up_after_s = awaited, reason, gives_up_after_s
                lasting.is_held = False
            else:
                due_s = now_s + WAIT_REPORTED_AFTER_S
                self._waits[key] = _Lasting(awaited, reason, gives_up_after_s, now_s, due_s)
            self._schedule()

    def hold(self, key: str) -> None:
        """Pauses the reports of a wait that may be over, until `begin` continues it."""
        if self._timer is None:
            return
        with self._lock:
            if key in self._waits:
                self._waits[key].is_held = True
                self._schedule()

    def over(self, *keys: str) -> None:
        """Records the end of these waits, if they had begun."""
        if self._timer is None:
            return
        with self._lock:
            ended = [self._waits.pop(key) for key in keys if key in self._waits]
            if ended:
                self._schedule()

    def report(self, on_wait: OnWait) -> None:
        """Reports the waits that are due; of each kind only the oldest."""
        with self._lock:
            now_s = time.monotonic()
            kinds: set[WaitKind] = set()
            for lasting in [lasting for lasting in self._waits.values() if not lasting.is_held]:
                if lasting.awaited.kind in kinds:
                    lasting.due_s = max(lasting.due_s, now_s + lasting.pause_s)
                elif lasting.due_s <= now_s:
                    _call(on_wait, lasting.report(now_s))
                kinds.add(lasting.awaited.kind)
            self._schedule()

    def _schedule(self) -> None:
        assert self._timer is not None
        reported = (lasting.due_s for lasting in self._waits.values() if not lasting.is_held)
        self.due_s = min(reported, default=None)
        self._timer.schedule(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.over(*self._waits)


def _call(on_wait: OnWait, wait: Wait) -> None:
    try:
        on_wait(wait)
    except Exception:  # noqa: BLE001 - the hook's error is not the call's: the call goes on
        _log.exception("on_wait failed")


NO_WAITS = Waits(None)


class WaitTimer(ABC):
    """Reports the waits of each call when they are due."""

    @abstractmethod
    def schedule(self, waits: Waits) -> None:
        """Applies the new `due_s` of a call's waits; None: nothing to report."""

    @abstractmethod
    def close(self) -> None:
        """Ends the reports. Idempotent."""
