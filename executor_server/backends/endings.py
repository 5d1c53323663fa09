"""How sandboxes end: each once and to its end, and again where an attempt failed; and several at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from executor_server.errors import SandboxFailure

T = TypeVar("T")


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


async def outcomes_of(attempts: Iterable[Awaitable[T]]) -> list[T | SandboxFailure]:
    """What became of all, which run at the same time; anything else than a SandboxFailure is raised, after all."""
    outcomes: list[T | SandboxFailure] = []
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, SandboxFailure):
            raise outcome
        outcomes.append(outcome)
    return outcomes


async def failures_of(attempts: Iterable[Awaitable[object]]) -> list[SandboxFailure]:
    """Those that failed as such a thing may; anything else is raised."""
    return [outcome for outcome in await outcomes_of(attempts) if isinstance(outcome, SandboxFailure)]


def check_none_left(failures: list[SandboxFailure]) -> None:
    """At the end of a backend: raises SandboxFailure when there are failures to end its sandboxes."""
    if failures:
        told = f"{len(failures)} sandboxes are left over, for the next daemon of this state directory to destroy"
        raise SandboxFailure(f"{told}: {failures[0]}") from failures[0]
