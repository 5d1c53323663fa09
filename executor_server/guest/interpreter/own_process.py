"""The interpreter's process: turns a fork of the supervisor into it, sets its limits, and recognizes its forks."""

from __future__ import annotations

import os
import resource

from ..wire import libc, rlimits
from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

OOM_SCORE = 900
"""When memory runs out, the kernel should kill this process, not the supervisor. Processes with 1000 go first:
savepoints, and those that calls have started."""

# Bytes of data withheld from programs, for the work between two programs: one may keep all the memory that it has.
_HEADROOM_BYTES = 2 * 1024 * 1024


def settle(config: Any) -> None:
    """Turns the forked copy of the supervisor into an ordinary process with limits of its own."""
    os.setsid()
    # Until now it was closed to others like the supervisor, with /proc/self owned by root.
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
    """Limits data a little below the sandbox's limit, so that running out of memory is mostly a MemoryError and keeps
    the state. Where a control group is the wall, this is a convenience: a program that reserves much more memory than
    it uses, as a browser does, may lift it.
    """
    rlimits.limit(resource.RLIMIT_DATA, memory_bytes // 10 * 9, for_good=for_good)


def hold_headroom() -> None:
    """Lowers the limit on data while a program runs."""
    _move_data_limit(-_HEADROOM_BYTES)


def give_headroom() -> None:
    """Raises the limit on data again after the program."""
    _move_data_limit(_HEADROOM_BYTES)


def _move_data_limit(by_bytes: int) -> None:
    """Moves the limit as far as possible from its present value, which a program may have changed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        moved = max(soft + by_bytes, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (moved if hard == resource.RLIM_INFINITY else min(moved, hard), hard))


class OwnProcess:
    """Distinguishes the interpreter's process from those that agent code forked.

    A fork by agent code that returns instead of exiting comes back into the interpreter's own code. It must not answer
    in the interpreter's place.
    """

    def __init__(self) -> None:
        # Captured: agent code may replace these names in their modules.
        self._getpid, self._exit = os.getpid, os._exit
        self._pid = os.getpid()
        self._waitpid, self._read, self._close = os.waitpid, os.read, os.close
        # The process between this one and its last copy, and a pipe that ends once the copy has closed its descriptors.
        self.between: Optional[tuple[int, int]] = None

    def wait_between(self) -> None:
        """Waits for both, before agent code can meet the process or find its ports taken by the copy."""
        assert self.between is not None
        (pid, settled), self.between = self.between, None
        self._read(settled, 1)
        self._close(settled)
        try:
            self._waitpid(pid, 0)
        except ChildProcessError:
            pass  # the program lets the kernel wait for its children

    def move_here(self) -> None:
        """Makes this process, a fork, the interpreter's."""
        self._pid = self._getpid()
        self.between = None

    def is_here(self) -> bool:
        return self._getpid() == self._pid

    def end_forks(self, code: int = 0) -> None:
        """Exits in a forked process."""
        if self._getpid() != self._pid:
            self._exit(code)
