"""The cost of files: a small one read, and a large one each way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtLeast, AtMostTimes, Figure, Reference, timed

_ROUNDS = 300
_SMALL_BYTES = 1_000
_LARGE_BYTES = 50_000_000
_LARGE_ROUNDS = 5
_PIECE_BYTES = 262_144


def read(bench: Bench) -> Iterator[Figure]:
    """`files.read` of 1 kB, compared with an execution of `1+1`."""
    with bench.local.cold_session() as session:
        session.files.write("small", os.urandom(_SMALL_BYTES))
        read_ms, add_ms = bench.in_turns(
            _ROUNDS,
            lambda: timed(lambda: session.files.read("small")),
            lambda: timed(lambda: session.execute("1+1")),
        )
    yield Figure("read a file of 1 kB", "ms", read_ms, Reference("execute 1+1", add_ms), AtMostTimes(1.5))


def transfer(bench: Bench) -> Iterator[Figure]:
    """50 MB written and read, compared with as many bytes of the echo service each way."""
    data = os.urandom(_LARGE_BYTES)
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, _LARGE_BYTES, _PIECE_BYTES)]
    with bench.local.cold_session() as session:

        def got() -> None:
            assert session.files.read("large") == data

        write, echo_write, read, echo_read = bench.in_turns(
            _LARGE_ROUNDS,
            lambda: _mb_s(lambda: session.files.write("large", data)),
            lambda: _mb_s(lambda: bench.echo.upload(iter(pieces))),
            lambda: _mb_s(got),
            lambda: _mb_s(lambda: sum(map(len, bench.echo.stream(100, len(pieces), _PIECE_BYTES)))),
            warm_up=1,
        )
    for what, ours, echoed in (("written", write, echo_write), ("read", read, echo_read)):
        reference = Reference("echo, 256 KiB pieces", echoed)
        yield Figure(f"a file of 50 MB {what}", "MB/s", ours, reference, AtLeast(150))


def _mb_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return _LARGE_BYTES / (time.perf_counter() - start) / 1e6
