"""When a request to the cloud is made again, and after how long: only where repeating it is harmless."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import structlog

from executor_server.backends.e2b.failures import CloudFailure, Final, TryLater
from executor_server.errors import SandboxFailure

ATTEMPTS = 4
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
# What a cloud that asks for patience is given at a time. For more, whoever wanted it may come back.
_PATIENCE_S = 10.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


async def patiently(request: Callable[[], Awaitable[T]]) -> T:
    """The answer to the first of some attempts that has one.

    Raises CloudFailure, that of the last attempt; at once when it is `Final`.
    """
    for attempt, pause_s in enumerate(pauses_s(), start=1):
        try:
            return await request()
        except Final:
            raise
        except CloudFailure as failure:
            asks_too_much = isinstance(failure, TryLater) and (failure.retry_after_s or 0.0) > _PATIENCE_S
            if attempt >= ATTEMPTS or asks_too_much:
                raise
            wait_s = max(pause_s, asked_s(failure))
        await asyncio.sleep(wait_s)
    raise AssertionError("the pauses have no end")


async def persistently(request: Callable[[], Awaitable[T]], *, unless: tuple[type[SandboxFailure], ...]) -> T:
    """The answer to the first attempt that has one; tries until it is cancelled.

    For what is lost when it is given up: it also outlasts what is `Final` elsewhere, such as a key that is refused for
    a moment. Raises what is in `unless`.
    """
    for pause_s in pauses_s():
        try:
            return await request()
        except unless:
            raise
        except CloudFailure as failure:
            _log.debug("cloud_asked_again", reason=str(failure))
            wait_s = max(pause_s, asked_s(failure))
        await asyncio.sleep(wait_s)
    raise AssertionError("the pauses have no end")


def asked_s(failure: CloudFailure) -> float:
    """For how many seconds of patience the cloud asks, of those that it is given."""
    asked = failure.retry_after_s if isinstance(failure, TryLater) else None
    return min(asked or 0.0, _PATIENCE_S)


def pauses_s() -> Iterator[float]:
    """Seconds to wait between attempts, without end: longer each time up to a bound, and never two daemons in step."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
