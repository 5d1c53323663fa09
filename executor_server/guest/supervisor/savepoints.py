"""Keeps the savepoints of a session: processes that wait, copies of the interpreter (interpreter/savepoint.py).

Theory of operation. The process of a savepoint never goes on itself: it forks another one, its spare, and that becomes
the interpreter. So the savepoint stays as it was, and a session goes back to it any number of times. A spare is made
ahead for the savepoint that was taken or gone back to last, a moment later, while the client's next program runs or the
client thinks; for all others, or where it is not there, when the session goes back. Where no process is left for one,
the savepoint's own goes on, and the savepoint is dropped.

A savepoint costs what has changed since it was taken. Its memory counts against the sandbox's limit, so the oldest are
dropped when there are more than the policy allows, or when memory is short.

Trust. The pid of a copy comes from itself, so it is agent code's: it is taken only for a process of this
sandbox that is no one else's, a child of process 1 that leads a session of its own. A program can put any process of
its own in that place; then it goes back to that, and has gained nothing.
"""

from __future__ import annotations

import os
import select
import time

from executor_api.limits import SAVEPOINTS_MAX

from ..wire import link
from ..wire.frames import FrameError
from ..wire.lean import dumps, signal
from ..wire.link_messages import (
    Answered,
    CopyWaits,
    MakeSpare,
    Resume,
    Resumed,
    SavepointMade,
    TakeSavepoint,
    message_of,
)
from ..wire.savepoint_messages import MAX_LEFT_OUT, ListedSavepoint, RollBack, SavepointList
from ..wire.schema import read_object
from . import memory
from .children import Child
from .requests import REQUEST_TIME_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..wire.channel import Channel
    from ..wire.lean import socket
    from ..wire.link_messages import LinkMessage
    from .child_processes import ChildProcesses
    from .config import Config
    from .requests import Requests
    from .results import Results

    OnTaken = Callable[[Optional[int], str], None]
    OnMade = Callable[[Optional["Taken"], str], None]

# Seconds for a session to go back, with all files of the workspace written; a few milliseconds are usual.
_RESUME_TIME_S = 5.0
# Seconds for a fork: from the request for a copy until the copy says that it is there, and for a branch, which writes
# no files, to go on. A copy that has to wait for longer than this gives up by itself (interpreter/savepoint.py).
_FORK_TIME_S = 2.0
# Seconds from a savepoint, or a rollback, until its spare is made: a short program that comes next has run by then, and
# is not slowed down by the fork.
_SPARE_DELAY_S = 0.02
# The part of the sandbox's memory above which the oldest savepoints are dropped.
_MEMORY_PART = 0.7
_STAT_PPID, _STAT_SESSION = 1, 3


class Copy:
    """A process that waits, and the supervisor's end of its link. Its pid is 0 until it has said that it is there."""

    def __init__(self, sock: socket.socket) -> None:
        self.pid = 0
        self.sock = sock
        self.due = time.monotonic() + _FORK_TIME_S  # it has said by then that it is there

    def end(self) -> None:
        """Kills it; one that has not said that it is there ends with its link."""
        self.sock.close()
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and its exit is about to be reaped


class Taken(Copy):
    """A savepoint's own process, and what is known of it."""

    def __init__(self, sock: socket.socket, entry: ListedSavepoint) -> None:
        super().__init__(sock)
        self.number = entry.savepoint
        self.entry = entry
        self.spare: Optional[Copy] = None


