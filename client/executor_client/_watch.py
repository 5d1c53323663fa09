"""Tells `on_wait` of waits that last: of each first after a second, then now and then.

A call opens a `Watch` and says there what it begins to wait for and what no longer. That costs no clock and no thread
while nobody wants to be told. Else the sync client has one thread that sleeps until the next wait has lasted long
enough, and ends when nothing is waited for; the asyncio client has timers of its loop.

A `Watch` guarantees that nothing is told of a wait after it was said to be over: saying so waits for the hook, if that
is just being called. What the hook raises is logged, and changes nothing for the call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from executor_client._limits import WAIT_REASON_CHARS_MAX, WAIT_TOLD_AFTER_S, WAIT_TOLD_EVERY_S
from executor_client.waits import OnWait, Wait, WaitKind

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Awaited:
    """What a wait is for."""

    kind: WaitKind
    what: str


@dataclass
class _Lasting:
    """One wait, and when to tell of it."""

    awaited: Awaited
    reason: str
    gives_up_after_s: float | None
    began_s: float
    due_s: float
    pause_s: float = 2.0
    """Before it is told of again; doubles up to a bound."""
    is_held: bool = False

    def told(self, now_s: float) -> Wait:
        self.put_off(now_s)
        return Wait(self.awaited.kind, self.awaited.what, self.reason, now_s - self.began_s, self.gives_up_after_s)

    def put_off(self, now_s: float) -> None:
        self.due_s = now_s + self.pause_s
        self.pause_s = min(self.pause_s * 2, WAIT_TOLD_EVERY_S)


class Watch:
    """The waits of one call. Thread-safe. As a context manager all of them are over at its end."""

    def __init__(self, bell: Bell | None) -> None:
        self._bell = bell
        self._lock = threading.RLock()
        self._waits: dict[str, _Lasting] = {}
        self.due_s: float | None = None

    def begin(self, key: str, awaited: Awaited, *, reason: str = "", gives_up_after_s: float | None = None) -> None:
        """From now on this is waited for. A wait of that key and kind goes on, with what is said of it here."""
        if self._bell is None:
            return
        now_s = time.monotonic()
        reason = reason[:WAIT_REASON_CHARS_MAX]
        with self._lock:
            lasting = self._waits.get(key)
            if lasting is not None and lasting.awaited.kind is awaited.kind:
                lasting.awaited, lasting.reason, lasting.gives_up_after_s = awaited, reason, gives_up_after_s
                lasting.is_held = False
            else:
                due_s = now_s + WAIT_TOLD_AFTER_S
                self._waits[key] = _Lasting(awaited, reason, gives_up_after_s, now_s, due_s)
            self._schedule()

    def hold(self, key: str) -> None:
        """Tells nothing of this until it is begun again, as a part of the same wait: it may be over, nobody knows."""
        if self._bell is None:
            return
        with self._lock:
            if key in self._waits:
                self._waits[key].is_held = True
                self._schedule()

    def over(self, *keys: str) -> None:
        """What these keys name is no longer waited for, if it was."""
        if self._bell is None:
            return
        with self._lock:
            ended = [self._waits.pop(key) for key in keys if key in self._waits]
            if ended:
                self._schedule()

    def tell(self, on_wait: OnWait) -> None:
        """Tells of what is due; of several waits of one kind only of the oldest."""
        with self._lock:
            now_s = time.monotonic()
            kinds: set[WaitKind] = set()
            for lasting in [lasting for lasting in self._waits.values() if not lasting.is_held]:
                if lasting.awaited.kind in kinds:
                    lasting.due_s = max(lasting.due_s, now_s + lasting.pause_s)
                elif lasting.due_s <= now_s:
                    _call(on_wait, lasting.told(now_s))
                kinds.add(lasting.awaited.kind)
            self._schedule()

    def _schedule(self) -> None:
        assert self._bell is not None
        told_of = (lasting.due_s for lasting in self._waits.values() if not lasting.is_held)
        self.due_s = min(told_of, default=None)
        self._bell.schedule(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.over(*self._waits)


def _call(on_wait: OnWait, wait: Wait) -> None:
    try:
        on_wait(wait)
    except Exception:  # noqa: BLE001 - the hook's error is not the call's: the call goes on
        _log.exception("on_wait failed")


NO_WATCH = Watch(None)


class Bell(ABC):
    """Has each watch tell when it is due. `close` ends that."""

    @abstractmethod
    def schedule(self, watch: Watch) -> None:
        """The watch has a new `due_s`; None: nothing to tell."""

    @abstractmethod
    def close(self) -> None:
        """Rings no more. Idempotent."""


class ThreadBell(Bell):
    """Rings from a thread that is there only while something is waited for."""

    def __init__(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._changed = threading.Condition()
        self._watches: set[Watch] = set()
        self._thread: threading.Thread | None = None
        self._wakes_s = 0.0
        self._closed = False

    def schedule(self, watch: Watch) -> None:
        with self._changed:
            if self._closed or watch.due_s is None:
                self._watches.discard(watch)
                return
            self._watches.add(watch)
            if self._thread is None:
                self._begin()
            elif watch.due_s < self._wakes_s:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._watches.clear()
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name="executor-waits", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread is to be had, or the process ends. The calls need none.
            _log.warning("waits are not told of: no thread can be started", exc_info=True)
            self._watches.clear()
        else:
            self._thread = thread

    def _run(self) -> None:
        while ripe := self._ripe():
            for watch in ripe:
                watch.tell(self._on_wait)

    def _ripe(self) -> list[Watch]:
        """The watches that are due, waited for; none when the thread is to end."""
        with self._changed:
            while due := {watch: watch.due_s for watch in self._watches if watch.due_s is not None}:
                now_s = time.monotonic()
                ripe = [watch for watch, due_s in due.items() if due_s <= now_s]
                if ripe:
                    return ripe
                self._wakes_s = min(due.values())
                self._changed.wait(self._wakes_s - now_s)
                self._wakes_s = 0.0
            self._thread = None
            return []


class LoopBell(Bell):
    """Rings from timers of the running event loop."""

    def __init__(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._timers: dict[Watch, asyncio.TimerHandle] = {}
        self._closed = False

    def schedule(self, watch: Watch) -> None:
        timer = self._timers.pop(watch, None)
        if timer is not None:
            timer.cancel()
        if watch.due_s is not None and not self._closed:
            delay_s = max(0.0, watch.due_s - time.monotonic())
            self._timers[watch] = asyncio.get_running_loop().call_later(delay_s, watch.tell, self._on_wait)

    def close(self) -> None:
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
