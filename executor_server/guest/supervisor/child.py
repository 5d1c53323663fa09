"""Forks the supervisor's children, sends them messages, and kills and reaps all processes of the sandbox.

Killing everything needs no list of processes, which a fork bomb would outrun. The supervisor is pid 1 of its namespace,
so `kill(-1, SIGKILL)` reaches every other process in it, and a fork in flight fails because its parent has the signal
pending.
"""

from __future__ import annotations

import errno
import os
import resource
import time

from ..wire import link, rlimits
from ..wire.lean import deque, signal, socket
from .outcomes import OUT_OF_MEMORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Any, Callable, Optional

    from ..wire.link_messages import LinkMessage

# Messages that may wait for a child. A child with more is broken or hostile.
MAX_WAITING = 4096
# The host lacks memory, or room for descriptors in flight, which other sandboxes of the same user can use up. The child
# is fine.
_LACKING = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_RETRY_TIME_S = 0.02
# Seconds for all processes to end after they were killed.
_REAP_TIME_S = 10.0
_REAP_STEP_S = 0.002
# The descriptor after standard error.
_FIRST_FD = 3
# Seconds for one child to end after it was killed, and between two checks.
_END_TIME_S = 1.0
_END_STEP_S = 0.0005


class ChildStuck(Exception):
    """The child does not read its messages, or can't be sent any."""


class _Waiting:
    __slots__ = ("body", "fds", "memfd", "message")

    def __init__(self, message: LinkMessage, body: bytes, memfd: Optional[int], fds: tuple[int, ...]) -> None:
        self.message = message
        self.body = body
        self.memfd = memfd
        self.fds = fds


class Child:
    """One forked child and the supervisor's end of its link."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.given_up = False
        self.retry_at = float("inf")  # when to call `flush` again: the host lacked something
        self._waiting: deque[_Waiting] = deque()

    @property
    def blocked(self) -> bool:
        """True while the link is full."""
        return bool(self._waiting) and self.retry_at == float("inf")

    def post(
        self, message: LinkMessage, body: bytes = b"", memfd: Optional[int] = None, fds: tuple[int, ...] = ()
    ) -> None:
        """Sends a message now or, when the link is full, as soon as it can. Takes over `memfd` and `fds`."""
        waiting = _Waiting(message, body, memfd, fds)
        if len(self._waiting) >= MAX_WAITING:
            _close(waiting)
            raise ChildStuck(f"{MAX_WAITING} messages wait for the child")
        self._waiting.append(waiting)
        self.flush()

    def take_back(self, kind: type[LinkMessage]) -> bool:
        """Withdraws the waiting messages of a kind; returns true if there were any."""
        before = len(self._waiting)
        for waiting in [each for each in self._waiting if isinstance(each.message, kind)]:
            self._waiting.remove(waiting)
            _close(waiting)
        return len(self._waiting) < before

    def flush(self) -> None:
        """Sends waiting messages, as many as the link takes. The sender decides how long the rest may wait."""
        self.retry_at = float("inf")
        while self._waiting:
            first = self._waiting[0]
            try:
                if first.memfd is not None:
                    link.forward(self.sock, first.message, first.memfd)
                else:
                    link.send(self.sock, first.message, first.body, first.fds)
            except BlockingIOError:
                return
            except link.LinkClosed:
                pass  # it has ended; its exit is reported where children are reaped
            except OSError as error:
                if error.errno in _LACKING:
                    self.retry_at = time.monotonic() + _RETRY_TIME_S
                    return
                raise ChildStuck(f"the child cannot be sent to: {error.strerror}") from error
            self._waiting.popleft()
            _close(first)

    def close(self) -> None:
        self.sock.close()
        for waiting in self._waiting:
            _close(waiting)
        self._waiting.clear()


def _close(waiting: _Waiting) -> None:
    for fd in (*waiting.fds, *(() if waiting.memfd is None else (waiting.memfd,))):
        os.close(fd)


def spawn(target: Callable[[socket.socket], None]) -> Child:
    """Forks a child that runs `target` with its end of a link, and with no other descriptor but the standard ones.

    The supervisor's descriptors, above all the channel to the daemon, are closed by number before `target` can run
    agent code. Their Python objects are not closed: the child never uses them, and closing would copy a hundred pages.
    Raises OSError if the process limit has no room.
    """
    ours, theirs = link.make_pair()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            kept = theirs.fileno()
            os.closerange(_FIRST_FD, kept)
            os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            rlimits.limit_open_files()
            target(theirs)
        except MemoryError:
            os.write(2, OUT_OF_MEMORY)
        finally:
            os._exit(70)
    theirs.close()
    ours.setblocking(False)
    return Child(pid, ours)


def end_child(child: Child) -> None:
    """Kills a child and waits for it, so that none of its CPU time is charged to the run that begins."""
    for kill in (os.kill, os.killpg):  # processes started by an imported module are in the child's group
        try:
            kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # dead already, or not yet the leader of a group
    deadline = time.monotonic() + _END_TIME_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(child.pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            return
        time.sleep(_END_STEP_S)


def reap(*, stopped: bool = True) -> list[tuple[int, int, Any]]:
    """Returns (pid, status, resource usage) of every child that has ended or was stopped since the last call."""
    changed: list[tuple[int, int, Any]] = []
    while True:
        try:
            child = os.wait4(-1, os.WNOHANG | (os.WUNTRACED if stopped else 0))
        except ChildProcessError:
            return changed
        if child[0] == 0:
            return changed
        changed.append(child)


def stop_everything() -> None:
    """Stops every other process of the sandbox; SIGSTOP can't be refused, and a fork in flight fails."""
    _signal_everything(signal.SIGSTOP)


def continue_everything() -> None:
    """Continues every other process, including those that the program had stopped itself."""
    _signal_everything(signal.SIGCONT)


def _signal_everything(number: int) -> None:
    assert os.getpid() == 1, "kill(-1) by a process that is not the first of its namespace"
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        pass  # no other process is there


def kill_but(leaders: Set[int], on_exit: Callable[[int, int, Any], object], *, wait: bool = True) -> bool:
    """Kills all other processes of the sandbox but the kernel sessions of `leaders`, and waits until they have ended.

    Without `wait`, waits only until none of them runs; the kernel may still be freeing their resources. `on_exit` gets
    the children reaped meanwhile. Returns False if a program could not be killed this way: then all sessions were
    killed.
    """
    from ..processes import sessions

    if leaders and sessions.kill_all_but(leaders) and (not wait or sessions.await_end(leaders)):
        for child in reap(stopped=False):
            on_exit(*child)
        return True
    kill_everything(on_exit)
    return False


def await_end(leaders: Set[int]) -> bool:
    """Waits until the processes that `kill_but` killed have ended; false if that takes too long."""
    from ..processes import sessions

    return sessions.await_end(leaders)


def kill_everything(on_exit: Callable[[int, int, Any], object] = lambda *_: None) -> None:
    """Kills every other process of the sandbox and waits for their ends, at most `_REAP_TIME_S`.

    A process that takes longer is stuck in the kernel and runs no code.
    """
    assert os.getpid() == 1, "kill(-1) by a process that is not the first of its namespace"
    deadline = time.monotonic() + _REAP_TIME_S
    while time.monotonic() < deadline:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass  # no process is left, or only zombies
        try:
            while (child := os.wait4(-1, os.WNOHANG))[0]:
                on_exit(*child)
        except ChildProcessError:
            return
        time.sleep(_REAP_STEP_S)