class Savepoints:
    """Owns them, the oldest first."""

    def __init__(
        self,
        config: Config,
        channel: Channel,
        results: Results,
        children: ChildProcesses,
        requests: Requests,
        go_back: Callable[[int], bool],
    ) -> None:
        """`go_back` replaces the interpreter, calls `resume` for the new one, and returns what that returned."""
        self._config = config
        self._channel = channel
        self._children = children
        self._requests = requests
        self._results = results
        self._go_back = go_back
        self._kept: list[Taken] = []  # savepoints and branches, by their numbers
        self._count = 0
        self._dropped = 0  # since the last answer
        self._last: Optional[Taken] = None  # taken or gone back to last; it has a spare, or gets one
        self.spare_due = float("inf")
        self._file_bytes = 0  # a savepoint may hold of the workspace
        self._left_out: list[str] = []  # by the last resumption

    @property
    def pids(self) -> frozenset[int]:
        """Their processes; waits for those that have not said yet that they are there, and drops those that do not."""
        for taken in [*self._kept]:
            if not self._is_there(taken):
                self._drop(taken)
            elif taken.spare is not None and not self._is_there(taken.spare):
                self._end_spare(taken)
        return frozenset(copy.pid for copy in self._copies)

    @property
    def sharing(self) -> frozenset[int]:
        """The processes that share memory: theirs, and the interpreter's."""
        if not self._kept:
            return frozenset()
        there = [copy.pid for copy in self._copies if self._is_there(copy, wait=False)]
        return frozenset((*there, self._children.interpreter.pid))

    @property
    def _copies(self) -> list[Copy]:
        return [*self._kept, *(taken.spare for taken in self._kept if taken.spare is not None)]

    def close_all(self) -> None:
        for copy in self._copies:
            copy.sock.close()

    def note_exit(self, pid: int) -> bool:
        """Drops the savepoint whose process has ended, or its spare."""
        for taken in self._kept:
            if _is_that(taken, pid):
                self._drop(taken)
                return True
            if taken.spare is not None and _is_that(taken.spare, pid):
                self._end_spare(taken)
                return True
        return False

    # -- taking --------------------------------------------------------------------------------------------------

    def take(self, kept: int, file_bytes: int, *, op: int = 0, on_taken: Optional[OnTaken] = None) -> None:
        """Has the interpreter make one; answers the request, or calls `on_taken` with its number, or the reason."""
        self._file_bytes = file_bytes

        def on_kept(number: Optional[int], why_not: str) -> None:
            if on_taken is not None:
                on_taken(number, why_not)
            elif number is None:
                self._channel.fail(op, "savepoint_refused", f"no savepoint could be taken: {why_not}")
            else:
                self.answer(op, taken=number)

        self._keep(kept, on_kept, is_branch=False)

    def keep_branch(self, kept: int, file_bytes: int, on_kept: OnTaken, time_s: float) -> None:
        """Has the branch that is in the place of the interpreter make one of itself; at most so many are kept."""
        self._file_bytes = file_bytes
        self._keep(kept, on_kept, is_branch=True, time_s=time_s)

    def _keep(self, kept: int, on_kept: OnTaken, *, is_branch: bool, time_s: float = REQUEST_TIME_S) -> None:
        number = self._count + 1

        def on_made(taken: Optional[Taken], why_not: str) -> None:
            if taken is not None:
                self._count = number
                self._kept.append(taken)
                if not is_branch:
                    self._expect(taken)
                self._drop_beyond(min(kept, SAVEPOINTS_MAX), is_branch=is_branch)
                if self._find(number) is None:
                    why_not = "the memory of the sandbox does not suffice"
            on_kept(None if why_not else number, why_not)

        self._make(number, on_made, is_branch=is_branch, time_s=time_s)

    def fork(self, file_bytes: int, on_forked: OnMade) -> None:
        """Has the interpreter make a copy that is not kept, with all files of the workspace."""
        self._file_bytes = file_bytes
        self._make(self._count + 1, on_forked, is_branch=True)

    def _make(self, number: int, on_made: OnMade, *, is_branch: bool, time_s: float = REQUEST_TIME_S) -> None:
        """`on_made` gets the copy, or the reason why there is none."""
        ours, theirs = link.make_pair()
        ours.setblocking(False)

        def on_answer(answer: Answered, body: bytes) -> None:
            if not answer.ok:
                ours.close()
                on_made(None, answer.message or "no reason was given")
                return
            made = read_object(SavepointMade, body, "a savepoint")
            entry = ListedSavepoint(
                savepoint=number,
                made=time.time(),
                files=made.files,
                file_bytes=made.file_bytes,
                left_out=made.left_out,
                branch=is_branch,
            )
            on_made(Taken(ours, entry), "")

        request = TakeSavepoint(file_bytes=self._file_bytes, whole=is_branch)
        self._requests.ask(request, (theirs.detach(),), on_answer, time_s)

    def _is_there(self, copy: Copy, *, wait: bool = True) -> bool:
        """True when the process has said that it is there, and is what a copy is; waits until that is due."""
        if copy.pid:
            return True
        try:
            message = _receive(copy.sock, max(0.0, copy.due - time.monotonic()) if wait else 0.0)
        except (OSError, link.LinkClosed, FrameError):
            return False
        if isinstance(message, CopyWaits) and self._may_be_copy(message.pid):
            copy.pid = message.pid
        return copy.pid > 0

    def _may_be_copy(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                text = file.read()
        except OSError:
            return False
        stat = text[text.rfind(b")") + 2 :].split()
        ours = {self._children.interpreter.pid, *(copy.pid for copy in self._copies)}
        return pid not in ours and int(stat[_STAT_PPID]) == 1 and int(stat[_STAT_SESSION]) == pid

    def _drop_beyond(self, most: int, *, is_branch: bool) -> None:
        """Drops the oldest: of savepoints, or of branches, those beyond `most`; then any, while memory is short."""
        of_kind = [taken for taken in self._kept if taken.entry.branch is is_branch]
        for taken in of_kind[: max(0, len(of_kind) - most)]:
            self._drop(taken)
        while self._kept and self._memory_is_short():
            self._drop(self._kept[0])

    def _memory_is_short(self) -> bool:
        limit_bytes = int(self._config.memory_bytes * _MEMORY_PART)
        # Without their shares first, as if nothing were shared: that is fast, and mostly enough to know.
        return memory.sandbox_memory_bytes() > limit_bytes and memory.sandbox_memory_bytes(self.sharing) > limit_bytes

    # -- going back ----------------------------------------------------------------------------------------------

    def roll_back(self, request: RollBack) -> None:
        """Goes back, and answers the request."""
        target = self._find(request.savepoint)
        if target is None:
            numbers = ", ".join(str(savepoint.number) for savepoint in self._kept) or "none"
            message = f"savepoint {request.savepoint} is not there; those that are: {numbers}"
            self._channel.fail(request.op, "savepoint_not_found", message)
        elif self._go_back(request.savepoint):
            for later in [each for each in self._kept if each.number > request.savepoint]:
                if not (target.entry.branch and later.entry.branch):
                    self._drop(later)
            self.answer(request.op)
        else:
            message = f"savepoint {request.savepoint} did not answer: a new interpreter was started, without variables"
            self._channel.fail(request.op, "savepoint_lost", message)

    def resume(self, number: int) -> bool:
        """Makes a copy of this savepoint's process the interpreter; false when that failed.

        Waits for it, at most `_RESUME_TIME_S`, since nothing else can be done without an interpreter.
        """
        taken = self._find(number)
        if taken is None:
            return False
        self._left_out = []
        ends_s = time.monotonic() + _RESUME_TIME_S
        if taken.spare is None:
            self._make_spare(taken)
        copy, taken.spare = taken.spare, None
        child = self._start(copy, ends_s) if copy is not None else None
        if child is None:  # no process was left for it, or the program has killed it
            self._forget(taken)
            child = self._start(taken, ends_s)
        else:
            self._expect(taken)
        if child is None:
            return False
        self._children.adopt(child)
        return True

    def go_on_beside(self, copy: Copy) -> Optional[Child]:
        """Starts the copy beside the interpreter; None when that failed."""
        return self._start(copy, time.monotonic() + _FORK_TIME_S, is_branch=True)

    def _start(self, copy: Copy, ends_s: float, *, is_branch: bool = False) -> Optional[Child]:
        """Has a copy go on as an interpreter, with its link; None when that failed, and then it is killed."""
        try:
            if not self._is_there(copy):
                raise FrameError("no copy")
            link.send(copy.sock, Resume(branch=is_branch))
            message = _receive(copy.sock, max(0.0, ends_s - time.monotonic()))
            if not isinstance(message, Resumed):
                raise FrameError("not what a copy says")
        except (OSError, link.LinkClosed, FrameError):
            copy.end()
            return None
        self._left_out = message.left_out
        return Child(copy.pid, copy.sock)

    # -- spares ----------------------------------------------------------------------------------------------------

    def _expect(self, taken: Taken) -> None:
        """Has a spare of this savepoint made soon: it is likely that the session goes back to this one next."""
        if self._last is not None and self._last is not taken:
            self._end_spare(self._last)
        self._last, self.spare_due = taken, time.monotonic() + _SPARE_DELAY_S

    def on_spare_due(self) -> None:
        self.spare_due = float("inf")
        if self._last in self._kept and self._last.spare is None:
            self._make_spare(self._last)

    def _make_spare(self, taken: Taken) -> None:
        """Has the savepoint's process fork one, if it is there."""
        ours, theirs = link.make_pair()
        ours.setblocking(False)
        try:
            if self._is_there(taken):
                link.send(taken.sock, MakeSpare(), fds=(theirs.fileno(),))
                taken.spare = Copy(ours)
        except (OSError, link.LinkClosed):
            pass  # it has ended, and its exit is about to be reaped
        finally:
            theirs.close()
            if taken.spare is None:
                ours.close()

    @staticmethod
    def _end_spare(taken: Taken) -> None:
        spare, taken.spare = taken.spare, None
        if spare is not None:
            spare.end()

    # -- answering -------------------------------------------------------------------------------------------------

    def answer(self, op: int, taken: Optional[int] = None) -> None:
        """Answers a request with all savepoints that are there."""
        answer = SavepointList(
            savepoints=[taken.entry for taken in self._kept],
            dropped=self._dropped,
            generation=self._results.generation,
            taken=taken,
            left_out=self._left_out[:MAX_LEFT_OUT],
        )
        self._dropped, self._left_out = 0, []
        self._channel.done(op, dumps(answer.head()))

    def _find(self, number: int) -> Optional[Taken]:
        return next((savepoint for savepoint in self._kept if savepoint.number == number), None)

    def _drop(self, taken: Taken) -> None:
        self._forget(taken)
        taken.end()

    def _forget(self, taken: Taken) -> None:
        self._kept.remove(taken)
        self._dropped += 1
        self._end_spare(taken)


def _is_that(copy: Copy, pid: int) -> bool:
    """True when it was this copy that has ended."""
    return copy.pid == pid or (not copy.pid and _has_ended(copy.sock))


def _has_ended(sock: socket.socket) -> bool:
    """True when the other end of a link is closed."""
    waiting = select.poll()
    waiting.register(sock, 0)  # the end of the other side is always reported
    return bool(waiting.poll(0))


def _receive(sock: socket.socket, wait_s: float) -> LinkMessage:
    """Receives a message of a copy. Raises OSError, LinkClosed, FrameError."""
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)  # ready also when the copy has ended, and with it the other end
    if not waiting.poll(wait_s * 1000):
        raise FrameError("no answer")
    packet = link.receive(sock, link.INLINE_BYTES)
    packet.close()
    return message_of(packet)
