"""Going back, and trying code, in a session with 100 MB of arrays; compared with pickling the same and `1+1`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.figures import AtMost, AtMostTimes, Figure, Reference, timed
from executor_client import Session

_ROUNDS = 20
_STATE = """
import pickle, time
import numpy as np
state = [np.random.default_rng(number).standard_normal(1_250_000) for number in range(10)]

def timed(do):
    start = time.perf_counter()
    do()
    return (time.perf_counter() - start) * 1000
"""
_PICKLE = "timed(lambda: pickle.dumps(state, protocol=5))"
_UNPICKLE = "packed = pickle.dumps(state, protocol=5)\ntook = timed(lambda: pickle.loads(packed))\ndel packed\ntook"
# A step of an agent: a tenth of the state changes.
_STEP = "state[0] += 1.0"


def savepoints(bench: Bench) -> Iterator[Figure]:
    """Each round takes a savepoint, changes a tenth of the state, goes back, runs `1+1`, and tries a program.

    Programs are tried in a session of their own: branches and savepoints of one session hold its memory together.
    """
    imports = ("numpy", "pickle", "time")
    with (
        bench.local.cold_session(*imports) as session,
        bench.local.cold_session(*imports) as stepping,
        bench.local.cold_session(*imports) as trying,
        bench.local.cold_session() as other,
    ):
        for each in (session, stepping, trying):
            each.execute(_STATE).raise_for_outcome()

        def rollback() -> float:
            session.execute(_STEP).raise_for_outcome()
            return timed(lambda: session.rollback())

        take_ms, pickle_ms, back_ms, after_ms, unpickle_ms, try_ms, each_ms, add_ms = bench.in_turns(
            _ROUNDS,
            lambda: timed(lambda: session.savepoint()),
            lambda: _number(session, _PICKLE),
            rollback,
            lambda: timed(lambda: _add(session)),
            lambda: _number(session, _UNPICKLE),
            lambda: timed(lambda: trying.try_("1+1")),
            lambda: timed(lambda: stepping.execute("1+1", savepoint=True)),
            lambda: timed(lambda: _add(other)),
        )
    add = Reference("execute 1+1, without", add_ms)
    yield Figure("savepoint, 100 MB", "ms", take_ms, Reference("pickle.dumps there", pickle_ms), AtMost(10))
    yield Figure("rollback, 100 MB", "ms", back_ms, Reference("pickle.loads there", unpickle_ms), AtMost(5))
    yield Figure("1+1 after a rollback, 100 MB", "ms", after_ms, add, AtMostTimes(1.5))
    yield Figure("1+1 with a savepoint before it, 100 MB", "ms", each_ms, add)
    yield Figure("1+1 tried in a branch, 100 MB", "ms", try_ms, add)


def _number(session: Session, code: str) -> float:
    value = session.execute(code).raise_for_outcome().output
    assert isinstance(value, float)
    return value


def _add(session: Session) -> None:
    assert session.execute("1+1").output == 2
