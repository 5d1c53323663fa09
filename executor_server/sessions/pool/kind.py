"""One kind of sandboxes of the warm pool: those that are kept, their fingerprints, and the attempts to make more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from executor_server.backends import Sandbox
from executor_server.backends.channel import GuestChannel
from executor_server.core import SandboxSpec


@dataclass(frozen=True)
class ReadySandbox:
    """A sandbox whose guest has answered, and the channel to it."""

    sandbox: Sandbox
    channel: GuestChannel
    warm: bool


@dataclass
class PoolStats:
    """Counts of one kind since the pool started: made = depth + hits + lost + outdated + closed."""

    size: int = 0  # sandboxes to keep
    depth: int = 0  # kept sandboxes
    making: int = 0
    hits: int = 0  # kept ones that were taken
    misses: int = 0  # made on demand
    made: int = 0  # made to be kept
    failed: int = 0  # failed attempts to make one
    lost: int = 0  # discarded: died while kept
    outdated: int = 0  # discarded: out of date, replaced by a better one, or surplus
    closed: int = 0  # discarded: kept when the pool closed
    ready_count: int = 0  # got ready, kept or on demand; the seconds that it took follow
    ready_time_sum_s: float = 0.0
    ready_time_last_s: float = 0.0


@dataclass
class Kind:
    """The sandboxes of one spec, and how making them goes."""

    spec: SandboxSpec
    size: int
    fingerprints: dict[str, str] = field(default_factory=dict)  # by backend, as far as they are known
    unanswered: set[str] = field(default_factory=set)  # backends that gave no fingerprint when last asked
    kept: deque[ReadySandbox] = field(default_factory=deque)  # the oldest first
    making: int = 0
    tried_s: float = 0.0  # time when the last attempt began
    backoff_s: float = 0.0
    retry_s: float = 0.0  # time of the next attempt
    counts: PoolStats = field(default_factory=PoolStats)  # without size, depth and making

    @property
    def wants(self) -> bool:
        """True when one more should be made."""
        return len(self.kept) + self.making < self.size

    def is_known(self, ready: ReadySandbox) -> bool:
        """Returns True when its backend has given a fingerprint."""
        return ready.sandbox.backend_name in self.fingerprints

    def is_current(self, ready: ReadySandbox) -> bool:
        return not self.is_known(ready) or ready.sandbox.fingerprint == self.fingerprints[ready.sandbox.backend_name]

    @property
    def best(self) -> ReadySandbox:
        """The oldest kept one of the earliest backend, in the spec's order."""
        return min(self.kept, key=self._rank)

    @property
    def worst(self) -> ReadySandbox:
        """The newest kept one of the latest backend, in the spec's order."""
        return max(reversed(self.kept), key=self._rank)

    @property
    def better(self) -> tuple[str, ...]:
        """The backends that precede one with kept sandboxes: they could not make these sandboxes at the time."""
        return self.spec.backends[: max(map(self._rank, self.kept), default=0)]

    def of(self, backends: Sequence[str]) -> SandboxSpec:
        """Returns the spec with these of its backends only."""
        return replace(self.spec, backends=tuple(backends)) if len(self.spec.backends) > 1 else self.spec

    def _rank(self, ready: ReadySandbox) -> int:
        order = self.spec.backends
        return order.index(ready.sandbox.backend_name) if ready.sandbox.backend_name in order else 0

    def note_ready(self, took_s: float) -> None:
        self.counts.ready_count += 1
        self.counts.ready_time_sum_s += took_s
        self.counts.ready_time_last_s = took_s

    def stats(self) -> PoolStats:
        return replace(self.counts, size=self.size, depth=len(self.kept), making=self.making)
