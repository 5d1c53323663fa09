"""smolagents' own local executor, in this process and without isolation: for comparison."""

from __future__ import annotations

from collections.abc import Iterator

from smolagents import local_python_executor

from benchmarks.bench import Bench
from benchmarks.figures import Figure, in_turns, timed

_ROUNDS = 50


def local_executor(_bench: Bench) -> Iterator[Figure]:
    """Made, and asked for `1+1`, with its own defaults: it runs code on a thread, to be able to give up on it."""
    executor = _made()
    made_ms, execute_ms = in_turns(_ROUNDS, lambda: timed(_made), lambda: timed(lambda: executor("1+1")))
    yield Figure("smolagents' local executor: made", "ms", made_ms)
    yield Figure("smolagents' local executor: 1+1", "ms", execute_ms)


def run_locally(source: str) -> float:
    """Milliseconds that a program takes there. Its own limit of operations is lifted, as it would end long ones."""
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
