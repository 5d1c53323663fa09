"""The blocking client's timer of waits."""

from __future__ import annotations

import logging
import threading
import time

from executor_client._core.waiting import Waits, WaitTimer
from executor_client.waits import OnWait

_log = logging.getLogger(__name__)


class Timer(WaitTimer):
    """Reports from a thread that only exists during waits."""

    def __init__(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._changed = threading.Condition()
        self._all: set[Waits] = set()
        self._thread: threading.Thread | None = None
        self._wakes_s = 0.0
        self._closed = False

    def schedule(self, waits: Waits) -> None:
        with self._changed:
            if self._closed or waits.due_s is None:
                self._all.discard(waits)
                return
            self._all.add(waits)
            if self._thread is None:
                self._begin()
            elif waits.due_s < self._wakes_s:
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._all.clear()
            thread = self._thread
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._run, name="executor-waits", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The process can't start threads, or is ending. The calls don't need one.
            _log.warning("waits are not reported: no thread can be started", exc_info=True)
            self._all.clear()
        else:
            self._thread = thread

    def _run(self) -> None:
        while due := self._next_due():
            for waits in due:
                waits.report(self._on_wait)

    def _next_due(self) -> list[Waits]:
        """Sleeps until waits are due and returns them; none if the thread should end."""
        with self._changed:
            while times := {waits: waits.due_s for waits in self._all if waits.due_s is not None}:
                now_s = time.monotonic()
                due = [waits for waits, due_s in times.items() if due_s <= now_s]
                if due:
                    return due
                self._wakes_s = min(times.values())
                self._changed.wait(self._wakes_s - now_s)
                self._wakes_s = 0.0
            self._thread = None
            return []
