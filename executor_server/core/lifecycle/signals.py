"""The signals of the daemon: SIGTERM and SIGINT stop it, a second one hurries, SIGHUP reloads the policy.

A daemon that belongs to a process also stops when that process ends, and then hurries at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Signals:
    """Counts the requests to stop, and passes on those to reload."""

    def __init__(self, *, hurries: bool = False) -> None:
        self._hurries = hurries
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
        if self._hurries or self._first.is_set():
            self._second.set()
        self._first.set()

    async def first(self) -> None:
        await self._first.wait()

    async def second(self) -> None:
        await self._second.wait()


@contextmanager
def handled_signals(owner_pid: int | None = None) -> Iterator[Signals]:
    """Handles the signals, and the end of the owner (the parent), in the running event loop until the block ends."""
    loop = asyncio.get_running_loop()
    signals = Signals(hurries=owner_pid is not None)
    handlers = {
        signal.SIGTERM: signals.stop_requested,
        signal.SIGINT: signals.stop_requested,
        signal.SIGHUP: signals.reload_requested,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    owner = _open(owner_pid) if owner_pid is not None else None
    if owner is not None:
        loop.add_reader(owner, signals.stop_requested)
    elif owner_pid is not None:
        signals.stop_requested()
    try:
        yield signals
    finally:
        if owner is not None:
            loop.remove_reader(owner)
            os.close(owner)
        for number in handlers:
            loop.remove_signal_handler(number)


def _open(parent_pid: int) -> int | None:
    """Returns a descriptor that is readable once the parent has ended; None if it has ended already."""
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        return None
    if os.getppid() == parent_pid:  # else the id may be another process's
        return parent
    os.close(parent)
    return None
