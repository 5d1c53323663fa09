"""The figures of a measurement: samples, the reference's samples taken between them, and the aim."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WARM_UP_ROUNDS = 3
"""Calls before the first sample: connections, imports and caches are not what is measured."""

Measured = Callable[[], float]
"""Does something once and returns its sample, usually the seconds that it has measured itself."""


@dataclass(frozen=True)
class AtMost:
    """An aim in the figure's own unit."""

    value: float

    def __str__(self) -> str:
        return f"≤ {self.value:g}"


@dataclass(frozen=True)
class AtMostTimes:
    """An aim relative to the reference."""

    factor: float

    def __str__(self) -> str:
        return f"≤ {self.factor:g} x"


@dataclass(frozen=True)
class AtMostMore:
    """An aim in the figure's own unit, above the reference."""

    value: float

    def __str__(self) -> str:
        return f"≤ +{self.value:g}"


@dataclass(frozen=True)
class AtLeast:
    """An aim in the figure's own unit, for values that should be large."""

    value: float

    def __str__(self) -> str:
        return f"≥ {self.value:g}"


Aim = AtMost | AtMostTimes | AtMostMore | AtLeast
_AIMS: dict[str, type[Aim]] = {each.__name__: each for each in (AtMost, AtMostTimes, AtMostMore, AtLeast)}
_RATES = ("1/s", "MB/s", "x of one")


@dataclass(frozen=True)
class Reference:
    """The samples that a figure is compared with, taken alternately with its own, in the same unit."""

    name: str
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    unit: str
    samples: tuple[float, ...]
    reference: Reference | None = None
    aim: Aim | None = None
    # Compares the fastest samples: a disturbance can only add to a long computation.
    by_best: bool = False
    # Compares the slowest samples: for delays that must not happen even now and then.
    by_p99: bool = False

    @property
    def typical(self) -> float:
        return self._typical(self.samples)

    @property
    def reference_typical(self) -> float | None:
        return None if self.reference is None else self._typical(self.reference.samples)

    @property
    def ratio(self) -> float | None:
        return None if self.reference_typical is None else self.typical / self.reference_typical

    @property
    def met(self) -> bool | None:
        """True when the aim is met; None when there is no aim."""
        if isinstance(self.aim, AtMost):
            return self.typical <= self.aim.value
        if isinstance(self.aim, AtLeast):
            return self.typical >= self.aim.value
        if isinstance(self.aim, AtMostTimes):
            return self.ratio is not None and self.ratio <= self.aim.factor
        if isinstance(self.aim, AtMostMore):
            reference = self.reference_typical
            return reference is not None and self.typical - reference <= self.aim.value
        return None

    @property
    def more_is_better(self) -> bool:
        return self.unit in _RATES

    def _typical(self, samples: Sequence[float]) -> float:
        if self.by_p99:
            return quantile(samples, 0.99)
        return min(samples) if self.by_best else statistics.median(samples)


def to_json(figure: Figure) -> dict[str, Any]:
    """Returns the whole figure, for `from_json` in another process."""
    reference, aim = figure.reference, figure.aim
    return {
        "name": figure.name,
        "unit": figure.unit,
        "samples": figure.samples,
        "reference": reference and {"name": reference.name, "samples": reference.samples},
        "aim": aim and {"kind": type(aim).__name__, "value": aim.factor if isinstance(aim, AtMostTimes) else aim.value},
        "by_best": figure.by_best,
        "by_p99": figure.by_p99,
    }


def from_json(entry: Mapping[str, Any]) -> Figure:
    reference, aim = entry["reference"], entry["aim"]
    return Figure(
        entry["name"],
        entry["unit"],
        tuple(entry["samples"]),
        reference and Reference(reference["name"], tuple(reference["samples"])),
        aim and _AIMS[aim["kind"]](aim["value"]),
        by_best=entry["by_best"],
        by_p99=entry["by_p99"],
    )


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The sample below which that fraction of them lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def in_turns(rounds: int, *measured: Measured, warm_up: int = WARM_UP_ROUNDS) -> list[tuple[float, ...]]:
    """Samples of each, taken A B A B …, so that a machine that slows down slows all of them alike."""
    for _ in range(warm_up):
        for each in measured:
            each()
    taken: list[list[float]] = [[] for _ in measured]
    for _ in range(rounds):
        for samples, each in zip(taken, measured, strict=True):
            samples.append(each())
    return [tuple(samples) for samples in taken]


def timed(action: Callable[[], object]) -> float:
    """Milliseconds that `action` takes."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1000


def in_ms(samples: Sequence[float]) -> tuple[float, ...]:
    """Seconds as milliseconds."""
    return tuple(sample * 1000 for sample in samples)
