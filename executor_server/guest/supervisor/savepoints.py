"""Keeps the savepoints of a session: processes that wait, copies of the interpreter (interpreter/savepoint.py).

Theory of operation. The process of a savepoint goes on as the interpreter when it has forked a successor, which is the
savepoint's own from then on. So the savepoint stays as it was, and a session goes back to it any number of times. A
successor is made ahead for the savepoint that was taken or gone back to last, a moment later, while the client's next
program runs or the client thinks; for all others, or where it is not there, when the session goes back. Where no
process is left for one, the savepoint is dropped. The older of the two goes on because the kernel keeps, for each
mapping, the processes that it comes from, as long as forks of theirs live, and each fork copies that list: it would
grow by one more with each way back.

A savepoint costs what has changed since it was taken. Its memory counts against the sandbox's limit, so the oldest are
dropped when there are more than the policy allows, or when memory is short.

Trust. The pid of a copy comes from itself, so it is agent code's: it is taken only for a process of this
sandbox that is no one else's, a child of process 1 that leads a session of its own. A program can put any process of
its own in that place; then it goes back to that, and has gained nothing.
"""

from __future__ import annotations

import time

from executor_api.limits import SAVEPOINTS_MAX

from ..wire import link
from ..wire.lean import dumps
from ..wire.link_messages import Answered, SavepointMade, TakeSavepoint
from ..wire.savepoint_messages import MAX_LEFT_OUT, ListedSavepoint, RollBack, SavepointList
from ..wire.schema import read_object
from .copies import FORK_TIME_S, Copy
from .interpreter_requests import REQUEST_TIME_S
from .memory import MemoryWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..wire.guest_channel import Channel
    from ..wire.lean import socket
    from .child import Child
    from .child_processes import ChildProcesses
    from .config import Config
    from .interpreter_requests import Requests
    from .results import Results

    OnTaken = Callable[[Optional[int], str], None]
    OnMade = Callable[[Optional["Taken"], str], None]

# Seconds for a session to go back, with all files of the workspace written; a few milliseconds are usual. The loop
# stands still meanwhile: what runs beside waits, and the daemon gives a silent guest 20 s at least. With less time, a
# busy host would cost a session its variables.
_RESUME_TIME_S = 5.0
# Seconds from a savepoint, or a rollback, until its successor is made: a short program that comes next has run by then,
# and is not slowed down by the fork.
_SUCCESSOR_DELAY_S = 0.02
# The part of the sandbox's memory above which the oldest savepoints are dropped.
_MEMORY_PART = 0.7
# Seconds for the memory of a dropped savepoint to become free, before memory is measured again.
_FREE_TIME_S = 0.1


