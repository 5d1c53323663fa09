"""Reads the processes of a sandbox from its /proc."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Optional

# Fields of proc(5)'s stat, counted from the state, which is field 3.
STATE, PPID, SESSION, FLAGS, UTIME, CUTIME, CSTIME, THREADS, STARTTIME = 0, 1, 3, 6, 11, 13, 14, 17, 19
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def pids() -> Iterator[int]:
    """Yields every process but this one."""
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            yield int(name)


def stat_of(pid: int) -> Optional[list[bytes]]:
    """Returns the fields of a process's stat; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    return fields(text)


def fields(stat: bytes) -> list[bytes]:
    # The name may contain anything, even a parenthesis or a space, so the fields start after the last parenthesis.
    return stat[stat.rfind(b")") + 2 :].split()


def seconds(stat: list[bytes], first: int, last: int) -> float:
    """Returns the sum of adjacent time fields, in seconds."""
    return sum(map(int, stat[first : last + 1])) / TICKS_PER_S


def kilobytes(status: bytes, field: bytes) -> int:
    """Reads a field of proc(5)'s status; 0 if it is missing, as for a zombie."""
    # At the start of a line: the first line has the process's name, in which the kernel escapes line ends only.
    _, found, rest = status.partition(b"\n" + field)
    return int(rest.split(None, 1)[0]) if found else 0


def own_bytes(field: bytes) -> int:
    """Returns a field of the calling process's status, such as `b"VmData:"`, in bytes."""
    with open("/proc/self/status", "rb") as file:
        return kilobytes(file.read(), field) * 1024
