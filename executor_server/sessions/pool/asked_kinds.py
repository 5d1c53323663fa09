"""The kinds of sandboxes that sessions ask for often, so that one of each is worth keeping ready.

Clients can ask for any number of kinds, so their number is bounded; the least recently requested one goes first.

This module knows neither the pool nor backends, and reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from executor_server.core import SandboxSpec

# Kinds whose requests are counted; the least recently asked is forgotten for a new one.
_COUNTED_MAX = 64


@dataclass(frozen=True)
class AskedSettings:
    """The requests that make a kind worth keeping, and how many kinds are kept."""

    max_kinds: int = 2  # 0: none is ever kept
    requests: int = 3  # within `within_s`
    within_s: float = 600.0
    kept_s: float = 600.0  # since the last request


class AskedKinds:
    """Counts the requests for each kind, and names those to keep. Times are of one monotonic clock."""

    def __init__(self, settings: AskedSettings) -> None:
        self._settings = settings
        self._requests: OrderedDict[SandboxSpec, deque[float]] = OrderedDict()  # the least recently asked first
        self._kept: dict[SandboxSpec, None] = {}

    @property
    def kept(self) -> frozenset[SandboxSpec]:
        return frozenset(self._kept)

    def note(self, spec: SandboxSpec, now_s: float) -> None:
        """Notes that a session got a sandbox of this kind."""
        settings = self._settings
        if not settings.max_kinds:
            return
        times = self._requests.setdefault(spec, deque(maxlen=settings.requests))
        times.append(now_s)
        self._requests.move_to_end(spec)
        if len(times) == settings.requests and now_s - times[0] <= settings.within_s:
            self._kept[spec] = None
        while len(self._kept) > settings.max_kinds:
            del self._kept[min(self._kept, key=self._last_request_s)]
        while len(self._requests) > _COUNTED_MAX:
            self.forget(next(iter(self._requests)))

    def expire(self, now_s: float) -> None:
        """Forgets the kinds that were not asked for lately."""
        for spec in [spec for spec in self._kept if now_s - self._last_request_s(spec) > self._settings.kept_s]:
            self.forget(spec)

    def forget(self, spec: SandboxSpec) -> None:
        """Forgets a kind and its requests. Idempotent."""
        self._requests.pop(spec, None)
        self._kept.pop(spec, None)

    def clear(self) -> None:
        """Forgets all kinds: the policy that approved them has changed, or sandboxes are scarce."""
        self._requests.clear()
        self._kept.clear()

    def _last_request_s(self, spec: SandboxSpec) -> float:
        return self._requests[spec][-1]
