"""The signals of the daemon: SIGTERM and SIGINT stop it, a second one hurries, SIGHUP reloads the policy."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Signals:
    """Counts the requests to stop, and passes on those to reload."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self._reload: Callable[[], None] | None = None

    def on_reload(self, reload: Callable[[], None]) -> None:
        """Sets the action of SIGHUP; before this call the signal is ignored."""
        self._reload = reload

    def reload_requested(self) -> None:
        if self._reload is not None:
            self._reload()

    def stop_requested(self) -> None:
        if self._first.is_set():
            self._second.set()
        self._first.set()

    async def first(self) -> None:
        await self._first.wait()

    async def second(self) -> None:
        await self._second.wait()


@contextmanager
def handled_signals() -> Iterator[Signals]:
    """Handles the signals in the running event loop until the block ends."""
    loop = asyncio.get_running_loop()
    signals = Signals()
    handlers = {
        signal.SIGTERM: signals.stop_requested,
        signal.SIGINT: signals.stop_requested,
        signal.SIGHUP: signals.reload_requested,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield signals
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
