"""Hundreds of live sessions: the time to make them, the memory of each, and an execution while they exist."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil

from benchmarks.bench import Bench, serving
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from benchmarks.references import Unmeasurable, bare_bwrap_command, run
from benchmarks.rows.memory import MIB, all_bytes
from benchmarks.rows.sessions import CLIENTS
from executor_client import Session

_EXECUTIONS = 2_000
# Seconds after which checkers that were used once have ended.
_REST_S = 15.0
_WARM_UP = 50
# Generous: the daemon must not refuse or close sessions for want of memory while it is measured.
_SESSION_MIB = 24


def live(bench: Bench) -> Iterator[Figure]:
    """600 sessions (1,000 with `--all`), each used once: made by four clients, then idle while one more runs `1+1`.

    `1+1` is timed as soon as they are made, and when they are at rest. Its reference is taken in the same session, half
    of it before they are made and half after they have ended.
    """
    count = bench.effort.sessions
    if psutil.virtual_memory().available < count * _SESSION_MIB * MIB:
        raise Unmeasurable(f"{count} sessions need {count * _SESSION_MIB} MiB of free memory")
    bare = bare_bwrap_command()
    settings = f"[sessions]\nmax_sessions = {count + 50}\n"
    with serving("local", settings) as served, served.client.create_session() as session:

        def made(_number: int) -> Session:
            idle = served.client.create_session()
            idle.execute("1+1")
            return idle

        _executed(session, _WARM_UP)
        before_ms = _executed(session, _EXECUTIONS // 2)
        before_bytes = all_bytes(served)
        with ThreadPoolExecutor(CLIENTS) as clients:
            bare_ms = timed(lambda: list(clients.map(lambda _number: run(bare), range(count))))
            sessions: list[Session] = []
            made_ms = timed(lambda: sessions.extend(clients.map(made, range(count))))
            _executed(session, _WARM_UP)
            new_ms = _executed(session, _EXECUTIONS)
            time.sleep(_REST_S)
            beside_ms = _executed(session, _EXECUTIONS)
            each_mib = (all_bytes(served) - before_bytes) / count / MIB
            list(clients.map(Session.close, sessions))
        _executed(session, _WARM_UP)
        after_ms = _executed(session, _EXECUTIONS // 2)
    yield Figure(
        f"{count} sessions made and used, {CLIENTS} clients",
        "ms",
        (made_ms,),
        Reference("bwrap python, as many", (bare_ms,)),
    )
    yield Figure(f"idle session, one of {count}, at rest", "MiB", (each_mib,))
    reference = Reference("no other session", before_ms + after_ms)
    name = f"execute 1+1, {count} idle sessions"
    yield Figure(name, "ms", beside_ms, reference, AtMostTimes(1.5), by_p99=True)
    yield Figure(name, "ms", beside_ms, reference)
    name = f"execute 1+1, {count} sessions just made"
    yield Figure(name, "ms", new_ms, reference, AtMostTimes(1.5), by_p99=True)


def _executed(session: Session, count: int) -> tuple[float, ...]:
    return tuple(timed(lambda: session.execute("1+1")) for _ in range(count))
