"""The interpreter's process: what turns a fork of the supervisor into one, its limits and its timers."""

from __future__ import annotations

import os
import resource

from ..checks.control import ControlException
from ..wire import libc, rlimits
from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

OOM_SCORE = 900
"""The kernel should take this process when memory runs out, not the supervisor; before it, what has 1000: savepoints,
and the processes that calls have started."""

# Bytes of data kept from each program for what is done between two: one that ran out of memory keeps all that it has.
_HEADROOM_BYTES = 2 * 1024 * 1024


def settle(config: Any) -> None:
    """Turns the forked copy of the supervisor into an ordinary process with limits of its own."""
    os.setsid()
    # As closed to others as the supervisor until now, with /proc/self owned by root.
    libc.function("prctl")(libc.PR_SET_DUMPABLE, 1, 0, 0, 0)
    for number in signal.valid_signals():
        # Python itself ignores SIGPIPE and SIGXFSZ: they become exceptions.
        kept = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
        if number not in kept and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, b"%d" % OOM_SCORE)
    os.close(fd)
    limit_memory(config.memory_bytes, for_good=config.watch_memory)
    if config.processes:
        rlimits.limit(resource.RLIMIT_NPROC, config.processes)


def limit_memory(memory_bytes: int, *, for_good: bool) -> None:
    """Limits data a little before the sandbox's end, so that running out of memory is mostly a MemoryError and state is
    kept. Where a control group is the wall, this is a convenience, and a program that reserves much more memory than it
    uses, as a browser does, may lift it.
    """
    rlimits.limit(resource.RLIMIT_DATA, memory_bytes // 10 * 9, for_good=for_good)


def hold_headroom() -> None:
    """Lowers the limit on data for the time of a program."""
    _move_data_limit(-_HEADROOM_BYTES)


def give_headroom() -> None:
    """Raises the limit on data again when the program has ended."""
    _move_data_limit(_HEADROOM_BYTES)


def _move_data_limit(by_bytes: int) -> None:
    """Moves the limit from where it is now, as a program may have moved it itself, and as far as that can be done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        moved = max(soft + by_bytes, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (moved if hard == resource.RLIM_INFINITY else min(moved, hard), hard))


class TimeUp(ControlException):
    """A call took too long."""

    __module__ = "builtins"


def within(time_s: float, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in the main thread, and raises TimeUp in it when `time_s` are over.

    It bounds the time spent on a program's own objects after it: its value, its figures.
    """

    def stop(_signum: int, _frame: object) -> None:
        raise TimeUp(f"it took longer than {time_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, time_s)
    try:
        return function(*args)
    finally:
        clear_timers()
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)  # None: a C library's


def clear_timers() -> None:
    """Stops the timers of the process: one that a program left running would end the next one, or the interpreter."""
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)


class OwnProcess:
    """Distinguishes the interpreter's process from those that agent code forked.

    A fork of agent code that returns instead of exiting comes back into the interpreter's own code. It must not answer
    in its place.
    """

    def __init__(self) -> None:
        # Captured: agent code may replace these names in their modules.
        self._getpid, self._exit = os.getpid, os._exit
        self._pid = os.getpid()
        self._waitpid, self._read, self._close = os.waitpid, os.read, os.close
        # The process between this one and its last copy, and a pipe that ends when the copy holds nothing any more.
        self.between: Optional[tuple[int, int]] = None

    def wait_between(self) -> None:
        """Waits for both, before agent code could meet the one, or find its ports taken by the other."""
        assert self.between is not None
        (pid, settled), self.between = self.between, None
        self._read(settled, 1)
        self._close(settled)
        try:
            self._waitpid(pid, 0)
        except ChildProcessError:
            pass  # the program lets the kernel wait for its children

    def move_here(self) -> None:
        """This process, a fork, is the interpreter's from now on."""
        self._pid = self._getpid()
        self.between = None

    def is_here(self) -> bool:
        return self._getpid() == self._pid

    def end_forks(self, code: int = 0) -> None:
        """Exits in a forked process."""
        if self._getpid() != self._pid:
            self._exit(code)
