"""Metrics of package environments: hits, builds, removals."""

from __future__ import annotations

from executor_server.packages import BuildEnd, EnvironmentObserver, EnvironmentUse
from executor_server.telemetry.instruments import Book


class EnvironmentMetrics(EnvironmentObserver):
    """Counts. Labels are our own constants, never packages, images or tenants."""

    def __init__(self, book: Book) -> None:
        self._requests = book.counter(
            "environment_requests",
            "Requests for package environments; `result`: `hit` if it was ready, else `miss`. Waiting clients and the"
            " pool ask repeatedly.",
            "result",
        )
        self._builds = book.counter(
            "environment_builds",
            "Finished builds of environments. `reused`: their lock led to an existing one; `refused`: these packages"
            " can't be built; `failed`: another attempt may succeed.",
            "outcome",
        )
        self._build = book.histogram("environment_build_seconds", "Duration of builds, without waiting.", "outcome")
        self._bytes = book.counter("environment_built_bytes", "Bytes of built environments.")
        self._evicted = book.counter("environments_evicted", "Removed environments.")
        self._evicted_bytes = book.counter("environment_evicted_bytes", "Bytes of removed environments.")

    def environment_hit(self, use: EnvironmentUse, environment_id: str) -> None:
        self._requests.labels("hit").inc()

    def environment_missed(self, use: EnvironmentUse) -> None:
        self._requests.labels("miss").inc()

    def build_ended(self, end: BuildEnd) -> None:
        self._builds.labels(end.label).inc()
        self._build.labels(end.label).observe(end.took_s)
        if end.outcome == "made":
            self._bytes.inc(end.size_bytes)

    def environment_evicted(self, environment_id: str, freed_bytes: int, reason: str) -> None:
        self._evicted.inc()
        self._evicted_bytes.inc(max(freed_bytes, 0))
