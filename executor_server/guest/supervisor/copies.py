"""The supervisor's end of a copy of the interpreter, which waits until it is to go on (interpreter/savepoint.py).

A copy is agent code's: what it says is checked, and waited for until a deadline.
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Optional

    from ..wire.lean import socket
    from ..wire.link_messages import LinkMessage

FORK_TIME_S = 2.0
"""Seconds for a fork: from the request for a copy until the copy says that it is there, and for a branch, which writes
no files, to go on. A copy that has to wait for longer than this gives up by itself."""


class Copy:
    """Its pid is 0 until it has said that it is there."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.pid = 0
        self.sock = sock
        self.due = time.monotonic() + FORK_TIME_S  # it has said by then that it is there
        self.left_out: list[str] = []  # by its resumption

    def is_there(self, others: Set[int], *, waits: bool = True) -> bool:
        """True when the process has said that it is there, and may be a copy; `waits` until that is due."""
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
        """True when it was this copy that has ended: with this pid, or before it has said its own."""
        if self.pid:
            return self.pid == pid
        waiting = select.poll()
        waiting.register(self.sock, 0)  # the end of the other side is always reported
        return bool(waiting.poll(0))

    def fork(self) -> Optional[Copy]:
        """Has it fork another one; None when it has ended."""
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
        """Has it, as it is there, go on as an interpreter with its link; None when it has not by then."""
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
        """Kills it; one that has not said that it is there ends with its link.

        Waits for its end so long, if it has said so: its memory is free by then.
        """
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and its exit is about to be reaped
            if wait_s:
                waiting = select.poll()
                waiting.register(self.sock, 0)  # the kernel closes it after it has freed the memory
                waiting.poll(wait_s * 1000)
        self.sock.close()

    def _receive(self, until_s: float) -> LinkMessage:
        """Raises OSError, LinkClosed, FrameError."""
        waiting = select.poll()
        waiting.register(self.sock, select.POLLIN)  # ready also when the copy has ended, and with it the other end
        if not waiting.poll(max(0.0, until_s - time.monotonic()) * 1000):
            raise FrameError("no answer")
        packet = link.receive(self.sock, link.INLINE_BYTES)
        packet.close()
        return message_of(packet)


def _may_be_copy(pid: int) -> bool:
    """True for a child of process 1 that leads a kernel session."""
    stat = proc.stat_of(pid)
    return stat is not None and int(stat[proc.PPID]) == 1 and int(stat[proc.SESSION]) == pid
