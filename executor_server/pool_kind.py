"""One kind of sandboxes of the warm pool: what is kept, which of it is up to date, and how making it goes."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from executor_server.backends.base import Sandbox
from executor_server.guest_channel import GuestChannel
from executor_server.model import SandboxSpec


@dataclass(frozen=True)
class ReadySandbox:
    """A sandbox whose guest has answered, and the channel to it."""

    sandbox: Sandbox
    channel: GuestChannel
    warm: bool


@dataclass(frozen=True)
class PoolStats:
    """One kind's counts since the pool started: made = depth + hits + lost + outdated + closed."""

    size: int  # how many are to be kept
    depth: int  # how many are
    making: int
    hits: int  # takers that got a kept one
    misses: int  # takers for whom one had to be made
    made: int  # to be kept
    failed: int  # attempts to
    lost: int  # discarded: died while kept
    outdated: int  # discarded: made of what is out of date, or replaced by a better one, or more than are wanted
    closed: int  # discarded: kept when the pool closed
    ready_count: int  # how many got ready, to be kept or on the spot, and how long it took
    ready_time_sum_s: float
    ready_time_last_s: float


class Discard(enum.Enum):
    LOST = "lost"
    OUTDATED = "outdated"
    CLOSED = "closed"


@dataclass
class Kind:
    """The sandboxes of one spec, and how making them goes."""

    spec: SandboxSpec
    size: int
    fingerprints: dict[str, str] = field(default_factory=dict)  # of what is up to date by backend, as far as is known
    unanswered: set[str] = field(default_factory=set)  # the backends that could not say it when they were last asked
    kept: deque[ReadySandbox] = field(default_factory=deque)  # the oldest first
    making: int = 0
    tried_s: float = 0.0  # when one was last begun
    backoff_s: float = 0.0
    retry_s: float = 0.0  # not before
    failing: bool = False
    hits: int = 0
    misses: int = 0
    made: int = 0
    failed: int = 0
    discarded: Counter[Discard] = field(default_factory=Counter)
    ready_count: int = 0
    ready_time_sum_s: float = 0.0
    ready_time_last_s: float = 0.0

    @property
    def wants(self) -> bool:
        """Whether one more is to be made. While they fail, one at a time is enough to find out when that is over."""
        return len(self.kept) + self.making < self.size and not (self.failing and self.making)

    def is_known(self, ready: ReadySandbox) -> bool:
        """Whether its backend has said what is up to date."""
        return ready.sandbox.backend_name in self.fingerprints

    def is_current(self, ready: ReadySandbox) -> bool:
        return not self.is_known(ready) or ready.sandbox.fingerprint == self.fingerprints[ready.sandbox.backend_name]

    @property
    def best(self) -> ReadySandbox:
        """Of those that are kept, the oldest of the earliest backend in the spec's order."""
        return min(self.kept, key=self._rank)

    @property
    def worst(self) -> ReadySandbox:
        """Of those that are kept, the newest of the latest backend in the spec's order."""
        return max(reversed(self.kept), key=self._rank)

    @property
    def better(self) -> tuple[str, ...]:
        """The backends that go before one of which something is kept, because they could not make it then."""
        return self.spec.backends[: max(map(self._rank, self.kept), default=0)]

    def of(self, backends: Sequence[str]) -> SandboxSpec:
        """The spec with no other backends than these of its own."""
        return replace(self.spec, backends=tuple(backends)) if len(self.spec.backends) > 1 else self.spec

    def _rank(self, ready: ReadySandbox) -> int:
        order = self.spec.backends
        return order.index(ready.sandbox.backend_name) if ready.sandbox.backend_name in order else 0

    def note_ready(self, took_s: float) -> None:
        self.ready_count += 1
        self.ready_time_sum_s += took_s
        self.ready_time_last_s = took_s

    def stats(self) -> PoolStats:
        return PoolStats(
            size=self.size,
            depth=len(self.kept),
            making=self.making,
            hits=self.hits,
            misses=self.misses,
            made=self.made,
            failed=self.failed,
            lost=self.discarded[Discard.LOST],
            outdated=self.discarded[Discard.OUTDATED],
            closed=self.discarded[Discard.CLOSED],
            ready_count=self.ready_count,
            ready_time_sum_s=self.ready_time_sum_s,
            ready_time_last_s=self.ready_time_last_s,
        )
