"""Sessions of the local backend with its fork server (`sandbox.fork_server = "shared"`): what it gains, row by row."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtLeast, AtMost, AtMostTimes, Figure
from benchmarks.references import bare_bwrap_command, run
from benchmarks.rows.memory import crowded
from benchmarks.rows.sessions import CLIENTS, cold, first_imports, lives

_KIND = ", fork server"
_LIVES_A_SECOND = 60


def ready(bench: Bench) -> Iterator[Figure]:
    """Cold sessions, with a first execution, and with the first import of the usual libraries."""
    yield from cold(bench, bench.forked, _KIND, (AtMostTimes(0.5), AtMostTimes(1)))
    yield first_imports(bench, bench.forked, _KIND, AtMost(5))


def throughput(bench: Bench) -> Iterator[Figure]:
    """Whole lives a second."""
    bare = bare_bwrap_command()
    name = f"sessions, {CLIENTS} clients{_KIND}"
    yield lives(bench, bench.forked.client, name, "bwrap python", lambda: run(bare), AtLeast(_LIVES_A_SECOND))


def crowd(bench: Bench) -> Iterator[Figure]:
    """Twenty idle sessions."""
    yield from crowded(bench.forked, _KIND, has_aim=True)
