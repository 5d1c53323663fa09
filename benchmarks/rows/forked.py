"""Sessions of the local backend with its fork server (`sandbox.fork_server = "shared"`): what it gains, row by row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.bench import Bench
from benchmarks.figures import AtLeast, AtMost, AtMostTimes, Figure, Reference, timed
from benchmarks.references import bare_bwrap_command, run
from benchmarks.rows.memory import crowded
from benchmarks.rows.sessions import CLIENTS, cold, created, first_imports, lives

_KIND = ", fork server"
_LIVES_A_SECOND = 60
_BURST, _BURST_ROUNDS = 12, 5
# Seconds in which the pool makes the next sandbox: that slows both sides of a row.
_REFILL_S, _BURST_PAUSE_S = 0.2, 0.5
# Sessions until a shape is kept ready, and seconds until it has its sandbox.
_ASKED, _FIRST_S = 3, 5.0


def ready(bench: Bench) -> Iterator[Figure]:
    """Sessions of a shape that was requested before, and cold ones; the first import of the usual libraries."""
    forked, aims = bench.forked, (AtMostTimes(0.5), AtMostTimes(1))
    for _ in range(_ASKED):
        created(forked.asked_session)
    time.sleep(_FIRST_S)
    yield from cold(bench, forked, _KIND, aims, create=forked.asked_session, name="asked for before", pause_s=_REFILL_S)
    yield from cold(bench, forked, _KIND, (AtMostTimes(2), None), pause_s=_REFILL_S)
    yield first_imports(bench, bench.forked, _KIND, AtMost(5))


def throughput(bench: Bench) -> Iterator[Figure]:
    """Whole lives per second."""
    bare = bare_bwrap_command()
    name = f"sessions, {CLIENTS} clients{_KIND}"
    yield lives(bench, bench.forked.client, name, "bwrap python", lambda: run(bare), AtLeast(_LIVES_A_SECOND))


def burst(bench: Bench) -> Iterator[Figure]:
    """Many cold sessions at once: each of them, and the last; some time after the last burst."""
    bare = bare_bwrap_command()
    each_ms: list[float] = []

    with ThreadPoolExecutor(_BURST) as threads:

        def at_once() -> float:
            time.sleep(_BURST_PAUSE_S)
            made = [
                each.result() for each in [threads.submit(created, bench.forked.cold_session) for _ in range(_BURST)]
            ]
            each_ms.extend(took_ms for took_ms, _ in made)
            return max(took_ms for took_ms, _ in made)

        def bare_at_once() -> float:
            return timed(lambda: [each.result() for each in [threads.submit(run, bare) for _ in range(_BURST)]])

        last_ms, bare_ms = bench.in_turns(_BURST_ROUNDS, at_once, bare_at_once, warm_up=1)
    reference = Reference("bwrap python, as many", bare_ms)
    yield Figure(f"session ready, cold, one of {_BURST} at once{_KIND}", "ms", tuple(each_ms), reference)
    yield Figure(f"session ready, cold, last of {_BURST} at once{_KIND}", "ms", last_ms, reference)


def crowd(bench: Bench) -> Iterator[Figure]:
    """Twenty idle sessions."""
    yield from crowded(bench.forked, _KIND, has_aim=True)
