"""The end of sandboxes: each is destroyed once and completely, or again if an attempt failed, several at a time.

It also counts creations, since a backend that closes must wait for those that have begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from executor_server.backends.base import Sandbox
from executor_server.core import SandboxFailure

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class Teardown:
    """The end of one sandbox. It continues when its caller is cancelled, and can be repeated when it failed."""

    def __init__(self, sandbox_id: str, destroy: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = f"destroy {sandbox_id}"
        self._destroy = destroy
        self._attempt: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Raises what `destroy` raises."""
        if self._attempt is None or self.has_failed:
            self._attempt = asyncio.create_task(self._destroy(), name=self._name)
        await asyncio.shield(self._attempt)

    @property
    def has_begun(self) -> bool:
        return self._attempt is not None

    @property
    def has_failed(self) -> bool:
        """True when the last attempt failed, so that something of the sandbox is still there."""
        attempt = self._attempt
        return attempt is not None and attempt.done() and (attempt.cancelled() or attempt.exception() is not None)


class Creations:
    """The creations that are under way in a backend."""

    def __init__(self) -> None:
        self._running: set[asyncio.Future[None]] = set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Surrounds one creation, including the teardown after a failed one."""
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.add(finished)
        try:
            yield
        finally:
            self._running.discard(finished)
            finished.set_result(None)

    async def finished(self) -> None:
        """Waits for all of them. Each ends by itself; its sandbox is then known to be complete or destroyed."""
        await asyncio.gather(*self._running)


async def destroy_failed(sandbox: Sandbox) -> None:
    """Destroys a sandbox whose creation failed; a second failure is logged, since the caller raises the first one."""
    try:
        await sandbox.destroy()
    except SandboxFailure as failure:
        _log.warning("sandbox_left_over", sandbox_id=sandbox.sandbox_id, reason=str(failure))


async def outcomes_of(attempts: Iterable[Awaitable[T]]) -> list[T | SandboxFailure]:
    """Runs all at the same time and returns results or SandboxFailures. Other errors are raised once all have ended."""
    outcomes: list[T | SandboxFailure] = []
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, SandboxFailure):
            raise outcome
        outcomes.append(outcome)
    return outcomes


async def failures_of(attempts: Iterable[Awaitable[object]]) -> list[SandboxFailure]:
    """Runs all at the same time and returns the SandboxFailures. Any other error is raised once all have ended."""
    return [outcome for outcome in await outcomes_of(attempts) if isinstance(outcome, SandboxFailure)]


def check_none_left(failures: list[SandboxFailure]) -> None:
    """Raises SandboxFailure when a closing backend failed to destroy some of its sandboxes."""
    if failures:
        left = f"{len(failures)} sandboxes are left over, for the next daemon of this state directory to destroy"
        raise SandboxFailure(f"{left}: {failures[0]}") from failures[0]


def swept(count: int, failures: list[SandboxFailure], verb: str) -> int:
    """Logs and returns how many of `count` a sweep has destroyed. Raises SandboxFailure when some can't be."""
    if count > len(failures):
        _log.info("sandboxes_swept", count=count - len(failures))
    if failures:
        raise SandboxFailure(f"{len(failures)} sandboxes can't be {verb}") from failures[0]
    return count
