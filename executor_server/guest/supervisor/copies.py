"""Copies of the interpreter, which wait until the session goes back to them (interpreter/savepoint.py).

A copy is under the control of agent code: its messages are checked, and each wait for one has a deadline.
"""

from __future__ import annotations

import os
import select
import time

from ..wire import link, proc
from ..wire.frames import FrameError
from ..wire.lean import signal
from ..wire.link_messages import CopyWaits, MakeSuccessor, Resume, Resumed, message_of
from .child import Child
from .memory import MemoryWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Optional

    from ..wire.lean import socket
    from ..wire.link_messages import LinkMessage
    from ..wire.savepoint_messages import ListedSavepoint
    from .config import Config
    from .results import Results

FORK_TIME_S = 2.0
"""Seconds for a fork, from the request for a copy until the copy reports. A branch, which writes no files, has the same
time to continue. A copy that has to wait longer gives up by itself."""

# The part of the sandbox's memory above which the oldest savepoints are dropped.
_MEMORY_PART = 0.7
# Seconds for the memory of a dropped savepoint to become free, before memory is measured again.
_FREE_TIME_S = 0.1


class Copy:
    """One copy. Its pid is 0 until it has reported it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.pid = 0
        self.sock = sock
        self.due = time.monotonic() + FORK_TIME_S  # it has to report by then
        self.left_out: list[str] = []  # what its resumption could not restore

    def is_there(self, others: Set[int], *, waits: bool = True) -> bool:
        """True once the copy has reported a pid that can be a copy's. `waits`: for the report, until it is due."""
        if self.pid:
            return True
        try:
            message = self._receive(self.due if waits else 0.0)
        except (OSError, link.LinkClosed, FrameError):
            return False
        if isinstance(message, CopyWaits) and message.pid not in others and _may_be_copy(message.pid):
            self.pid = message.pid
        return self.pid > 0

    def has_ended(self, pid: int) -> bool:
        """True if this copy has ended: with this pid, or before it has reported one."""
        if self.pid:
            return self.pid == pid
        waiting = select.poll()
        waiting.register(self.sock, 0)  # poll always reports that the other end is closed
        return bool(waiting.poll(0))

    def fork(self) -> Optional[Copy]:
        """Makes it fork another copy; None if it has ended."""
        ours, theirs = link.make_pair()
        try:
            link.send(self.sock, MakeSuccessor(), fds=(theirs.fileno(),))
        except (OSError, link.LinkClosed):
            ours.close()
            return None
        finally:
            theirs.close()
        return Copy(ours)

    def start(self, ends_s: float, *, is_branch: bool = False) -> Optional[Child]:
        """Makes it continue as an interpreter with its link; None if it has not done so by `ends_s`."""
        try:
            link.send(self.sock, Resume(branch=is_branch))
            message = self._receive(ends_s)
        except (OSError, link.LinkClosed, FrameError):
            return None
        if not isinstance(message, Resumed):
            return None
        self.left_out = message.left_out
        return Child(self.pid, self.sock)

    def end(self, wait_s: float = 0.0) -> None:
        """Kills the copy. A copy that has not reported its pid ends when its link is closed.

        Waits at most `wait_s` for the kernel to free its memory.
        """
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and its exit is about to be reaped
            if wait_s:
                waiting = select.poll()
                waiting.register(self.sock, 0)  # the kernel frees the memory before it closes this
                waiting.poll(wait_s * 1000)
        self.sock.close()

    def _receive(self, until_s: float) -> LinkMessage:
        """Raises OSError, LinkClosed, FrameError."""
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)  # ready also when the copy has ended
        if not waiting.poll(max(0.0, until_s - time.monotonic()) * 1000):
            raise FrameError("no answer")
        packet = link.receive(self.sock, link.INLINE_BYTES)
        packet.close()
        return message_of(packet)


