"""Waits for a condition that no event announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import psutil

if TYPE_CHECKING:
    from executor_server.sessions.pool import WarmPool

T = TypeVar("T")

POLL_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.01


def eventually(probe: Callable[[], T], *, timeout_s: float = POLL_TIMEOUT_S) -> T:
    """The first true value of `probe`; after the timeout, its last value. So: `assert eventually(...)`."""
    deadline = time.monotonic() + timeout_s
    while not (value := probe()) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return value


async def eventually_async(probe: Callable[[], T], *, timeout_s: float = POLL_TIMEOUT_S) -> T:
    """The same, with the event loop running meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not (value := probe()) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event would be set
        await asyncio.sleep(POLL_INTERVAL_S)
    return value


async def eventually_awaited(probe: Callable[[], Awaitable[T]], *, timeout_s: float = POLL_TIMEOUT_S) -> T:
    """The same for a probe that has to wait itself, as one that asks a session."""
    deadline = time.monotonic() + timeout_s
    while not (value := await probe()) and time.monotonic() < deadline:  # noqa: ASYNC110 - as above
        await asyncio.sleep(POLL_INTERVAL_S)
    return value


async def is_full(pool: WarmPool) -> bool:
    """Waits until the pool has all the sandboxes that it is to keep."""
    return await eventually_async(lambda: all(each.depth >= each.size for each in pool.stats().values()))


def has_ended(process: psutil.Process) -> bool:
    """True when the process runs no more, whether its parent has reaped it or not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it was reaped between the two questions
        return True
