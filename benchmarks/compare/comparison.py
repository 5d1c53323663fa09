"""Two sides in turns, and what their rounds say about a row."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

from benchmarks.bench import Effort
from benchmarks.compare.sides import ROOT, Side
from benchmarks.figures import Figure, Reference, from_json
from benchmarks.intervals import FEWEST, Interval, median_interval
from benchmarks.line_process import LineProcess, WorkerFailure
from benchmarks.table import title

_ANSWER_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 60.0
_STARTS = 3
"""Times that a side's process may be started: a row that kills it is left out then."""

LEAST_CHANGE = 0.01
"""Smaller changes are not reported, however sure: the speed of any machine varies by more within an hour."""


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    NONE = ""


@dataclass(frozen=True)
class Pair:
    """A figure of both sides. Each round has one typical sample of each, taken soon after each other."""

    base: Figure
    head: Figure
    ratios: tuple[float, ...]
    """The head's typical sample divided by the base's, for each round."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> Interval | None:
        return median_interval(self.ratios)

    @property
    def verdict(self) -> Verdict:
        """WORSE or BETTER if the whole interval lies on one side of 1 (no change)."""
        interval = self.interval
        if interval is None or abs(self.ratio - 1) < LEAST_CHANGE or interval.low <= 1 <= interval.high:
            return Verdict.NONE
        return Verdict.BETTER if (self.ratio > 1) == self.head.more_is_better else Verdict.WORSE


@dataclass(frozen=True)
class Comparison:
    base: str
    head: str
    pairs: tuple[Pair, ...]
    missing: Mapping[str, str]
    """Row by row, the reason why it, or some of it, was not compared."""
    rounds: int
    took_s: float
    differences: tuple[str, ...]
    """Packages whose versions differ between the sides."""


@dataclass
class _Taken:
    """A figure's parts, round by round."""

    base: list[Figure] = field(default_factory=list)
    head: list[Figure] = field(default_factory=list)


class Worker:
    """The process of one side, which may be started again when a row has ended it."""

    def __init__(self, side: Side, effort: Effort, tree: Path, *, is_head: bool) -> None:
        self.side, self.is_head = side, is_head
        self._effort, self._tree = effort, tree
        self._starts = 0
        self._process: LineProcess | None = None

    def ask(self, request: Mapping[str, Any], timeout_s: float = _ANSWER_TIMEOUT_S) -> dict[str, Any]:
        """Raises WorkerFailure."""
        if self._process is None:
            self._process = self._started()
        try:
            return self._process.ask(request, timeout_s)
        except WorkerFailure:
            self.close()
            raise

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self) -> LineProcess:
        if self._starts >= _STARTS:
            raise WorkerFailure(f"its process has ended {self._starts} times")
        self._starts += 1
        environment = {**os.environ, "PYTHONPATH": str(self._tree)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        effort = (str(self._effort.samples), str(self._effort.programs))
        return LineProcess(
            [str(self.side.python), "-m", "benchmarks.compare.worker", *effort],
            directory=self._tree,
            log=self._tree / ("head.log" if self.is_head else "base.log"),
            environment=environment,
        )


def compare(
    base: Side,
    head: Side,
    rows: Sequence[str],
    *,
    effort: Effort,
    rounds: int,
    time_s: float,
    say: Callable[[str], None],
) -> Comparison:
    """Measures the rows round by round: each round has all of them, each on one side and then on the other.

    The first round warms up and does not count. The side that is first changes from round to round, so that a load
    that grows helps neither. After `time_s` the round that runs is the last, once there are enough for an interval.
    """
    began_s = time.monotonic()
    with _workers(base, head, effort) as workers:
        differences = _differences(workers)
        taken: dict[tuple[str, str], _Taken] = {}
        missing: dict[str, str] = {}
        left = list(rows)
        done = 0
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warming up")
            for row in list(left):
                if not _take(workers if number % 2 else workers[::-1], row, taken if number else {}, missing):
                    left.remove(row)
            done = number
            if time.monotonic() - began_s > time_s and done >= FEWEST:
                break
    pairs = tuple(pair for each in taken.values() if (pair := _paired(each)) is not None)
    return Comparison(base.name, head.name, pairs, missing, done, time.monotonic() - began_s, differences)


def _take(workers: Sequence[Worker], row: str, taken: dict[tuple[str, str], _Taken], missing: dict[str, str]) -> bool:
    """Takes one turn of each side. False if they have no figure in common, which ends the row."""
    found: dict[bool, dict[str, Figure]] = {}
    for worker in workers:
        try:
            answer = worker.ask({"row": row})
        except WorkerFailure as failure:
            missing[row] = f"{worker.side.name}: {failure}"
            return False
        found[worker.is_head] = {title(figure): figure for figure in map(from_json, answer["figures"])}
        if answer["missing"]:
            missing[row] = f"{worker.side.name}: {answer['missing']}"
    both = [name for name in found[True] if name in found[False]]
    if lonely := found[True].keys() ^ found[False].keys():
        missing.setdefault(row, f"on one side only: {', '.join(sorted(lonely))}")
    for name in both:
        each = taken.setdefault((row, name), _Taken())
        each.base.append(found[False][name])
        each.head.append(found[True][name])
    return bool(both)


def _paired(taken: _Taken) -> Pair | None:
    pairs = [(base.typical, head.typical) for base, head in zip(taken.base, taken.head, strict=True)]
    ratios = tuple(head / base for base, head in pairs if base > 0)
    if not ratios:
        return None
    return Pair(_joined(taken.base), _joined(taken.head), ratios)


def _joined(figures: Sequence[Figure]) -> Figure:
    """All rounds as one figure."""
    first = figures[0]
    reference = first.reference and Reference(
        first.reference.name,
        tuple(sample for figure in figures if figure.reference for sample in figure.reference.samples),
    )
    return replace(first, samples=tuple(sample for figure in figures for sample in figure.samples), reference=reference)


def _differences(workers: Sequence[Worker]) -> tuple[str, ...]:
    """Starts both sides, and compares their packages."""
    base, head = (worker.ask({"about": "versions"}, _START_TIMEOUT_S) for worker in workers)
    return tuple(
        f"{name} {base.get(name, 'missing')} and {head.get(name, 'missing')}"
        for name in {**base, **head}
        if base.get(name) != head.get(name)
    )


@contextmanager
def _workers(base: Side, head: Side, effort: Effort) -> Iterator[tuple[Worker, Worker]]:
    """Both run a copy of this commit's rows: neither the checkout's own rows nor an edit meanwhile affects it."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        tree = Path(directory)
        copytree(ROOT / "benchmarks", tree / "benchmarks", ignore=ignore_patterns("__pycache__", "reference"))
        workers = Worker(base, effort, tree, is_head=False), Worker(head, effort, tree, is_head=True)
        try:
            yield workers
        finally:
            for worker in workers:
                worker.close()
