"""Takes savepoints of a session, and goes back to them. A savepoint is a waiting copy of the interpreter (copies.py).

Theory of operation. To go back, the process of the savepoint forks a successor and then continues as the interpreter;
the successor is the savepoint from then on. So the savepoint stays as it was, and a session can go back to it any
number of times. The latest savepoint (taken or gone back to) gets its successor in advance, a moment later, while the
client's next program runs or the client thinks. All others get it when the session goes back. If no process is
available for a successor, the savepoint is dropped. The older of the two processes continues, because of a list that
the kernel keeps for each mapping: the processes that the mapping comes from, while their forks live. Each fork copies
that list. If the successor continued, the list would grow by one entry each time.

A savepoint costs the memory that has changed since it was taken. It counts against the sandbox's limit, so the oldest
are dropped when there are more than the policy allows, or when memory is short.

Trust. A copy reports its own pid, so agent code chooses it. It is accepted only for an unused process of this sandbox:
a child of process 1 that leads its kernel session. A program can report the pid of any of its own processes. Then the
session goes back to that process, and the program has gained nothing.
"""

from __future__ import annotations

import time

from executor_api.limits import SAVEPOINTS_MAX

from ..wire import link
from ..wire.lean import dumps
from ..wire.link_messages import Answered, SavepointMade
from ..wire.link_messages import TakeSavepoint as MakeSavepoint
from ..wire.savepoint_messages import MAX_LEFT_OUT, ListedSavepoint, RollBack, SavepointList, TakeSavepoint
from ..wire.schema import read_object
from .copies import FORK_TIME_S, Copy, KeptCopies, Taken
from .interpreter_requests import REQUEST_TIME_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..wire.guest_channel import Channel
    from ..wire.messages import Execute
    from .child import Child
    from .child_processes import ChildProcesses
    from .interpreter_requests import Requests
    from .results import Results

    OnTaken = Callable[[Optional[int], str], None]
    OnMade = Callable[[Optional[Taken], str], None]

# Seconds for a session to go back, with all files of the workspace written; it usually takes a few milliseconds. The
# loop stands still meanwhile: background work waits, and the daemon tolerates a silent guest for at least 20 s. With
# less time, a session on a busy host would lose its variables.
_RESUME_TIME_S = 5.0
# Seconds from a savepoint, or a rollback, until its successor is made: a short program has ended by then, and the fork
# does not slow it down.
_SUCCESSOR_DELAY_S = 0.02


