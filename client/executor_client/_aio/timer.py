"""The asyncio client's timer of waits."""

from __future__ import annotations

import asyncio
import time

from executor_client._core.waiting import Waits, WaitTimer
from executor_client.waits import OnWait


class AsyncTimer(WaitTimer):
    """Reports from timers of the running event loop."""

    def __init__(self, on_wait: OnWait) -> None:
        self._on_wait = on_wait
        self._timers: dict[Waits, asyncio.TimerHandle] = {}
        self._closed = False

    def schedule(self, waits: Waits) -> None:
        timer = self._timers.pop(waits, None)
        if timer is not None:
            timer.cancel()
        if waits.due_s is not None and not self._closed:
            delay_s = max(0.0, waits.due_s - time.monotonic())
            self._timers[waits] = asyncio.get_running_loop().call_later(delay_s, waits.report, self._on_wait)

    def close(self) -> None:
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
