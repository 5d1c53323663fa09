"""Counting the operations of agent code, and ending it when its budget is spent.

The instrumented code (instrument.py) calls `next(meter.ticks)` at the head of every loop body, comprehension element
and function. Both `next` and the iterator are constants of the code, so one operation costs one call of a C function.

Promises
- A budget of N allows exactly N ticks; tick N+1 raises, and so does every tick after it until `start` or `finish`.
- The same program spends the same count.
- `ticks` is one object for the life of the interpreter: a function defined by an earlier execution counts against the
  current one. Between executions (background threads) ticks are free.

How it works. `ticks` is an `itertools.chain` over a list of segments. A budget becomes a few `repeat` iterators
(chunks), then a last segment that raises for ever. All of it runs in C until the budget is spent, and getting the next
segment calls nothing, for a reason: an exception on that way, by a signal handler or because the program is at its
recursion limit, would make `chain` drop its source for good, and counting would end. For the same reason the list never
runs out: its last segment ends only by itself, when its phase is over and another one stands behind it. What is over is
replaced by nothing, not removed, since the position in the list is all that its iterator knows; a place costs 8 bytes.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import lru_cache
from itertools import chain, repeat
from operator import length_hint

from .control import ControlException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

FIRST_CHUNK_OPERATIONS = 1024
# The next chunk is a quarter of those before it. What is left of the chunk in use when an execution ends has to be
# drained one by one: so that costs a few percent of the execution at most, and a budget of 10**8 takes 54 chunks.
CHUNK_GROWTH_DIVISOR = 4


class OperationLimitExceeded(ControlException):
    """The operation budget is spent."""

    __module__ = "builtins"  # so that a traceback shows its plain name

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"Reached the max number of operations of {limit}. Maybe there is an infinite loop somewhere in the code, "
            "or you're just asking too many calculations."
        )
        self.limit = limit


class _Ticks(chain):  # type: ignore[type-arg]  # a plain class at run time on 3.9
    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle ships functions with their constants (joblib does). Another process has no meter: free ticks.
        return (repeat, (True,))


class Meter:
    """Counts operations of the current execution."""

    def __init__(self) -> None:
        self.limit = 0
        self.exceeded = False
        self._chunks: list[repeat[bool]] = []
        self._spent: int | None = 0
        self._phase = 0
        self._last: Iterator[bool] = self._last_segment(self._phase, lambda: True)
        self._segments: list[Iterator[bool]] = [self._last]
        self._first = 0  # where the segments of the phase begin
        self._source = iter(self._segments)
        self.ticks: Iterator[bool] = _Ticks.from_iterable(self._source)
        self.tick: Callable[[], bool] = self.ticks.__next__

    def start(self, budget: int) -> None:
        """Begins an execution that may spend `budget` operations."""
        if budget < 0:
            raise ValueError(f"an operation budget is not negative: {budget}")
        self.limit = budget
        self.exceeded = False
        self._spent = None
        self._enter([repeat(True, size) for size in _chunk_sizes(budget)], self._refuse)

    def used(self) -> int:
        """Operations of the current execution so far, or else of the last one. Exact."""
        if self._spent is not None:
            return self._spent
        return self.limit - sum(map(length_hint, self._chunks))

    def stop(self, exception: Callable[[], BaseException]) -> None:
        """From now on every tick raises what `exception` makes: a program that swallowed it once meets it again."""

        def refuse() -> bool:
            raise exception()

        self._spent = self.used()
        self._enter([], refuse)

    def finish(self) -> int:
        """Ends the execution and returns its count; ticks are free from here on."""
        self._spent = self.used()
        self._enter([], lambda: True)
        return self._spent

    def _refuse(self) -> bool:
        self.exceeded = True
        raise OperationLimitExceeded(self.limit)

    def _last_segment(self, phase: int, answer: Callable[[], bool]) -> Iterator[bool]:
        """The endless segment of a phase; after it, StopIteration sends `chain` on to the next segment."""

        def tick(_: None) -> bool:
            if phase < self._phase:
                raise StopIteration
            return answer()

        return map(tick, repeat(None))

    def _enter(self, chunks: list[repeat[bool]], answer: Callable[[], bool]) -> None:
        first, end = self._first, len(self._segments)
        # Other threads may tick between any two lines. So: first the new segments, then the end of the old ones.
        self._chunks, self._last = chunks, self._last_segment(self._phase + 1, answer)
        self._first = end
        self._segments.extend([*chunks, self._last])
        self._phase += 1
        for position in range(first, end):
            segment, self._segments[position] = self._segments[position], _NOTHING
            taken = position < len(self._segments) - length_hint(self._source)
            if taken and isinstance(segment, repeat):
                deque(segment, maxlen=0)  # `chain` may hold it: drain it


_NOTHING: Iterator[bool] = iter(())


@lru_cache(maxsize=8)
def _chunk_sizes(budget: int) -> tuple[int, ...]:
    sizes: list[int] = []
    total = 0
    while total < budget:
        size = min(max(FIRST_CHUNK_OPERATIONS, total // CHUNK_GROWTH_DIVISOR), budget - total, sys.maxsize)
        sizes.append(size)
        total += size
    return tuple(sizes)