class Savepoints:
    """Takes savepoints, and continues from them."""

    def __init__(
        self, channel: Channel, results: Results, children: ChildProcesses, requests: Requests, copies: KeptCopies
    ) -> None:
        self._channel = channel
        self._children = children
        self._requests = requests
        self._results = results
        self._copies = copies
        self._count = 0
        self.before_run: Optional[int] = None  # the savepoint to continue from if the current run is killed
        self.why_not = ""  # why the last savepoint before a run could not be taken
        self._last: Optional[Taken] = None  # the latest; it has a successor, or gets one
        self.successor_due = float("inf")
        self._left_out: list[str] = []  # what the last rollback could not restore

    def _is_there(self, copy: Copy, *, waits: bool = True) -> bool:
        return self._copies.is_there(copy, self._children.interpreter.pid, waits=waits)

    # -- taking --------------------------------------------------------------------------------------------------

    def take(self, request: TakeSavepoint) -> None:
        """Takes one, and answers the request."""

        def on_kept(number: Optional[int], why_not: str) -> None:
            if number is None:
                self._channel.fail(request.op, "savepoint_refused", f"no savepoint could be taken: {why_not}")
            else:
                self.answer(request.op, taken=number)

        self._take(request.kept, request.file_bytes, on_kept)

    def take_before(self, request: Execute) -> None:
        """Takes a savepoint before an execution; the session goes back to it if the interpreter dies."""

        def on_kept(number: Optional[int], why_not: str) -> None:
            self.before_run = number
            if number is None and why_not != self.why_not:  # a reason that holds for many steps is reported once
                self._results.notify(f"no savepoint before this step: {why_not}; steps can't be undone now\n")
            self.why_not = why_not

        self._take(request.savepoints or 1, request.savepoint_file_bytes or 0, on_kept)

    def _take(self, kept: int, file_bytes: int, on_kept: OnTaken) -> None:
        if self._last is not None:
            self._last.end_successor()  # now, so that its memory is not counted against the new one
        self._keep(kept, file_bytes, on_kept, is_branch=False)

    def keep_branch(self, kept: int, file_bytes: int, on_kept: OnTaken, time_s: float) -> None:
        """Makes the branch that is in the interpreter's place take a savepoint; at most `kept` branches stay."""
        self._keep(kept, file_bytes, on_kept, is_branch=True, time_s=time_s)

    def _keep(
        self, kept: int, file_bytes: int, on_kept: OnTaken, *, is_branch: bool, time_s: float = REQUEST_TIME_S
    ) -> None:
        number = self._count + 1

        def on_made(taken: Optional[Taken], why_not: str) -> None:
            if taken is not None:
                self._count = number
                if not is_branch:
                    self._expect(taken)
                self._copies.add(taken, min(kept, SAVEPOINTS_MAX), self._children.closed)
                if taken not in self._copies.taken:
                    why_not = "the sandbox has too little memory left"
            on_kept(None if why_not else number, why_not)

        self._make(number, file_bytes, on_made, is_branch=is_branch, time_s=time_s)

    def fork(self, file_bytes: int, on_forked: OnMade) -> None:
        """Makes the interpreter copy itself, with all files of the workspace; the copy is not kept."""
        self._make(self._count + 1, file_bytes, on_forked, is_branch=True)

    def _make(
        self, number: int, file_bytes: int, on_made: OnMade, *, is_branch: bool, time_s: float = REQUEST_TIME_S
    ) -> None:
        """`on_made` gets the copy, or the reason for its failure."""
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

        message = MakeSavepoint(file_bytes=file_bytes, whole=is_branch)
        self._requests.ask(message, (theirs.detach(),), on_answer, time_s)

    # -- going back ----------------------------------------------------------------------------------------------

    def roll_back(self, request: RollBack, go_back: Callable[[int], bool]) -> None:
        """Goes back, and answers the request. `go_back` replaces the interpreter by the savepoint's process."""
        target = self._copies.find(request.savepoint)
        if target is None:
            numbers = ", ".join(str(each.number) for each in self._copies.taken) or "none"
            message = f"no savepoint {request.savepoint}; available: {numbers}"
            self._channel.fail(request.op, "savepoint_not_found", message)
        elif go_back(request.savepoint):
            for later in [each for each in self._copies.taken if each.number > request.savepoint]:
                if not (target.entry.branch and later.entry.branch):
                    self._copies.drop(later)
            self.answer(request.op)
            self._children.have_checker()  # the client has its answer, and may send a source next
        else:
            message = f"savepoint {request.savepoint} did not answer; a new interpreter was started, without variables"
            self._channel.fail(request.op, "savepoint_lost", message)

    def resume(self, number: Optional[int]) -> bool:
        """Makes this savepoint's process, or a copy of it, the interpreter; false if there is none or it fails.

        Waits for it, at most `_RESUME_TIME_S`: nothing else can be done without an interpreter.
        """
        taken = self._copies.find(number) if number is not None else None
        if taken is None:
            return False
        ends_s = time.monotonic() + _RESUME_TIME_S
        made_ahead = taken.successor is not None
        child = self._start_successor(taken, ends_s)
        if child is None and made_ahead:  # the program may have killed the successor just now
            child = self._start_successor(taken, ends_s)
        if child is not None:
            if not taken.entry.branch:  # the session is as likely to go back to another branch next
                self._expect(taken)
        else:  # no process was available for a successor
            self._copies.forget(taken)
            child = self._start(taken, ends_s)
        if child is not None:
            self._children.adopt(child)
        return child is not None

    def _start_successor(self, taken: Taken, ends_s: float) -> Optional[Child]:
        if taken.successor is None:
            self._children.await_end()  # processes that have not ended yet count against the limit
            self._make_successor(taken)
        copy, taken.successor = taken.successor, None
        if copy is not None and self._is_there(copy) and self._is_there(taken):
            taken.trade(copy)
        return self._start(copy, ends_s) if copy is not None else None

    def start_branch(self, copy: Copy) -> Optional[Child]:
        """Starts the copy next to the interpreter; None if that fails."""
        return self._start(copy, time.monotonic() + FORK_TIME_S, is_branch=True)

    def _start(self, copy: Copy, ends_s: float, *, is_branch: bool = False) -> Optional[Child]:
        """Makes a copy continue as an interpreter; ends it if that fails."""
        child = copy.start(ends_s, is_branch=is_branch) if self._is_there(copy) else None
        if child is None:
            copy.end()
        self._left_out = copy.left_out
        return child

    # -- successors ----------------------------------------------------------------------------------------------------

    def _expect(self, taken: Taken) -> None:
        """Schedules a successor of this savepoint, to which the session is likely to go back next."""
        if self._last is not None and self._last is not taken:
            self._last.end_successor()
        self._last, self.successor_due = taken, time.monotonic() + _SUCCESSOR_DELAY_S

    def on_successor_due(self) -> None:
        """Makes the scheduled successor."""
        self.successor_due = float("inf")
        if self._last is not None and self._last in self._copies.taken:
            self._make_successor(self._last, waits=False)

    def _make_successor(self, taken: Taken, *, waits: bool = True) -> None:
        """Makes a savepoint fork its successor. If it has not reported yet, `waits` for it, or tries again later."""
        if taken.successor is not None:
            return
        if self._is_there(taken, waits=waits):
            taken.successor = taken.fork()
        elif not waits and (now := time.monotonic()) < taken.due:
            self.successor_due = now + _SUCCESSOR_DELAY_S

    # -- answering -------------------------------------------------------------------------------------------------

    def answer(self, op: int, taken: Optional[int] = None) -> None:
        """Answers a request with the list of savepoints."""
        answer = SavepointList(
            savepoints=[taken.entry for taken in self._copies.taken],
            dropped=self._copies.dropped,
            generation=self._results.generation,
            taken=taken,
            left_out=self._left_out[:MAX_LEFT_OUT],
        )
        self._copies.dropped, self._left_out = 0, []
        self._channel.done(op, dumps(answer.head()))
