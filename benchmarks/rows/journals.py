"""The cost of writing journals: the state directory on a disk, compared with one in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench import Bench, Served, serving
from benchmarks.figures import Figure, Reference, timed
from benchmarks.references import Unmeasurable
from executor_client import Session

_IN_MEMORY = Path("/dev/shm")
_BYTES = 10_000_000
_EXECUTIONS = 200
_OUTPUTS = 15


def journals(bench: Bench) -> Iterator[Figure]:
    """Executions without and with a large output, both on the local backend."""
    if not _IN_MEMORY.is_dir():
        raise Unmeasurable(f"there is no {_IN_MEMORY}")
    with (
        serving("local", parent=_IN_MEMORY) as in_memory,
        _session(bench.local) as on_disk,
        _session(in_memory) as beside,
    ):
        yield _beside(bench, "execute 1+1", "1+1", _EXECUTIONS, on_disk, beside)
        yield _beside(bench, "10 MB as an output", "sent", _OUTPUTS, on_disk, beside)


def _session(served: Served) -> Session:
    session = served.cold_session()
    session.execute(f"sent = bytes({_BYTES})")
    return session


def _beside(bench: Bench, name: str, code: str, rounds: int, on_disk: Session, in_memory: Session) -> Figure:
    disk_ms, memory_ms = bench.in_turns(
        rounds, lambda: timed(lambda: on_disk.execute(code)), lambda: timed(lambda: in_memory.execute(code))
    )
    return Figure(f"{name}, journal on disk", "ms", disk_ms, Reference("journal in memory", memory_ms))
