"""The observer of environments: notified of requests, builds and removals (metrics, audit).

The tenant is not part of the approved spec, since equal specs share a sandbox. So it is passed in a context variable,
which the tasks that create a sandbox inherit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from executor_server.core.lifecycle import pass_on
from executor_server.packages.lock import Lock

_requester: ContextVar[str] = ContextVar("environment_requester", default="")

Outcome = Literal["made", "reused", "refused", "failed", "timed out", "cancelled"]
"""The end of a build. "reused": the lock's environment existed. "refused": EnvironmentFailed. "failed": another attempt
may succeed."""


@dataclass(frozen=True)
class EnvironmentUse:
    """The packages that are built or used, and the requesting tenant."""

    requester: str  # the first tenant; empty for the daemon's own pool
    backend: str
    image: str
    requirements: tuple[str, ...]


@dataclass(frozen=True)
class BuildEnd:
    """A build that has ended."""

    use: EnvironmentUse
    lock: Lock | None  # None: nothing was resolved
    outcome: Outcome
    took_s: float
    size_bytes: int
    error: str  # the text that the client reads

    @property
    def label(self) -> str:
        """The outcome as one word, for records and metrics."""
        return self.outcome.replace(" ", "_")


class EnvironmentObserver:
    """Notified in the event loop, right after something has happened. Must neither block nor raise."""

    def environment_hit(self, use: EnvironmentUse, environment_id: str) -> None:
        """A request found its environment ready. Not a count of sessions, since the pool requests often."""

    def environment_missed(self, use: EnvironmentUse) -> None:
        """A request found no environment: a build began or was queued for it, or it got that of a build under way."""

    def build_started(self, use: EnvironmentUse) -> None:
        """A build has its turn."""

    def build_ended(self, end: BuildEnd) -> None:
        """A build has ended."""

    def environment_evicted(self, environment_id: str, freed_bytes: int, reason: str) -> None:
        """An environment was removed: to make room, by an administrator, or because it was damaged."""


class EnvironmentObservers(EnvironmentObserver):
    """Notifies several."""

    def __init__(self) -> None:
        self._observers: list[EnvironmentObserver] = []

    def add(self, observer: EnvironmentObserver) -> None:
        self._observers.append(observer)
        pass_on(self, EnvironmentObserver, self._observers)


def current_requester() -> str:
    """Returns the tenant for whom this task runs; empty for the daemon itself."""
    return _requester.get()


@contextmanager
def requested_by(tenant: str) -> Iterator[None]:
    """Sets the tenant for environment requests of the block and of tasks that it starts."""
    token = _requester.set(tenant)
    try:
        yield
    finally:
        _requester.reset(token)
