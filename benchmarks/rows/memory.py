"""The memory of a session that waits, and of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import psutil

from benchmarks.bench import Bench
from benchmarks.figures import Figure

_SESSIONS = 5
MIB = 1024 * 1024
_NUMPY = "import numpy\nnumpy.__version__"
# In the command line of each guest's first process, whatever starts it.
_GUEST = "executor_guest"


def idle(bench: Bench) -> Iterator[Figure]:
    """Proportional set size of all processes that a session brings, seen from the host.

    The guest's, and what the backend runs for it: bubblewrap's monitor, containerd's shim. Files that other processes
    have mapped too count in part, so a session costs less beside others of its image.
    """
    for name, imports, program in (("idle session", (), "1+1"), ("idle session, numpy imported", ("numpy",), _NUMPY)):
        sizes = []
        for _ in range(_SESSIONS):
            before = set(psutil.process_iter())
            with bench.local.cold_session(*imports) as session:
                assert session.execute(program).output is not None
                sizes.append(pss_bytes(_brought_since(before)) / MIB)
        yield Figure(name, "MiB", tuple(sizes))
    yield Figure("daemon", "MiB", (pss_bytes([psutil.Process(bench.local.daemon.pid)]) / MIB,))


def _brought_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Guests that are new, what they have started, and what was started for them."""
    new = {process for process in psutil.process_iter(["cmdline"]) if process not in before}
    guests = {process for process in new if any(_GUEST in word for word in process.info["cmdline"] or ())}
    below = {child for guest in guests for child in guest.children(recursive=True)}
    above = {parent for guest in guests if (parent := guest.parent()) is not None} - before
    assert guests, "no guest is to be seen"
    return guests | below | above


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Raises psutil.AccessDenied where this user may not look into a sandbox's first process."""
    return sum(process.memory_full_info().pss for process in processes)
