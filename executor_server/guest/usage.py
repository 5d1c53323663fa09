"""What the processes of the sandbox use, measured by the supervisor from outside of them."""

from __future__ import annotations

import os
import resource
import time
from typing import Iterator

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED = 2


def process_cpu_s(pid: int) -> float:
    """CPU time of one process, all its threads, to the nanosecond; 0 when it is gone.

    The clock id is what clock_getcpuclockid(3) gives: MAKE_PROCESS_CPUCLOCK of the kernel's linux/posix-timers.h.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def sandbox_cpu_s() -> float:
    """CPU time of everything in the pid namespace but the supervisor itself, the dead included."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = reaped.ru_utime + reaped.ru_stime
    for fields in _stats():
        # utime, stime, cutime, cstime: fields 14 to 17 of proc(5), counted from the state, which is field 3
        total += sum(int(value) for value in fields[11:15]) / _TICKS_PER_S
    return total


def sandbox_memory_bytes() -> int:
    """Private resident memory of everything in the pid namespace but the supervisor."""
    total = 0
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                _, resident, shared = file.read().split()[:3]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        total += max(0, int(resident) - int(shared)) * _PAGE_BYTES
    return total


def peak_memory_bytes(pid: int) -> int:
    """The largest resident size that a process has had; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # it ended meanwhile
    return 0


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            yield int(name)


def _stats() -> Iterator[list[bytes]]:
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue  # it ended meanwhile
        # The name, in parentheses, may hold anything, so the fields start after the last one.
        yield text[text.rfind(b")") + 2 :].split()
