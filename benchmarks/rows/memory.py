"""What idles costs: the memory of a session that waits, and of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import psutil

from benchmarks.bench import Bench
from benchmarks.figures import Figure

_SESSIONS = 5
_MIB = 1024 * 1024


def idle(bench: Bench) -> Iterator[Figure]:
    """Proportional set size of all processes that a session brings, bubblewrap's among them, seen from the host."""
    daemon = psutil.Process(bench.daemon.pid)
    for name, imports, program in (("idle session", (), "1+1"), ("idle session, numpy imported", ("numpy",), _NUMPY)):
        sizes = []
        for _ in range(_SESSIONS):
            before = set(daemon.children(recursive=True))
            with bench.cold_session(*imports) as session:
                assert session.execute(program).output is not None
                sizes.append(_pss_mib(set(daemon.children(recursive=True)) - before))
        yield Figure(name, "MiB", tuple(sizes))
    yield Figure("daemon", "MiB", (_pss_mib([daemon]),))


_NUMPY = "import numpy\nnumpy.__version__"


def _pss_mib(processes: Iterable[psutil.Process]) -> float:
    """Raises psutil.AccessDenied where this user may not look into a sandbox's first process."""
    return sum(process.memory_full_info().pss for process in processes) / _MIB
