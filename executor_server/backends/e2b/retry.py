"""Repeats requests to the cloud after failures; the callers use it only where repeating is harmless."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import structlog

from executor_server.backends.e2b.failures import CloudFailure, Final, TryLater
from executor_server.core import SandboxFailure

ATTEMPTS = 4
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
# The longest wait that the cloud may ask for. With a longer one the request fails, and the caller may repeat it.
_LONGEST_ASKED_S = 10.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


async def with_retries(request: Callable[[], Awaitable[T]]) -> T:
    """Returns the first answer of a few attempts. Raises the last CloudFailure, and a `Final` one at once."""
    for attempt, pause_s in enumerate(pauses_s(), start=1):
        try:
            return await request()
        except Final:
            raise
        except CloudFailure as failure:
            asks_too_much = isinstance(failure, TryLater) and (failure.retry_after_s or 0.0) > _LONGEST_ASKED_S
            if attempt >= ATTEMPTS or asks_too_much:
                raise
            wait_s = max(pause_s, asked_s(failure))
        await asyncio.sleep(wait_s)
    raise AssertionError("the pauses have no end")


async def retry_until_cancelled(request: Callable[[], Awaitable[T]], *, unless: tuple[type[SandboxFailure], ...]) -> T:
    """Returns the first answer; tries until it is cancelled.

    For requests on which a session depends: it also repeats after errors that are `Final` elsewhere, such as a key that
    is refused for a moment. Raises the errors in `unless`.
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
    """Seconds that the cloud asks us to wait, up to the longest that we do."""
    asked = failure.retry_after_s if isinstance(failure, TryLater) else None
    return min(asked or 0.0, _LONGEST_ASKED_S)


def pauses_s() -> Iterator[float]:
    """Yields seconds to wait between attempts, without end: longer each time up to a bound, and partly random."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
