"""CPU time and peak memory of the sandbox's processes, measured by the supervisor from outside them."""

from __future__ import annotations

import os
import resource
import time

from ..wire import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Protocol

    Seen = dict[tuple[int, int], tuple[float, float, int]]
    """By pid and start time: CPU seconds of a process including the children that it waited for, CPU seconds of these
    children alone, and the leader of its kernel session."""

    class Aside(Protocol):
        """The processes that calls have started. No run is charged for them."""

        @property
        def leaders(self) -> frozenset[int]: ...

        @property
        def ended_cpu_s(self) -> float: ...

        def cpu_s(self) -> float: ...


_CPUCLOCK_SCHED = 2
_USAGE_FIELD = b"usage_usec "


def process_cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process, or 0 if it has ended; exact to the nanosecond.

    The clock id is what clock_getcpuclockid(3) gives: MAKE_PROCESS_CPUCLOCK of the kernel's linux/posix-timers.h.
    """
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


class Process:
    """A child whose files in /proc stay open, because each run reads them twice."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._stat)
        os.close(self._status)

    def waited_cpu_s(self) -> float:
        """Returns the CPU seconds of the children that it has waited for."""
        try:
            return proc.seconds(proc.fields(os.pread(self._stat, 4096, 0)), proc.CUTIME, proc.CSTIME)
        except ProcessLookupError:
            return 0.0

    def memory_bytes(self, field: bytes) -> int:
        """Returns a size from its status, or 0 if it has ended."""
        try:
            return proc.kilobytes(os.pread(self._status, 8192, 0), field) * 1024
        except ProcessLookupError:
            return 0


class SandboxCpu:
    """CPU time of all processes of the sandbox but the supervisor, living or dead, since its start.

    The sandbox's own control group counts it exactly: `group` is an open file of its counter. Without one, it is the
    sum of three parts: living processes; dead ones, whose time the kernel adds to the parent that waited for them; and
    lost time. The attack is a parent that ignores SIGCHLD: no process waits for its children, and the kernel forgets
    their time. They are charged with the time that the last `look` saw; a child that starts and ends between two calls
    is not counted.
    """

    def __init__(self, group: Optional[int], aside: Aside) -> None:
        self._group = group
        self._seen: Seen = {}
        self._reaped_s = _reaped_cpu_s()
        self._missed_s = 0.0
        self._lost_s = 0.0
        self._reported_s = 0.0
        self.aside = aside

    @property
    def is_exact(self) -> bool:
        return self._group is not None

    def total_s(self) -> float:
        """Looks at all processes, and returns the CPU seconds so far. The value never decreases."""
        if self._group is not None:
            total_s = self.group_s()
        else:
            self.look()
            total_s = sum(spent_s for spent_s, _, _ in self._seen.values()) + self._reaped_s + self._lost_s
        self._reported_s = max(self._reported_s, total_s)
        return self._reported_s

    def group_s(self) -> float:
        """Returns the CPU seconds of the control group, without the supervisor's own."""
        assert self._group is not None
        count = os.pread(self._group, 256, 0)
        if count.startswith(_USAGE_FIELD):  # cpu.stat of version 2, in microseconds; else cpuacct.usage in nanoseconds
            used_s = int(count[len(_USAGE_FIELD) :].split(None, 1)[0]) / 1e6
        else:
            used_s = int(count) / 1e9
        return used_s - time.process_time()

    def look(self) -> tuple[Seen, dict[tuple[int, int], float], float]:
        """Returns every process; those that ended since the last call, with their CPU seconds; and the seconds lost.

        The time of a process that is waited for is added to its parent. So if processes have ended, and the sums of
        their parents have grown by less, the difference is missing. The race: a child may be waited for after its
        parent was read. So missing time counts as lost only if it is still missing at the next call.
        """
        seen, reaped_s = _processes(), _reaped_cpu_s()
        ended = {key: spent_s for key, (spent_s, _, _) in self._seen.items() if key not in seen}
        lost_s = 0.0
        if ended or self._missed_s:
            left_s = reaped_s - self._reaped_s
            for key, (_, waited_s, _) in seen.items():
                left_s += waited_s - self._seen[key][1] if key in self._seen else waited_s
            lost_s = max(0.0, self._missed_s - left_s)
            left_s = max(0.0, left_s - self._missed_s)
            # Both a process's time and the part added to its parent are rounded to ticks.
            self._missed_s = max(0.0, sum(ended.values()) - left_s - 2 * len(ended) / proc.TICKS_PER_S)
        self._seen, self._reaped_s = seen, reaped_s
        self._lost_s += lost_s
        return seen, ended, lost_s


