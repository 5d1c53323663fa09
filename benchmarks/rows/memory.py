"""The memory of a session that waits, and of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import psutil

from benchmarks.bench import Bench
from benchmarks.figures import AtMost, Figure
from benchmarks.rows.sessions import IMPORT_LIBRARIES, LIBRARIES

_SESSIONS = 5
_CROWD = 20
MIB = 1024 * 1024
_NUMPY = "import numpy\nnumpy.__version__"


def idle(bench: Bench) -> Iterator[Figure]:
    """Growth of the daemon and all processes below it by one session, as proportional set size, seen from the host.

    The guest's processes, and what the backend runs for it. Files that other processes have mapped too count in part,
    so a session costs less beside others of its image.
    """
    for name, imports, program in (("idle session", (), "1+1"), ("idle session, numpy imported", ("numpy",), _NUMPY)):
        sizes = tuple(_grown_mib(bench, 1, imports, program) for _ in range(bench.rounds(_SESSIONS)))
        yield Figure(name, "MiB", sizes)
    yield Figure("daemon", "MiB", (pss_bytes([psutil.Process(bench.local.daemon.pid)]) / MIB,))


def crowd(bench: Bench) -> Iterator[Figure]:
    """The same by each of twenty sessions: what they share with each other counts once."""
    for name, imports, program, most_mib in (
        (f"idle session, one of {_CROWD}", (), "1+1", 7),
        (f"idle session, one of {_CROWD}, four libraries", LIBRARIES, IMPORT_LIBRARIES, 14),
    ):
        yield Figure(name, "MiB", (_grown_mib(bench, _CROWD, imports, program) / _CROWD,), aim=AtMost(most_mib))


def _grown_mib(bench: Bench, count: int, imports: Iterable[str], program: str) -> float:
    # The first session of a kind may start what is kept for all of them.
    with bench.local.cold_session(*imports) as session:
        assert session.execute(program).output is not None
    before_bytes = _all_bytes(bench)
    with ExitStack() as stack:
        for _ in range(count):
            session = stack.enter_context(bench.local.cold_session(*imports))
            assert session.execute(program).output is not None
        return (_all_bytes(bench) - before_bytes) / MIB


def _all_bytes(bench: Bench) -> int:
    daemon = psutil.Process(bench.local.daemon.pid)
    return pss_bytes([daemon, *daemon.children(recursive=True)])


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Raises psutil.AccessDenied where this user may not look into a sandbox's first process."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return total
