"""How sandboxes end: each once and to its end, and again where an attempt failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from executor_server.errors import SandboxFailure


class Ending:
    """The end of one sandbox: it goes on when whoever waits for it is cancelled, and can be repeated when it failed."""

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
        """Whether the last attempt did, so that something of the sandbox is still there."""
        attempt = self._attempt
        return attempt is not None and attempt.done() and (attempt.cancelled() or attempt.exception() is not None)


async def failures_of(attempts: Iterable[Awaitable[None]]) -> list[SandboxFailure]:
    """Those that failed as such a thing may; anything else is raised."""
    failures = []
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(result, SandboxFailure):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
    return failures


def check_none_left(failures: list[SandboxFailure]) -> None:
    """At the end of a backend: raises SandboxFailure when there are failures to end its sandboxes."""
    if failures:
        told = f"{len(failures)} sandboxes are left over, for the next daemon of this state directory to destroy"
        raise SandboxFailure(f"{told}: {failures[0]}") from failures[0]
