"""Resource limits of a sandbox, the same on every backend: hard and soft, so that no process can raise its own.

The kernel counts descriptors in flight on sockets per user, over all sandboxes of that user, and compares the count
with the sending process's limit of open files. So the supervisor has a higher limit than agent code: agent code that
sends all it can leaves room for the supervisor's messages.
"""

from __future__ import annotations

import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

OPEN_FILES = 4096
"""Descriptors of a process of agent code."""

_SUPERVISOR_OPEN_FILES = 32_768

FIXED = {
    "core": 0,
    "memlock": 65_536,
    "msgqueue": 0,  # bytes of POSIX message queues, counted for a user
    "nice": 0,
    "nofile": _SUPERVISOR_OPEN_FILES,
    "rtprio": 0,
    "sigpending": 128,  # timers and queued signals, counted for a user; without room, signals still come
}
"""The supervisor's limits, by their names in the module `resource`; other processes inherit or lower them."""


def kind(name: str) -> int:
    """Returns the number of a limit."""
    return int(getattr(resource, f"RLIMIT_{name.upper()}"))


def limit(number: int, value: int, *, for_good: bool = True) -> None:
    """Sets a limit of this process to `value`, or to its hard limit if that is lower.

    `for_good`: lowers the hard limit, too.
    """
    _, hard = resource.getrlimit(number)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (bound, bound if for_good else hard))


def limit_program(memory_bytes: Optional[int], processes: int) -> None:
    """Limits a process that is about to run agent code. 0 processes: a control group limits them."""
    limit_open_files()
    if memory_bytes is not None:
        limit(resource.RLIMIT_DATA, memory_bytes // 10 * 9)
    if processes:
        limit(resource.RLIMIT_NPROC, processes)


def limit_open_files() -> None:
    """Lowers the supervisor's limit of open files to that of agent code, or to half if the host's limit is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit(resource.RLIMIT_NOFILE, OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard // 2))
