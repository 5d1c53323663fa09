"""smolagents' own local executor, in this process and without isolation: for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from smolagents import local_python_executor

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Reference, timed
from benchmarks.references import plain_python_ms
from benchmarks.rows.programs import FOR, ITERATIONS, MIXED, MIXED_SIZE, WHILE

_ROUNDS = 50
_FEW_ITERATIONS = 20_000


def local_executor(bench: Bench) -> Iterator[Figure]:
    """Made, and running `1+1`, with its own defaults: it runs code on a thread, so that it can give up on it."""
    executor = _made()
    made_ms, execute_ms = bench.in_turns(_ROUNDS, lambda: timed(_made), lambda: timed(lambda: executor("1+1")))
    yield Figure("smolagents' local executor: made", "ms", made_ms)
    yield Figure("smolagents' local executor: 1+1", "ms", execute_ms)


def programs(bench: Bench) -> Iterator[Figure]:
    """The loops and the mixed program, small enough to end, with their times scaled to the full size."""
    for name, program, few, size in (
        ("for loop, 10^7", FOR, _FEW_ITERATIONS, ITERATIONS),
        ("while loop, 10^7", WHILE, _FEW_ITERATIONS, ITERATIONS),
        ("mixed program", MIXED, 1, MIXED_SIZE),
    ):
        local_ms, python_ms = bench.in_turns(
            2, partial(_scaled_ms, program, few, size), partial(plain_python_ms, program.format(size=size)), warm_up=0
        )
        title = f"{name}, smolagents' local (scaled)"
        yield Figure(title, "ms", local_ms, Reference("CPython", python_ms), by_best=True)


def _scaled_ms(program: str, few: int, size: int) -> float:
    return run_locally(program.format(size=few)) * size / few


def run_locally(source: str) -> float:
    """Milliseconds that a program takes there. Its own limit of operations, which would end long ones, is lifted."""
    limits = {"MAX_OPERATIONS": 10**12, "MAX_WHILE_ITERATIONS": 10**12}
    before = {name: getattr(local_python_executor, name) for name in limits}
    executor = local_python_executor.LocalPythonExecutor([], timeout_seconds=None)
    executor.send_tools({})
    try:
        for name, value in limits.items():
            setattr(local_python_executor, name, value)
        return timed(lambda: executor(source))
    finally:
        for name, value in before.items():
            setattr(local_python_executor, name, value)


def _made() -> local_python_executor.LocalPythonExecutor:
    executor = local_python_executor.LocalPythonExecutor([])
    executor.send_tools({})
    return executor
