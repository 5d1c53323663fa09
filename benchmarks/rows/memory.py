"""The memory of an idle session, and of the daemon."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import psutil

from benchmarks.bench import LESS_MEMORY_BYTES, Bench, Served
from benchmarks.figures import AtMost, Figure
from benchmarks.rows.sessions import IMPORT_LIBRARIES, LIBRARIES

_SESSIONS = 5
_CROWD = 20
_FIRST, _FIRST_S = 2, 0.3
# Seconds after which an unused checker has ended.
_REST_S = 12.0
MIB = 1024 * 1024
_NUMPY = "import numpy\nnumpy.__version__"


def idle(bench: Bench) -> Iterator[Figure]:
    """Growth of the daemon and all processes below it by one session, as proportional set size, seen from the host.

    The guest's processes, and what the backend runs for it. Files that other processes have mapped too count in part,
    so a session costs less when there are others of its image.
    """
    for name, imports, program in (("idle session", (), "1+1"), ("idle session, numpy imported", ("numpy",), _NUMPY)):
        sizes = tuple(_grown_mib(bench.local, 1, imports, program)[0] for _ in range(bench.rounds(_SESSIONS)))
        yield Figure(name, "MiB", sizes)
    yield Figure("daemon", "MiB", (pss_bytes([psutil.Process(bench.local.daemon.pid)]) / MIB,))


def crowd(bench: Bench) -> Iterator[Figure]:
    """The same by each of twenty sessions: memory that they share with each other counts once."""
    yield from crowded(bench.local, "", has_aim=False)


def crowded(served: Served, kind: str, *, has_aim: bool) -> Iterator[Figure]:
    """With the libraries, and without them: a fork server's small sandboxes have none of them in memory.

    Right after their use, and at rest: a session that waits for its next step has no checker.
    """
    for name, imports, program, less_bytes, most_mib in (
        ("", (), "1+1", LESS_MEMORY_BYTES, 7),
        (", four libraries", LIBRARIES, IMPORT_LIBRARIES, 0, 14),
    ):
        sizes = _grown_mib(served, _CROWD, imports, program, less_bytes, (0.0, _REST_S))
        aim = AtMost(most_mib) if has_aim else None
        for when, size in zip(("", ", at rest"), sizes, strict=True):
            yield Figure(f"idle session, one of {_CROWD}{name}{kind}{when}", "MiB", (size / _CROWD,), aim=aim)


def _grown_mib(
    served: Served,
    count: int,
    imports: Iterable[str],
    program: str,
    less_bytes: int = 0,
    waits_s: Iterable[float] = (0.0,),
) -> list[float]:
    """Returns the growth by `count` sessions, after each of the waits."""
    # The first sessions of a kind may start what is kept for all of them.
    for _ in range(_FIRST):
        with served.cold_session(*imports, less_memory_bytes=less_bytes) as session:
            assert session.execute(program).output is not None
        time.sleep(_FIRST_S)
    before_bytes = all_bytes(served)
    with ExitStack() as stack:
        for _ in range(count):
            session = stack.enter_context(served.cold_session(*imports, less_memory_bytes=less_bytes))
            assert session.execute(program).output is not None
        grown: list[float] = []
        for wait_s in waits_s:
            time.sleep(wait_s)
            grown.append((all_bytes(served) - before_bytes) / MIB)
        return grown


def all_bytes(served: Served) -> int:
    daemon = psutil.Process(served.daemon.pid)
    return pss_bytes([daemon, *daemon.children(recursive=True)])


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Raises psutil.AccessDenied if this user may not inspect a sandbox's first process."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return total
