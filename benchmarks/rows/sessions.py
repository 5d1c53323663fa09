"""The time until a session is ready, and the number that come and go in a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.bench import Bench, Served
from benchmarks.figures import AtLeast, AtMost, AtMostTimes, Figure, Reference, timed
from benchmarks.references import bare_bwrap_command, run
from executor_client import ExecutorClient, Session

_ROUNDS = 25
# Time for the pool to make another sandbox, so that its work is not counted as the next session's.
_REFILL_S = 0.12
CLIENTS = 4
_LIVES_PER_CLIENT = 12
_BATCHES = 3
_IMPORT_ROUNDS = 10

LIBRARIES = ("numpy", "pandas", "PIL", "matplotlib")
IMPORT_LIBRARIES = f"""
import time
start = time.perf_counter()
import {", ".join(LIBRARIES)}
(time.perf_counter() - start) * 1000
"""
_PRINT_IMPORT_TIME = IMPORT_LIBRARIES.replace("\n(time", "\nprint((time").rstrip() + ")"
_IMPORT_NAME = "first import of four libraries"


def ready(bench: Bench) -> Iterator[Figure]:
    """From the call to the session: from the pool, made on the spot, and with a first execution."""
    warm_ms, echo_ms = bench.in_turns(
        _ROUNDS,
        lambda: warm_session(bench.local.client, _REFILL_S),
        lambda: timed(lambda: bench.echo.unary(bytes(100))),
    )
    yield Figure("session ready, warm", "ms", warm_ms, Reference("echo, unary", echo_ms), AtMost(3))
    yield from cold(bench, bench.local, "", (AtMostTimes(2), None))


def cold(
    bench: Bench,
    served: Served,
    kind: str,
    aims: tuple[AtMostTimes | None, AtMostTimes | None],
    *,
    create: Callable[[], Session] | None = None,
    name: str = "cold",
    pause_s: float = 0.0,
) -> Iterator[Figure]:
    """Made on the spot (or by `create`), and with a first execution; each after a pause."""
    bare = bare_bwrap_command()

    def after_pause(measure: Callable[[], float]) -> Callable[[], float]:
        def measured() -> float:
            time.sleep(pause_s)
            return measure()

        return measured

    cold_ms, used_ms, bare_ms = bench.in_turns(
        _ROUNDS,
        after_pause(lambda: created(create or served.cold_session)[0]),
        after_pause(lambda: created(create or served.cold_session, use=True)[0]),
        after_pause(lambda: timed(lambda: run(bare))),
    )
    reference = Reference("bwrap python", bare_ms)
    yield Figure(f"session ready, {name}{kind}", "ms", cold_ms, reference, aims[0])
    yield Figure(f"session {name} + first execute{kind}", "ms", used_ms, reference, aims[1])


def imports(bench: Bench) -> Iterator[Figure]:
    """The first import of the usual libraries in a cold session, timed there, compared with that of a fresh Python."""
    yield first_imports(bench, bench.local, "", None)


def first_imports(bench: Bench, served: Served, kind: str, aim: AtMost | None) -> Figure:
    def first_import() -> float:
        with served.cold_session(*LIBRARIES) as session:
            result = session.execute(IMPORT_LIBRARIES)
            assert isinstance(result.output, float), result.error
            return result.output

    ours_ms, fresh_ms = bench.in_turns(
        _IMPORT_ROUNDS, first_import, lambda: float(run([sys.executable, "-c", _PRINT_IMPORT_TIME])), warm_up=1
    )
    return Figure(f"{_IMPORT_NAME}{kind}", "ms", ours_ms, Reference("fresh CPython", fresh_ms), aim)


def warm_session(client: ExecutorClient, refill_s: float) -> float:
    """Milliseconds until a session has a sandbox of the pool, which had `refill_s` to fill before."""
    while True:
        time.sleep(refill_s)
        took_ms, session = created(client.create_session)
        if session.info.warm:
            return took_ms


def created(create: Callable[[], Session], *, use: bool = False) -> tuple[float, Session]:
    """Milliseconds until the session is there, or used once; then it is deleted."""
    start = time.perf_counter()
    session = create()
    try:
        if use:
            assert session.execute("1+1").output == 2
        return (time.perf_counter() - start) * 1000, session
    finally:
        session.close()


def throughput(bench: Bench) -> Iterator[Figure]:
    """Whole lives of sessions per second: made, used once, deleted; compared with those of a bare sandbox."""
    bare = bare_bwrap_command()
    yield lives(bench, bench.local.client, f"sessions, {CLIENTS} clients", "bwrap python", lambda: run(bare))


def lives(
    bench: Bench,
    client: ExecutorClient,
    name: str,
    bare_name: str,
    bare_life: Callable[[], object],
    aim: AtLeast | None = None,
) -> Figure:
    """Lives per second, with CLIENTS at a time, of sessions of the default kind and of their reference."""

    def live() -> None:
        with client.create_session() as session:
            assert session.execute("1+1").output == 2

    with ThreadPoolExecutor(CLIENTS) as clients:

        def rate(life: Callable[[], object]) -> float:
            start = time.perf_counter()
            for life_ended in [clients.submit(life) for _ in range(count)]:
                life_ended.result()
            return count / (time.perf_counter() - start)

        count = CLIENTS * bench.rounds(_LIVES_PER_CLIENT)
        ours, reference = bench.in_turns(_BATCHES, lambda: rate(live), lambda: rate(bare_life), warm_up=0)
    return Figure(name, "1/s", ours, Reference(bare_name, reference), aim)
