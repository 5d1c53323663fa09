"""The instruments of the metrics, and the bounds of their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

Instrument = TypeVar("Instrument", Counter, Gauge, Histogram)

PREFIX = "remote_executor_"
OTHER = "other"
"""The label of everything beyond the bound of distinct names."""

# Distinct names per kind of label: profiles, images, tenants.
MAX_NAMES = 200

# A warm session takes milliseconds, a program up to hours.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30, 300, 1800)
# Without this, each counter and histogram has a second series with its creation time, which has no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types


@dataclass(frozen=True)
class Described:
    """One metric, as docs/operations.md lists it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


class Names:
    """Names that an operator chose, as labels: the first `most` are kept, the others become OTHER."""

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(name)
        return name


class Book:
    """Creates instruments and records their meaning for the documentation."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.entries: list[Described] = []

    def counter(self, name: str, meaning: str, *labels: str) -> Counter:
        self._enter(f"{name}_total", "counter", meaning, labels)
        return _remembering(Counter(f"{PREFIX}{name}", meaning, labels, registry=self._registry))

    def gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        self._enter(name, "gauge", meaning, labels)
        return _remembering(Gauge(f"{PREFIX}{name}", meaning, labels, registry=self._registry))

    def histogram(self, name: str, meaning: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        self._enter(name, "histogram", meaning, labels)
        return _remembering(Histogram(f"{PREFIX}{name}", meaning, labels, registry=self._registry, buckets=buckets))

    def _enter(self, name: str, kind: str, meaning: str, labels: tuple[str, ...]) -> None:
        self.entries.append(Described(f"{PREFIX}{name}", kind, labels, meaning))


def _remembering(instrument: Instrument) -> Instrument:
    """Makes an instrument find its series by their labels without the library's conversions and lock.

    Labels are a few texts of ours, given by position, and no series is ever removed. So the cache has no more series
    than the instrument itself.
    """
    instrument.labels = cache(instrument.labels)  # type: ignore[method-assign]
    return instrument
