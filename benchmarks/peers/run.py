"""The peers in turns: each row is taken of all of them, again and again, a few samples at a time."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.line_process import LineProcess, WorkerFailure
from benchmarks.peers.environments import DRIVERS, ROOT, Peer, python_of, version_of
from benchmarks.references import Unmeasurable, require_docker_image, run

_ANSWER_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 120.0
_STARTS = 3
_TIME_S = 1800.0
"""Seconds after which no further turn begins."""
_FAILURES = 2
"""Turns of a row that may fail before it is over for the peer: one may be the machine's fault."""


@dataclass(frozen=True)
class Row:
    """A request to each driver, with the number of turns and the samples of each turn."""

    name: str
    turns: int
    samples: int
    figures: tuple[str, ...]


ROWS = (
    Row("cold", 5, 1, ("ready, cold",)),
    Row("warm", 5, 2, ("ready, warm",)),
    Row("add", 6, 20, ("1+1",)),
    Row("lines", 6, 3, ("first of 1,000 lines", "1,000 lines")),
    Row("move", 4, 1, ("10 MB in + out",)),
    Row("lives", 3, 2, ("lives, 4 clients",)),
    Row("memory", 2, 1, ("idle memory",)),
)
UNITS = {"lives, 4 clients": "1/s", "idle memory": "MiB"}
"""The other figures are in ms."""
FIGURES = tuple(figure for row in ROWS for figure in row.figures)


@dataclass
class Measured:
    """A peer's figures, and the reasons where there are none."""

    peer: Peer
    version: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Figure by figure, why there is none."""
    failures: dict[str, list[str]] = field(default_factory=dict)
    """Row by row, turns that failed."""

    def cannot(self, reason: str, figures: Sequence[str] = FIGURES) -> None:
        for figure in figures:
            self.reasons.setdefault(figure, reason)


class _Driver:
    """A peer's process, which is started again when it has died."""

    def __init__(self, measured: Measured, python: Path, directory: Path, network: str) -> None:
        self.measured = measured
        self._python, self._directory, self._network = python, directory, network
        self._process: LineProcess | None = None
        self._starts = 0

    def measure(self, row: Row) -> bool:
        """Takes one turn; False when this row is over for the peer."""
        measured = self.measured
        try:
            answer = self._started().ask({"row": row.name, "count": row.samples}, _ANSWER_TIMEOUT_S)
        except WorkerFailure as failure:
            self.close()
            answer = {"failed": str(failure)}
        if "cannot" in answer:
            measured.cannot(str(answer["cannot"]), row.figures)
            return False
        if "failed" in answer:
            failures = measured.failures.setdefault(row.name, [])
            failures.append(str(answer["failed"]))
            measured.cannot(f"failed: {failures[0]}", row.figures)
            return len(failures) < _FAILURES
        for figure, samples in answer["figures"].items():
            measured.samples.setdefault(figure, []).extend(map(float, samples))
        for figure in set(row.figures) - answer["figures"].keys():
            measured.reasons[figure] = "it gives all output at the end"
        return True

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self) -> LineProcess:
        if self._process is not None:
            return self._process
        if self._starts >= _STARTS:
            raise WorkerFailure(f"its process has ended {self._starts} times")
        self._starts += 1
        peer = self.measured.peer
        environment = {**os.environ, "BENCH_NETWORK": self._network}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.pop("PYTHONPATH", None)
        if peer.is_ours:
            environment["PYTHONPATH"] = str(ROOT)
        self._process = LineProcess(
            [str(self._python), str(DRIVERS / peer.driver), *peer.arguments],
            directory=self._directory,
            log=self._directory / f"{peer.name}.log",
            environment=environment,
        )
        self._process.ask({"row": "version", "count": 1}, _START_TIMEOUT_S)
        return self._process


def measure_peers(found: Sequence[Measured], rows: Sequence[Row], say: Callable[[str], None]) -> None:
    """Fills in `found`. A peer that can't be set up, or fails, has the reason in each cell; the others have figures."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp")))
        network = stack.enter_context(_network()) if any(each.peer.image for each in found) else ""
        drivers = []
        for measured in found:
            try:
                drivers.append(_Driver(measured, _ready(measured), directory, network))
            except Unmeasurable as reason:
                measured.cannot(str(reason))
        for driver in drivers:
            stack.callback(driver.close)
        ends_s = time.monotonic() + _TIME_S
        for row in rows:
            left = list(drivers)
            for turn in range(row.turns):
                began_s = time.monotonic()
                if began_s > ends_s:
                    say(f"{row.name}: left out, the time is over")
                    break
                left = [driver for driver in left if driver.measure(row)]
                say(f"{row.name}, turn {turn + 1} of {row.turns}: {time.monotonic() - began_s:.1f} s")
                left = left[1:] + left[:1]  # another one begins the next turn


def _ready(measured: Measured) -> Path:
    peer = measured.peer
    if peer.unavailable:
        raise Unmeasurable(peer.unavailable)
    if peer.image:
        require_docker_image(peer.image)
    python = python_of(peer)
    measured.version = version_of(peer)
    return python


@contextmanager
def _network() -> Iterator[str]:
    """A network of the Engine's own, since it may have no default one; "" without an Engine."""
    name = f"bench-{secrets.token_hex(4)}"
    try:
        run(["docker", "network", "create", name])
    except Exception:  # noqa: BLE001 - peers that need it report that
        yield ""
        return
    try:
        yield name
    finally:
        # Containers may be left in it, when a peer failed or was stopped halfway.
        left = run(["docker", "ps", "--all", "--quiet", "--filter", f"network={name}"]).decode().split()
        if left:
            run(["docker", "rm", "--force", *left])
        run(["docker", "network", "rm", name])
