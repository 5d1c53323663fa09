"""What the processes of the sandbox use, measured by the supervisor from outside of them."""

from __future__ import annotations

import os
import resource
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Optional

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPUCLOCK_SCHED = 2
# File systems of the sandbox's own, wherever it is made.
_IN_MEMORY = ("/workspace", "/tmp", "/dev/shm")


def process_cpu_s(pid: int) -> float:
    """CPU time of one process, all its threads, to the nanosecond; 0 when it is gone.

    The clock id is what clock_getcpuclockid(3) gives: MAKE_PROCESS_CPUCLOCK of the kernel's linux/posix-timers.h.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


class Process:
    """A child whose files in /proc are kept open, because they are read twice for each run."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._stat)
        os.close(self._status)

    def waited_cpu_s(self) -> float:
        """Of the children that it has waited for."""
        try:
            return _ticks(_fields(os.pread(self._stat, 4096, 0)), _CUTIME, _CSTIME)
        except ProcessLookupError:
            return 0.0

    def peak_memory_bytes(self) -> int:
        """The largest resident size that it has had; 0 when it is gone."""
        try:
            return _kilobytes(os.pread(self._status, 8192, 0), b"VmHWM:") * 1024
        except ProcessLookupError:
            return 0


class CpuMeter:
    """CPU time that a run spends, over all processes of the sandbox but the supervisor.

    Exact for the interpreter; in clock ticks for its children, which are only looked for by `look`, since that costs as
    much as a short run does. Of a process that is older than the run counts what it spends from the first look on.
    """

    def __init__(self, interpreter: Process) -> None:
        self._interpreter = interpreter
        self._own_before_s = process_cpu_s(interpreter.pid)
        self._waited_before_s = interpreter.waited_cpu_s() + _reaped_cpu_s()
        self._started_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)
        self._before_s: dict[tuple[int, int], float] = {}
        self._others_s = 0.0

    def look(self) -> float:
        """Looks at every process, and returns what has been spent in all."""
        others_s = 0.0
        for pid in _pids():
            stat = _stat(pid)
            if stat is None or pid == self._interpreter.pid:
                continue
            spent_s = _ticks(stat, _UTIME, _CSTIME)
            started = int(stat[_STARTTIME])
            if started >= self._started_ticks:
                others_s += spent_s
            else:
                others_s += spent_s - self._before_s.setdefault((pid, started), spent_s)
        self._others_s = others_s
        return self.spent_s()

    def spent_s(self) -> float:
        """What has been spent, the living children as of the last look."""
        own_s = process_cpu_s(self._interpreter.pid) - self._own_before_s
        waited_s = self._interpreter.waited_cpu_s() + _reaped_cpu_s() - self._waited_before_s
        return max(own_s, 0.0) + max(waited_s, 0.0) + self._others_s


# Fields 14, 17 and 22 of proc(5)'s stat, counted from the state, which is field 3.
_UTIME, _CUTIME, _CSTIME, _STARTTIME = 11, 13, 14, 19


def _ticks(stat: list[bytes], first: int, last: int) -> float:
    return sum(int(value) for value in stat[first : last + 1]) / _TICKS_PER_S


def _reaped_cpu_s() -> float:
    """Of those that the supervisor has reaped."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime


def sandbox_memory_bytes() -> int:
    """Memory of everything in the pid namespace but the supervisor: each one's own, and what is shared or in files.

    What several processes share is counted once, as far as can be told cheaply: the most that one of them shares, or
    all that lies in the sandbox's file systems in memory. Either may be part of the other.
    """
    own = shared = 0
    for pid in _pids():
        try:
            with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
                status = file.read()
        except OSError:
            continue  # it ended meanwhile
        own += _kilobytes(status, b"RssAnon:")
        shared = max(shared, _kilobytes(status, b"RssShmem:"))
    return own * 1024 + max(shared * 1024, _files_bytes())


def _files_bytes() -> int:
    used = 0
    for place in _IN_MEMORY:
        state = os.statvfs(place)
        used += (state.f_blocks - state.f_bfree) * state.f_frsize
    return used


def _kilobytes(status: bytes, field: bytes) -> int:
    """A field of proc(5)'s status; 0 when it is not there, as for a zombie."""
    _, found, rest = status.partition(field)
    return int(rest.split(None, 1)[0]) if found else 0


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            yield int(name)


def _stat(pid: int) -> Optional[list[bytes]]:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None  # it ended meanwhile
    return _fields(text)


def _fields(stat: bytes) -> list[bytes]:
    # The name, in parentheses, may hold anything, so the fields start after the last one.
    return stat[stat.rfind(b")") + 2 :].split()
