"""The cost of a call of a host tool for the program that calls it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtMostTimes, Figure, Reference, in_ms, timed

_CALLS = 200
_ECHO_MESSAGE_BYTES = 100

_PROGRAM = """
import time
took = []
for number in range({calls}):
    start = time.perf_counter()
    answer = same(number)
    took.append(time.perf_counter() - start)
    assert answer == number
took
"""


def tool_call(bench: Bench) -> Iterator[Figure]:
    """Timed in the sandbox, one call after the other in one execution, each answered in this process."""
    with bench.local.cold_session() as session:
        session.register_tools({"same": lambda value: value})
        before = _echoed(bench)
        took = session.execute(_PROGRAM.format(calls=bench.rounds(_CALLS))).output
        after = _echoed(bench)
    assert isinstance(took, list)
    reference = Reference("echo, unary", (*before, *after))
    yield Figure("host tool call", "ms", in_ms(took), reference, AtMostTimes(1.3))


def _echoed(bench: Bench) -> tuple[float, ...]:
    """The calls of one execution cannot be interleaved with anything: half the reference before them, half after."""
    return bench.in_turns(_CALLS // 2, lambda: timed(lambda: bench.echo.unary(bytes(_ECHO_MESSAGE_BYTES))))[0]