class CpuMeter:
    """CPU time that a run spends, in all processes of the sandbox but the supervisor.

    Exact if a control group counts it. Otherwise it is exact for the interpreter, and in clock ticks for other
    processes. Only `look` reads those, because that costs as much as a short run. For a process that is older than the
    run, the run is charged with the time after the first call of `look`.

    Making a meter takes time, so it is made while the source is checked. Call `begin` when the code starts.
    """

    def __init__(self, interpreter: Process, sandbox: SandboxCpu) -> None:
        self._interpreter = interpreter
        self._sandbox = sandbox
        self._others_s = 0.0
        self._group_before_s = self._reaped_before_s = self._aside_before_s = 0.0
        if sandbox.is_exact:
            return
        self._own_before_s = process_cpu_s(interpreter.pid)
        self._waited_before_s = interpreter.waited_cpu_s()
        self._started_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * proc.TICKS_PER_S)
        self._before_s: dict[tuple[int, int], float] = {}
        self._ended_s = 0.0  # CPU seconds in this run of the processes that the last `look` found ended
        self._lost_s = 0.0

    def begin(self) -> None:
        """Starts the count when the code starts, without the time that the checker has spent meanwhile."""
        if self._sandbox.is_exact:
            self._group_before_s, self._aside_before_s = self._sandbox.group_s(), self._sandbox.aside.cpu_s()
        else:
            self._reaped_before_s, self._aside_before_s = _reaped_cpu_s(), self._sandbox.aside.ended_cpu_s

    def look(self) -> float:
        """Looks at every process, and returns the CPU seconds that the run has spent."""
        if not self._sandbox.is_exact:
            seen, ended, lost_s = self._sandbox.look()
            self._lost_s += min(lost_s, self._ended_s)
            self._ended_s = sum(
                spent_s - self._before_s.get(key, 0.0) for key, spent_s in ended.items() if self._is_ours(key)
            )
            others_s, aside = 0.0, self._sandbox.aside.leaders
            for key, (spent_s, _, session) in seen.items():
                if key[0] == self._interpreter.pid or session in aside:
                    continue
                if key[1] < self._started_ticks:
                    spent_s -= self._before_s.setdefault(key, spent_s)
                others_s += spent_s
            self._others_s = others_s
        return self.spent_s()

    def spent_s(self) -> float:
        """Returns the CPU seconds spent; without a control group, those of other processes are as of the last `look`.

        A process that was waited for since then counts twice: by itself, and in its parent. `settled_s` corrects that.
        """
        if self._sandbox.is_exact:
            aside_s = self._sandbox.aside.cpu_s() - self._aside_before_s
            return max(0.0, self._sandbox.group_s() - self._group_before_s - aside_s)
        # The reaped seconds include ended background processes, which are subtracted; `_others_s` has no living ones.
        aside_s = self._sandbox.aside.ended_cpu_s - self._aside_before_s
        own_s = process_cpu_s(self._interpreter.pid) - self._own_before_s
        waited_s = self._interpreter.waited_cpu_s() - self._waited_before_s + _reaped_cpu_s() - self._reaped_before_s
        return max(own_s, 0.0) + max(waited_s - aside_s, 0.0) + self._others_s + self._lost_s

    def settled_s(self) -> float:
        """Returns the CPU seconds of a run that is over.

        If `look` has seen other processes, it is called twice more: the time of those that ended was added to a parent
        or is lost, and only the second call finds out the latter.
        """
        if not self._sandbox.is_exact and self._others_s:
            self.look()
            self.look()
        return self.spent_s()

    def _is_ours(self, key: tuple[int, int]) -> bool:
        """True if the run is charged for the process: a younger one wholly, an older one since the first `look`."""
        return key[1] >= self._started_ticks or key in self._before_s


class BackgroundCpu:
    """CPU time of the sandbox outside executions, since the session's prelude or first request.

    It comes from checks of sources, preludes, replaced interpreters, and background processes.
    """

    def __init__(self, sandbox: SandboxCpu, charged_cpu_s: Callable[[], float]) -> None:
        self._sandbox = sandbox
        self._charged_cpu_s = charged_cpu_s
        self._before_s: Optional[float] = None
        self._reported_s = 0.0

    def begin(self) -> None:
        """Starts the count, once."""
        if self._before_s is None:
            self._before_s = self._sandbox.total_s()

    def spent_s(self, *, executing: bool) -> float:
        """Returns the CPU seconds; during an execution the last value: `look` would take lost time from it.

        A running prelude is included, since its session may end before it does.
        """
        if self._before_s is not None and not executing:
            spent_s = self._sandbox.total_s() - self._before_s - self._charged_cpu_s()
            self._reported_s = max(self._reported_s, spent_s)
        return self._reported_s


def _processes() -> Seen:
    seen: Seen = {}
    for pid in proc.pids():
        stat = proc.stat_of(pid)
        if stat is not None:
            spent_s = proc.seconds(stat, proc.UTIME, proc.CSTIME)
            waited_s = proc.seconds(stat, proc.CUTIME, proc.CSTIME)
            seen[pid, int(stat[proc.STARTTIME])] = spent_s, waited_s, int(stat[proc.SESSION])
    return seen


def _reaped_cpu_s() -> float:
    """Returns the CPU seconds of the processes that the supervisor has reaped."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime
