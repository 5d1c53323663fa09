"""Sessions of the Docker backend, compared with containers that the Engine makes directly, and with local sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from benchmarks.bench import Bench, Served
from benchmarks.figures import AtMost, AtMostTimes, Figure, Reference, timed
from benchmarks.references import docker_run_command, run
from benchmarks.rows.sessions import CLIENTS, created, lives, warm_session
from executor_client import Session

T = TypeVar("T")

_ROUNDS = 25
_COLD_ROUNDS = 15
# Time for the pool to make another container, and for the Engine to finish with the last one.
_REFILL_S = 1.0
_EXECUTIONS = 300
_BURST = 32
_BURST_ROUNDS = 3
_SLEEP = "import time; time.sleep(600)"


def warm(bench: Bench) -> Iterator[Figure]:
    """From the call to a session that got a container of the pool."""
    warm_ms, echo_ms = bench.in_turns(
        _ROUNDS,
        lambda: warm_session(bench.docker.client, _REFILL_S),
        lambda: timed(lambda: bench.echo.unary(bytes(100))),
        warm_up=1,
    )
    yield Figure("docker session, warm", "ms", warm_ms, Reference("echo, unary", echo_ms), AtMost(3))


def cold(bench: Bench) -> Iterator[Figure]:
    """The same when its container is made on the spot; `docker run` lasts to the end of a program that does nothing."""
    bare = docker_run_command("--rm")
    cold_ms, used_ms, bare_ms = bench.in_turns(
        _COLD_ROUNDS,
        lambda: created(bench.docker.cold_session)[0],
        lambda: created(bench.docker.cold_session, use=True)[0],
        lambda: timed(lambda: run(bare)),
        warm_up=1,
    )
    reference = Reference("docker run", bare_ms)
    yield Figure("docker session, cold", "ms", cold_ms, reference, AtMostTimes(1.3))
    yield Figure("docker session, cold + first execute", "ms", used_ms, reference, AtMostTimes(1.3))


def execute(bench: Bench) -> Iterator[Figure]:
    """`1+1` in a container, compared with the same in a sandbox of the local backend."""
    with bench.docker.cold_session() as ours, bench.local.cold_session() as local:

        def add(session: Session) -> float:
            return timed(lambda: session.execute("1+1"))

        ours_ms, local_ms = bench.in_turns(_EXECUTIONS, lambda: add(ours), lambda: add(local))
    yield Figure("docker execute 1+1", "ms", ours_ms, Reference("local backend", local_ms), AtMostTimes(1.2))


def burst(bench: Bench) -> Iterator[Figure]:
    """Many at once, until the last one is there; removing them is not counted."""
    with ThreadPoolExecutor(_BURST) as threads:
        ours_ms, bare_ms = bench.in_turns(
            _BURST_ROUNDS, lambda: _sessions(bench.docker, threads), lambda: _containers(threads), warm_up=0
        )
    name = f"docker, {_BURST} sessions at once"
    yield Figure(name, "ms", ours_ms, Reference("docker run -d, as many", bare_ms), AtMostTimes(1.2))


def throughput(bench: Bench) -> Iterator[Figure]:
    """Whole lives of sessions per second, compared with those of containers."""
    bare = docker_run_command("--rm")
    yield lives(bench, bench.docker.client, f"docker sessions, {CLIENTS} clients", "docker run", lambda: run(bare))


def _sessions(served: Served, threads: ThreadPoolExecutor) -> float:
    took_ms, sessions = _at_once(threads, served.cold_session)
    for closed in [threads.submit(session.close) for session in sessions]:
        closed.result()
    return took_ms


def _containers(threads: ThreadPoolExecutor) -> float:
    bare = docker_run_command("--detach", program=_SLEEP)
    took_ms, containers = _at_once(threads, lambda: run(bare).decode().strip())
    run(["docker", "rm", "--force", *containers])
    return took_ms


def _at_once(threads: ThreadPoolExecutor, make: Callable[[], T]) -> tuple[float, list[T]]:
    start = time.perf_counter()
    made: list[Future[T]] = [threads.submit(make) for _ in range(_BURST)]
    results = [each.result() for each in made]
    return (time.perf_counter() - start) * 1000, results
