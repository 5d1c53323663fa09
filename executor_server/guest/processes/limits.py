"""The limits of a process that a call has started: those that the interpreter's process has for good.

What the backend sets for the sandbox, a process inherits from pid 1. The rest can only be set once it runs, since
posix_spawn has no step for it. A program that forks within the moment before has a child without these limits; it stays
within those of the whole sandbox, which are the wall: its control group, or the supervisor's own watch.
"""

from __future__ import annotations

import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def limit_process(config: Any, pid: int) -> None:
    """Limits a process as the interpreter's configuration says; one that has ended needs no limit."""
    _limit(pid, resource.RLIMIT_CORE, 0)
    if config.watch_memory:
        _limit(pid, resource.RLIMIT_DATA, config.memory_bytes // 10 * 9)
    if config.processes:
        _limit(pid, resource.RLIMIT_NPROC, config.processes)


def _limit(pid: int, what: int, value: int) -> None:
    try:
        _, hard = resource.prlimit(pid, what)
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(pid, what, (bound, bound))
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, or has become a program of another user, which nothing in a sandbox can
