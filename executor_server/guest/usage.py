"""What the processes of the sandbox use, measured by the supervisor from outside of them."""

from __future__ import annotations

import os
import resource
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Optional

    Seen = dict[tuple[int, int], tuple[float, float]]
    """By number and start of a process: the CPU time that it and those it waited for have spent, and the latter's."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPUCLOCK_SCHED = 2
_USAGE_FIELD = b"usage_usec "


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
            return kilobytes(os.pread(self._status, 8192, 0), b"VmHWM:") * 1024
        except ProcessLookupError:
            return 0


class SandboxCpu:
    """CPU time of everything in the sandbox but the supervisor, living or dead, since it began.

    A control group of the sandbox's own knows it exactly: `group` is its counter, a file that is kept open. Without one
    it is added up of what lives, of what the dead left with those who waited for them, and of what was lost: when a
    parent ignores its children's ends, nobody waits for them, and the kernel forgets their time. It is charged as it
    was last seen. A child that is born and dies so between two looks goes uncounted.
    """

    def __init__(self, group: Optional[int] = None) -> None:
        self._group = group
        self._seen: Seen = {}
        self._reaped_s = _reaped_cpu_s()
        self._missed_s = 0.0
        self._lost_s = 0.0
        self._told_s = 0.0

    @property
    def is_exact(self) -> bool:
        return self._group is not None

    def total_s(self) -> float:
        """Looks, and says how much it is by now. It never falls."""
        if self._group is not None:
            total_s = self.group_s()
        else:
            self.look()
            total_s = sum(spent_s for spent_s, _ in self._seen.values()) + self._reaped_s + self._lost_s
        self._told_s = max(self._told_s, total_s)
        return self._told_s

    def group_s(self) -> float:
        """Return the CPU seconds that the control group counts, less what the supervisor takes of it."""
        assert self._group is not None
        count = os.pread(self._group, 256, 0)
        if count.startswith(_USAGE_FIELD):  # cpu.stat of version 2, in microseconds; else cpuacct.usage in nanoseconds
            used_s = int(count[len(_USAGE_FIELD) :].split(None, 1)[0]) / 1e6
        else:
            used_s = int(count) / 1e9
        return used_s - time.process_time()

    def look(self) -> tuple[Seen, dict[tuple[int, int], float], float]:
        """Every process; those that are gone since the last look, with what they had spent; how much was lost.

        Who is waited for leaves all of it with whoever waited. So what is more than that has grown by is missed; and
        lost, if it is still missed at the next look: a child may be waited for after its parent was looked at.
        """
        seen, reaped_s = _processes(), _reaped_cpu_s()
        gone = {key: spent_s for key, (spent_s, _) in self._seen.items() if key not in seen}
        lost_s = 0.0
        if gone or self._missed_s:
            left_s = reaped_s - self._reaped_s
            for key, (_, waited_s) in seen.items():
                left_s += waited_s - self._seen.get(key, (0.0, 0.0))[1]
            lost_s = max(0.0, self._missed_s - left_s)
            left_s = max(0.0, left_s - self._missed_s)
            # Each is rounded to ticks, and so is what it leaves.
            self._missed_s = max(0.0, sum(gone.values()) - left_s - 2 * len(gone) / _TICKS_PER_S)
        self._seen, self._reaped_s = seen, reaped_s
        self._lost_s += lost_s
        return seen, gone, lost_s

    def close(self) -> None:
        if self._group is not None:
            os.close(self._group)


class CpuMeter:
    """CPU time that a run spends, over all processes of the sandbox but the supervisor.

    Exact where a control group counts it. Elsewhere it is exact for the interpreter, and in clock ticks for its
    children, which are only looked for by `look`, since that costs as much as a short run does; of a process that is
    older than the run counts what it spends from the first look on.
    """

    def __init__(self, interpreter: Process, sandbox: SandboxCpu) -> None:
        self._interpreter = interpreter
        self._sandbox = sandbox
        self._others_s = 0.0
        self._group_before_s = 0.0
        if sandbox.is_exact:
            self._group_before_s = sandbox.group_s()
            return
        self._own_before_s = process_cpu_s(interpreter.pid)
        self._waited_before_s = interpreter.waited_cpu_s() + _reaped_cpu_s()
        self._started_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)
        self._before_s: dict[tuple[int, int], float] = {}
        self._gone_s = 0.0  # what those had spent in this run that were gone at the last look
        self._lost_s = 0.0

    def look(self) -> float:
        """Looks at every process, and returns what has been spent in all."""
        if not self._sandbox.is_exact:
            seen, gone, lost_s = self._sandbox.look()
            self._lost_s += min(lost_s, self._gone_s)
            self._gone_s = sum(
                spent_s - self._before_s.get(key, 0.0) for key, spent_s in gone.items() if self._is_ours(key)
            )
            others_s = 0.0
            for key, (spent_s, _) in seen.items():
                if key[0] == self._interpreter.pid:
                    continue
                if key[1] < self._started_ticks:
                    spent_s -= self._before_s.setdefault(key, spent_s)
                others_s += spent_s
            self._others_s = others_s
        return self.spent_s()

    def spent_s(self) -> float:
        """Return the CPU seconds spent; where nobody counts them, those of living children are as of the last look."""
        if self._sandbox.is_exact:
            return max(0.0, self._sandbox.group_s() - self._group_before_s)
        own_s = process_cpu_s(self._interpreter.pid) - self._own_before_s
        waited_s = self._interpreter.waited_cpu_s() + _reaped_cpu_s() - self._waited_before_s
        return max(own_s, 0.0) + max(waited_s, 0.0) + self._others_s + self._lost_s

    def _is_ours(self, key: tuple[int, int]) -> bool:
        """True when a process spent CPU time for this run: a younger one all of it, an older one since a first look."""
        return key[1] >= self._started_ticks or key in self._before_s


# Fields 14, 17 and 22 of proc(5)'s stat, counted from the state, which is field 3.
_UTIME, _CUTIME, _CSTIME, _STARTTIME = 11, 13, 14, 19


def _processes() -> Seen:
    seen: Seen = {}
    for pid in pids():
        stat = _stat(pid)
        if stat is not None:
            seen[pid, int(stat[_STARTTIME])] = _ticks(stat, _UTIME, _CSTIME), _ticks(stat, _CUTIME, _CSTIME)
    return seen


def _ticks(stat: list[bytes], first: int, last: int) -> float:
    return sum(int(value) for value in stat[first : last + 1]) / _TICKS_PER_S


def _reaped_cpu_s() -> float:
    """Of those that the supervisor has reaped."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime


def kilobytes(status: bytes, field: bytes) -> int:
    """A field of proc(5)'s status; 0 when it is not there, as for a zombie."""
    _, found, rest = status.partition(field)
    return int(rest.split(None, 1)[0]) if found else 0


def pids() -> Iterator[int]:
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
