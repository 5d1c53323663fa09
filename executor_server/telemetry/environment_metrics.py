"""Metrics of environments of packages: how often one was there, how long others took to make, what was removed."""

from __future__ import annotations

from executor_server.packages import BuildEnd, EnvironmentObserver, EnvironmentUse
from executor_server.telemetry.instruments import Book


class EnvironmentMetrics(EnvironmentObserver):
    """Counts. Labels are words of ours: no package, image or tenant is one."""

    def __init__(self, book: Book) -> None:
        self._requests = book.counter(
            "environment_requests",
            "Requests for an environment of packages; `result`: `hit` when it was ready, or `miss`. A client that waits"
            " asks again and again, and so does the pool.",
            "result",
        )
        self._builds = book.counter(
            "environment_builds",
            "Builds of environments that ended. `reused`: their lock led to one that was there; `refused`: none can be"
            " made of these packages; `failed`: another attempt may do better.",
            "outcome",
        )
        self._build = book.histogram("environment_build_seconds", "Builds of environments, without waiting.", "outcome")
        self._bytes = book.counter("environment_built_bytes", "Bytes of the environments that were made.")
        self._evicted = book.counter("environments_evicted", "Environments that were removed.")
        self._evicted_bytes = book.counter("environment_evicted_bytes", "Bytes of the environments that were removed.")

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
