"""The cost of an execution beside many sessions that wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.bench import Bench, serving
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from executor_client import Session

_SESSIONS = 300
_CREATORS = 4
_EXECUTIONS = 2_000
# Seconds after which checkers that were used once have ended.
_REST_S = 15.0
_WARM_UP = 50
_SETTINGS = f"""
[sessions]
max_sessions = {_SESSIONS + 50}
"""


def beside_idle(_bench: Bench) -> Iterator[Figure]:
    """`1+1` in one session while 300 others, each used once, wait: as soon as they are made, and when they are at rest.

    The reference is taken in the same session, half of it before they are made and half after they have ended.
    """
    with serving("local", _SETTINGS) as served, served.client.create_session() as session:
        _executed(session, _WARM_UP)
        before_ms = _executed(session, _EXECUTIONS // 2)
        with ThreadPoolExecutor(_CREATORS) as creators:

            def made(_number: int) -> Session:
                idle = served.client.create_session()
                idle.execute("1+1")
                return idle

            sessions = list(creators.map(made, range(_SESSIONS)))
            _executed(session, _WARM_UP)
            new_ms = _executed(session, _EXECUTIONS)
            time.sleep(_REST_S)
            beside_ms = _executed(session, _EXECUTIONS)
            list(creators.map(Session.close, sessions))
        _executed(session, _WARM_UP)
        after_ms = _executed(session, _EXECUTIONS // 2)
    reference = Reference("no other session", before_ms + after_ms)
    name = f"execute 1+1, {_SESSIONS} idle sessions"
    yield Figure(name, "ms", beside_ms, reference, AtMostTimes(1.5), by_p99=True)
    yield Figure(name, "ms", beside_ms, reference)
    yield Figure(f"execute 1+1, {_SESSIONS} sessions just made", "ms", new_ms, reference, AtMostTimes(1.5), by_p99=True)


def _executed(session: Session, count: int) -> tuple[float, ...]:
    return tuple(timed(lambda: session.execute("1+1")) for _ in range(count))
