"""Counts the operations of agent code, and ends the code when its budget is spent.

The instrumented code calls `next(meter.ticks)` at the head of every loop body, comprehension element and function. Both
`next` and the iterator are constants of the code, so one operation costs one call of a C function.

Promises
- A budget of N allows exactly N ticks; tick N+1 raises, and so does every tick after it until `start` or `finish`.
- The same program spends the same count.
- `start` takes functions to call at certain ticks. Such a tick counts like any other.
- `ticks` is one object for the life of the interpreter: a function defined by an earlier execution counts against the
  current one. Between executions (background threads) ticks are free.

Theory of operation. `ticks` is an `itertools.chain` over a list of segments. A budget becomes a few `repeat` iterators
(chunks), then a last segment that raises for ever. All of it runs in C until the budget is spent, and taking the next
segment runs no Python code: an exception in there, of a signal handler or because the program is at its recursion
limit, would make `chain` drop its source for good, and counting would end. For the same reason the list never runs out:
its last segment ends only when its phase is over and another segment stands behind it. Segments that are over are
replaced by an empty iterator, not removed, since the list's iterator knows only its position; each costs 8 bytes.

The tick that calls a function is a chunk of its own, a `map` over a `repeat` of one. An exception of the function
leaves `chain` where it is, and the tick counted, since `repeat` has yielded it by then. The chunk ends in C: a segment
that ended by a StopIteration of its own could end for two threads at once, and the second one would end the next chunk
for all.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import lru_cache
from itertools import chain, repeat
from operator import attrgetter, length_hint

from .control import ControlException

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Mapping

_NO_CALLS: Mapping[int, Callable[[], object]] = {}
FIRST_CHUNK_OPERATIONS = 1024
# The next chunk is half of those before it. When an execution ends, the rest of the chunk in use is drained tick by
# tick: with these sizes that costs a few percent of the execution at most, and a budget of 10**8 takes 30 chunks.
CHUNK_GROWTH_DIVISOR = 2


class OperationLimitExceeded(ControlException):
    """The operation budget is spent."""

    __module__ = "builtins"  # so that a traceback shows its plain name

    def __init__(self, limit: int, of_session: int | None = None) -> None:
        """`of_session` is the whole session's budget, given if less was left of it than an execution may spend."""
        what = f"{limit}"
        if of_session is not None:
            what = f"the session, session_operations = {of_session}, of which {limit} were left"
        super().__init__(
            f"Reached the max number of operations of {what}. Maybe there is an infinite loop somewhere in the code, "
            "or you're just asking too many calculations."
        )


class _Ticks(chain):  # type: ignore[type-arg]  # a plain class at run time on 3.9
    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle ships functions with their constants (joblib does). Another process has no meter: free ticks.
        return (repeat, (True,))


class _Chunk:
    """Some of the ticks of a budget: the iterator that `chain` reads, and the one that counts the rest."""

    __slots__ = ("left", "segment", "size")

    def __init__(self, size: int, call: Callable[[], object] | None = None) -> None:
        self.size = size
        self.left = repeat(True, size)
        self.segment: Iterator[bool] = self.left
        if call is not None:

            def tick(_: bool) -> bool:
                call()
                return True

            self.segment = map(tick, self.left)


