"""A fleet in simulation: what many nodes gain, and what they cost their front (benchmarks/simulated_fleet.py)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtLeast, AtMost, Figure, in_ms
from benchmarks.simulated_fleet import simulated_fleet

_NODES = 1000
_SESSIONS = 100
_PLACEMENTS = 5000
_SECONDS = 20.0
_ROUNDS = 3
_MIB = 1024 * 1024


def simulated(_bench: Bench) -> Iterator[Figure]:
    """Creations on eight nodes compared with one; then the front of a thousand nodes with a hundred sessions each."""
    yield Figure("creations on 8 nodes, simulated", "x of one", tuple(map(_gain, range(_ROUNDS))), aim=AtLeast(7.2))
    tracemalloc.start()
    try:
        with simulated_fleet(_NODES, _SESSIONS):
            yield Figure("front's memory, 1,000 nodes", "MiB", (tracemalloc.get_traced_memory()[0] / _MIB,))
    finally:
        tracemalloc.stop()
    with simulated_fleet(_NODES, _SESSIONS) as fleet:
        placements = in_ms([fleet.place() for _ in range(_PLACEMENTS)])
        yield Figure("placement, 1,000 nodes", "ms", placements)
        yield Figure("placement, 1,000 nodes, p99", "ms", placements, aim=AtMost(10), by_p99=True)
        reports = in_ms([fleet.answer_report(name) for _ in range(5) for name in fleet.names])
        yield Figure("a report and its renewal, 1,000 nodes", "ms", reports)


def _gain(_round: int) -> float:
    """Returns how many sessions eight nodes make in the time in which one node makes one."""
    rates = []
    for nodes in (1, 8):
        with simulated_fleet(nodes) as fleet:
            rates.append(fleet.creations_per_s(_SECONDS))
    return rates[1] / rates[0]