class Taken(Copy):
    """A savepoint's own process, and what is known of it."""

    def __init__(self, sock: socket.socket, entry: ListedSavepoint) -> None:
        super().__init__(sock)
        self.number = entry.savepoint
        self.entry = entry
        self.successor: Optional[Copy] = None

    def trade(self, successor: Copy) -> None:
        """Takes the successor's process for its own, and gives it the one that it had."""
        self.pid, successor.pid = successor.pid, self.pid
        self.sock, successor.sock = successor.sock, self.sock

    def end_successor(self) -> None:
        successor, self.successor = self.successor, None
        if successor is not None:
            successor.end()


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
        self._memory = MemoryWatch()
        self._count = 0
        self._dropped = 0  # since the last answer
        self._last: Optional[Taken] = None  # taken or gone back to last; it has a successor, or gets one
        self.successor_due = float("inf")
        self._file_bytes = 0  # a savepoint may hold of the workspace
        self._left_out: list[str] = []  # by the last resumption

    @property
    def pids(self) -> frozenset[int]:
        """Their processes; waits for those that have not said yet that they are there, and drops those that do not."""
        for taken in [*self._kept]:
            if not self._is_there(taken):
                self._drop(taken)
            elif taken.successor is not None and not self._is_there(taken.successor):
                taken.end_successor()
        return self._pids

    @property
    def _copies(self) -> list[Copy]:
        return [*self._kept, *(taken.successor for taken in self._kept if taken.successor is not None)]

    @property
    def _pids(self) -> frozenset[int]:
        return frozenset(copy.pid for copy in self._copies)

    def _is_there(self, copy: Copy, *, waits: bool = True) -> bool:
        return copy.is_there(self._pids | {self._children.interpreter.pid}, waits=waits)

    def note_exit(self, pid: int) -> bool:
        """Drops the savepoint whose process has ended, or its successor."""
        for taken in self._kept:
            if taken.has_ended(pid):
                self._drop(taken)
                return True
            if taken.successor is not None and taken.successor.has_ended(pid):
                taken.end_successor()
                return True
        return False

    # -- taking --------------------------------------------------------------------------------------------------

    def take(self, kept: int, file_bytes: int, *, op: int = 0, on_taken: Optional[OnTaken] = None) -> None:
        """Has the interpreter make one; answers the request, or calls `on_taken` with its number, or the reason."""
        self._file_bytes = file_bytes
        if self._last is not None:
            self._last.end_successor()  # now, and its memory is not counted when the savepoint is there

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

    def _drop_beyond(self, most: int, *, is_branch: bool) -> None:
        """Drops the oldest: of savepoints, or of branches, those beyond `most`; then any, while memory is short."""
        of_kind = [taken for taken in self._kept if taken.entry.branch is is_branch]
        for taken in of_kind[: max(0, len(of_kind) - most)]:
            self._drop(taken)
        while self._kept and self._memory.exceeds(int(self._config.memory_bytes * _MEMORY_PART)):
            self._drop(self._kept[0], _FREE_TIME_S)

    def make_room(self) -> bool:
        """Drops the oldest of a sandbox that has too much memory; false when there is none to drop.

        Spares the newest: a program that takes all memory must leave a savepoint to go back to.
        """
        if len(self._kept) < 2:
            return False
        self._drop(self._kept[0], _FREE_TIME_S)
        return True

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
            self._children.have_checker()  # the client has its answer, and may send a source next
        else:
            message = f"savepoint {request.savepoint} did not answer: a new interpreter was started, without variables"
            self._channel.fail(request.op, "savepoint_lost", message)

    def resume(self, number: int) -> bool:
        """Makes this savepoint's process, or a copy of it, the interpreter; false when that failed.

        Waits for it, at most `_RESUME_TIME_S`, since nothing else can be done without an interpreter.
        """
        taken = self._find(number)
        if taken is None:
            return False
        ends_s = time.monotonic() + _RESUME_TIME_S
        made_ahead = taken.successor is not None
        child = self._start_successor(taken, ends_s)
        if child is None and made_ahead:  # the program may have killed that one just now
            child = self._start_successor(taken, ends_s)
        if child is not None:
            if not taken.entry.branch:  # other branches are gone on from as likely
                self._expect(taken)
        else:  # no process was left for it
            self._forget(taken)
            child = self._start(taken, ends_s)
        if child is not None:
            self._children.adopt(child)
        return child is not None

    def _start_successor(self, taken: Taken, ends_s: float) -> Optional[Child]:
        if taken.successor is None:
            self._children.await_end()  # else what has not ended yet may leave no place for another process
            self._make_successor(taken)
        copy, taken.successor = taken.successor, None
        if copy is not None and self._is_there(copy) and self._is_there(taken):
            taken.trade(copy)
        return self._start(copy, ends_s) if copy is not None else None

    def go_on_beside(self, copy: Copy) -> Optional[Child]:
        """Starts the copy beside the interpreter; None when that failed."""
        return self._start(copy, time.monotonic() + FORK_TIME_S, is_branch=True)

    def _start(self, copy: Copy, ends_s: float, *, is_branch: bool = False) -> Optional[Child]:
        """Has a copy go on as an interpreter; ends it when that failed."""
        child = copy.start(ends_s, is_branch=is_branch) if self._is_there(copy) else None
        if child is None:
            copy.end()
        self._left_out = copy.left_out
        return child

    # -- successors ----------------------------------------------------------------------------------------------------

    def _expect(self, taken: Taken) -> None:
        """Has a successor of this savepoint made soon: the session is likely to go back to this one next."""
        if self._last is not None and self._last is not taken:
            self._last.end_successor()
        self._last, self.successor_due = taken, time.monotonic() + _SUCCESSOR_DELAY_S

    def on_successor_due(self) -> None:
        self.successor_due = float("inf")
        if self._last is not None and self._last in self._kept:
            self._make_successor(self._last, waits=False)

    def _make_successor(self, taken: Taken, *, waits: bool = True) -> None:
        """Does it later where the savepoint has not said yet that it is there, unless this `waits` for that."""
        if taken.successor is not None:
            return
        if self._is_there(taken, waits=waits):
            taken.successor = taken.fork()
        elif not waits and (now := time.monotonic()) < taken.due:
            self.successor_due = now + _SUCCESSOR_DELAY_S

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

    def _drop(self, taken: Taken, wait_s: float = 0.0) -> None:
        self._forget(taken)
        taken.end(wait_s)

    def _forget(self, taken: Taken) -> None:
        self._kept.remove(taken)
        self._dropped += 1
        taken.end_successor()