class Meter:
    """Counts operations of the current execution."""

    def __init__(self) -> None:
        self.limit = 0
        self.exceeded = False
        self.raised: OperationLimitExceeded | None = None  # the first of this execution; a thread may have died of it
        self._on_stop: Callable[[], None] | None = None
        self._of_session: int | None = None
        self._chunks: list[_Chunk] = []
        self._spent: int | None = 0
        self._phase = 0
        self._last: Iterator[bool] = self._last_segment(self._phase, lambda: True)
        self._segments: list[Iterator[bool]] = [self._last]
        self._first = 0  # where the segments of the phase begin
        self._source = iter(self._segments)
        self.ticks: Iterator[bool] = _Ticks.from_iterable(self._source)
        self.tick: Callable[[], bool] = self.ticks.__next__

    def start(
        self,
        budget: int,
        calls: Mapping[int, Callable[[], object]] = _NO_CALLS,
        of_session: int | None = None,
        on_stop: Callable[[], None] | None = None,
    ) -> None:
        """Begins an execution that may spend `budget` operations; `calls` has functions to call, by operation.

        Such a function must not tick; its exceptions go to the program. `on_stop` is called when the execution is
        stopped, and at each refused tick. `of_session`: see OperationLimitExceeded.
        """
        if budget < 0:
            raise ValueError(f"an operation budget is not negative: {budget}")
        self.limit = budget
        self.exceeded = False
        self._spent = None
        self._of_session = of_session
        self._on_stop = on_stop
        chunks: list[_Chunk] = []
        begin = 0
        for number in (*sorted(calls), budget + 1):
            chunks += map(_Chunk, _chunk_sizes(begin, number - 1))
            if number <= budget:
                chunks.append(_Chunk(1, calls[number]))
            begin = number
        self._enter(chunks, self._refuse)

    def used(self) -> int:
        """Returns the operations of the current execution so far, or else of the last one. Exact."""
        if self._spent is not None:
            return self._spent
        used = 0
        for chunk in self._chunks:
            left = length_hint(chunk.left)
            if left == chunk.size:
                break
            used += chunk.size - left
        return used

    def stop(self, exception: Callable[[], BaseException]) -> None:
        """Makes every tick raise what `exception` returns: a program that swallowed it once meets it again."""

        def refuse() -> bool:
            self._report_stop()
            raise exception()

        self._spent = self.used()
        self._enter([], refuse)
        self._report_stop()

    def finish(self) -> int:
        """Ends the execution and returns its count; ticks are free afterwards."""
        self._spent = self.used()
        self.raised = self._on_stop = None  # the traceback of `raised` holds every frame that it passed
        self._enter([], lambda: True)
        return self._spent

    def _refuse(self) -> bool:
        exceeded = OperationLimitExceeded(self.limit, self._of_session)
        self.exceeded = True
        if self.raised is None:
            self.raised = exceeded
        self._report_stop()
        raise exceeded

    def _report_stop(self) -> None:
        if self._on_stop is not None:
            self._on_stop()

    def _last_segment(self, phase: int, answer: Callable[[], bool]) -> Iterator[bool]:
        """Returns a segment that is endless during its phase; then its StopIteration moves `chain` to the next one."""

        def tick(_: None) -> bool:
            if phase < self._phase:
                raise StopIteration
            return answer()

        return map(tick, repeat(None))

    def _enter(self, chunks: list[_Chunk], answer: Callable[[], bool]) -> None:
        first, old = self._first, self._chunks
        end = len(self._segments)
        # The race: other threads may tick between any two lines. So the new segments come first, and then all the old
        # ones end at once: a thread whose chunk is over would go on to the next, and each would have to be drained.
        self._chunks, self._last = chunks, self._last_segment(self._phase + 1, answer)
        self._first = end
        self._segments.extend([*map(_segment_of, chunks), self._last])
        self._phase += 1
        self._segments[first:end] = [_NOTHING] * (end - first)
        for chunk in old:
            if length_hint(chunk.left) == chunk.size:
                break  # no tick has come to it
            deque(chunk.left, maxlen=0)  # drains it, as `chain` may still hold it


_segment_of = attrgetter("segment")
_NOTHING: Iterator[bool] = iter(())


@lru_cache(maxsize=8)
def _chunk_sizes(begin: int, end: int) -> tuple[int, ...]:
    """Returns the sizes of the chunks for the ticks after the first `begin`, up to `end`."""
    sizes: list[int] = []
    total = begin
    while total < end:
        size = min(max(FIRST_CHUNK_OPERATIONS, total // CHUNK_GROWTH_DIVISOR), end - total, sys.maxsize)
        sizes.append(size)
        total += size
    return tuple(sizes)
