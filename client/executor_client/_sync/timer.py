"""The blocking client's timer of waits."""

from __future__ import annotations

import logging
import threading
import time

from executor_client._core.waiting import Waits, WaitTimer
from executor_client.waits import OnWait

_log = logging.getLogger(__name__)


class Timer(WaitTimer):
    """Reports from threads that only exist during waits, one for each call."""

    def __init__(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._lock = threading.Lock()
        self._timers: dict[Waits, threading.Timer] = {}
        self._closed = False

    def schedule(self, waits: Waits) -> None:
        with self._lock:
            if (timer := self._timers.pop(waits, None)) is not None:
                timer.cancel()
            if waits.due_s is None or self._closed:
                return
            timer = threading.Timer(max(0.0, waits.due_s - time.monotonic()), waits.report, [self._on_wait])
            timer.name, timer.daemon = "executor-waits", True
            try:
                timer.start()
            except RuntimeError:
                # The process can't start threads, or is ending. The calls don't need one.
                _log.warning("waits are not reported: no thread can be started", exc_info=True)
            else:
                self._timers[waits] = timer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            timers = list(self._timers.values())
        for timer in timers:
            timer.cancel()
            if timer is not threading.current_thread():
                timer.join()