class Taken(Copy):
    """A savepoint's own process, and what is known about it."""

    def __init__(self, sock: socket.socket, entry: ListedSavepoint) -> None:
        super().__init__(sock)
        self.number = entry.savepoint
        self.entry = entry
        self.successor: Optional[Copy] = None

    def trade(self, successor: Copy) -> None:
        """Swaps processes with the successor."""
        self.pid, successor.pid = successor.pid, self.pid
        self.sock, successor.sock = successor.sock, self.sock

    def end_successor(self) -> None:
        successor, self.successor = self.successor, None
        if successor is not None:
            successor.end()


class KeptCopies:
    """The savepoints and branches that a session can go back to, the oldest first."""

    def __init__(self, config: Config, results: Results) -> None:
        self._config = config
        self._results = results
        self._memory = MemoryWatch()
        self.taken: list[Taken] = []
        self.dropped = 0  # since the last answer to the daemon

    @property
    def _pids(self) -> frozenset[int]:
        return frozenset(copy.pid for copy in self.copies)

    @property
    def copies(self) -> list[Copy]:
        """The savepoints with their successors."""
        return [*self.taken, *(taken.successor for taken in self.taken if taken.successor is not None)]

    def find(self, number: int) -> Optional[Taken]:
        return next((taken for taken in self.taken if taken.number == number), None)

    def is_there(self, copy: Copy, interpreter_pid: int, *, waits: bool = True) -> bool:
        """As `Copy.is_there`, for a pid that is not the interpreter's or another copy's."""
        return copy.is_there(self._pids | {interpreter_pid}, waits=waits)

    def pids(self, interpreter_pid: int) -> frozenset[int]:
        """Returns the copies' processes; waits for those that have not reported yet, and drops those that do not."""
        for taken in [*self.taken]:
            if not self.is_there(taken, interpreter_pid):
                self.drop(taken)
            elif taken.successor is not None and not self.is_there(taken.successor, interpreter_pid):
                taken.end_successor()
        return self._pids

    def note_exit(self, pid: int) -> bool:
        """Drops the savepoint whose process has ended, or its successor."""
        for taken in self.taken:
            if taken.has_ended(pid):
                self.drop(taken)
                return True
            if taken.successor is not None and taken.successor.has_ended(pid):
                taken.end_successor()
                return True
        return False

    def add(self, taken: Taken, most: int, spared: frozenset[int]) -> None:
        """Keeps a copy, and drops the oldest of its kind beyond `most`.

        Then drops the oldest of any kind while memory is short; `spared` is for MemoryWatch.
        """
        self.taken.append(taken)
        of_kind = [each for each in self.taken if each.entry.branch is taken.entry.branch]
        for each in of_kind[: max(0, len(of_kind) - most)]:
            self.drop(each)
        while self.taken and self._memory.exceeds(int(self._config.memory_bytes * _MEMORY_PART), spared):
            self.drop(self.taken[0], _FREE_TIME_S)

    def make_room(self) -> bool:
        """Drops the oldest in a sandbox that uses too much memory; false when there is none to drop.

        Spares the newest: a program that takes all memory must leave a savepoint to go back to.
        """
        if len(self.taken) < 2:
            return False
        self.drop(self.taken[0], _FREE_TIME_S)
        self._results.notify("the oldest savepoint was dropped, since memory was short\n")
        return True

    def drop(self, taken: Taken, wait_s: float = 0.0) -> None:
        self.forget(taken)
        taken.end(wait_s)

    def forget(self, taken: Taken) -> None:
        """Drops a savepoint, but leaves its process to the caller."""
        self.taken.remove(taken)
        self.dropped += 1
        taken.end_successor()


def _may_be_copy(pid: int) -> bool:
    """True for a child of process 1 that leads a kernel session."""
    stat = proc.stat_of(pid)
    return stat is not None and int(stat[proc.PPID]) == 1 and int(stat[proc.SESSION]) == pid
