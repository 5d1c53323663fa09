"""Savepoints of the session, as the other parts of the supervisor see them; most sessions never have one.

The module that keeps them is imported with the first (savepoints.py).
"""

from __future__ import annotations

from ..wire.savepoint_messages import ListSavepoints, RollBack, TakeSavepoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from ..wire.guest_channel import Channel
    from ..wire.messages import ErrorDetail, Execute
    from .background_work import BackgroundWork
    from .branches import Branches
    from .child_processes import ChildProcesses
    from .config import Config
    from .interpreter_requests import Requests
    from .jobs import Job, JobQueue
    from .replacement import Replacement
    from .results import Results
    from .run import Run
    from .savepoints import Savepoints

REQUESTS = (TakeSavepoint, RollBack, ListSavepoints)


class Undo:
    """Does what requests about savepoints ask for, and knows which processes outlive an interpreter."""

    def __init__(self, config: Config, channel: Channel, beside: BackgroundWork, results: Results) -> None:
        self._config = config
        self._channel = channel
        self._beside = beside
        self._results = results
        self._savepoints: Optional[Savepoints] = None
        self._branches: Optional[Branches] = None
        self._parts: Optional[tuple[ChildProcesses, Requests, Replacement]] = None
        self.before_run: Optional[int] = None  # the savepoint that the run at hand goes back to when it is killed
        self.why_not = ""  # the reason why the last one that was wanted before a run is not there

    def connect(self, children: ChildProcesses, requests: Requests, replacement: Replacement) -> None:
        """Gives it the parts that are made after it."""
        self._parts = children, requests, replacement

    def begin(self, request: Union[TakeSavepoint, RollBack, ListSavepoints]) -> None:
        """Begins a request of the daemon."""
        if isinstance(request, TakeSavepoint):
            self._opened().take(request.kept, request.file_bytes, op=request.op)
        elif isinstance(request, RollBack):
            self._opened().roll_back(request)
        else:
            self._opened().answer(request.op)

    def comes_first(self, request: Execute, job: Job, jobs: JobQueue) -> bool:
        """True when a savepoint or a branch is made for the execution, which is put back until that is done."""
        if request.branches:
            self.before_run = None
            if job.saved:
                return False
            job.saved = True
            self._opened_branches().begin(request, job, jobs)
            return True
        if request.savepoints and not job.saved:
            job.saved = True
            jobs.put_back(job)
            self.before_run = None
            self._opened().take(request.savepoints, request.savepoint_file_bytes or 0, on_taken=self._note)
            return True
        if not request.savepoints:
            self.before_run = None
        return False

    def _note(self, number: Optional[int], why_not: str) -> None:
        self.before_run = number
        if number is None and why_not != self.why_not:  # the same reason holds for many steps, and is said once
            self._results.notify(f"no savepoint before this step: {why_not}; steps can't be undone now\n")
        self.why_not = why_not

    @property
    def due(self) -> float:
        """Time at which a savepoint's successor is to be made."""
        return float("inf") if self._savepoints is None else self._savepoints.successor_due

    def on_time(self, now: float) -> None:
        if self._savepoints is not None and now >= self._savepoints.successor_due:
            self._savepoints.on_successor_due()

    def make_room(self) -> bool:
        """Drops the oldest savepoint; false when there is none to drop. The result says so."""
        if self._savepoints is None or not self._savepoints.make_room():
            return False
        self._results.notify("the oldest savepoint was dropped, since memory was short\n")
        return True

    def resume(self, number: Optional[int]) -> bool:
        """Puts an interpreter of this savepoint in place; false when there is none."""
        return number is not None and self._savepoints is not None and self._savepoints.resume(number)

    # -- branches --------------------------------------------------------------------------------------------------

    @property
    def on_branch(self) -> bool:
        """True while a branch is in the place of the interpreter."""
        return self._branches is not None and self._branches.is_on

    def leave_branch(self) -> bool:
        """Ends the branch; false when the interpreter has ended, too."""
        assert self._branches is not None
        return self._branches.leave()

    def end_branch_run(self, run: Run, outcome: str, detail: Optional[ErrorDetail], unfit: str) -> None:
        """Ends the branch of a run that has ended, and sends its result."""
        assert self._branches is not None
        self._branches.on_run_end(run, outcome, detail, unfit)

    def _opened_branches(self) -> Branches:
        if self._branches is None:
            from .branches import Branches

            assert self._parts is not None
            children, requests, replacement = self._parts
            self._branches = Branches(
                *(self._channel, self._results, children, requests, self._opened(), self),
                lambda: replacement.replace(None),
            )
        return self._branches

    def _opened(self) -> Savepoints:
        if self._savepoints is None:
            from .savepoints import Savepoints

            assert self._parts is not None
            children, requests, replacement = self._parts
            self._savepoints = Savepoints(
                self._config, self._channel, self._results, children, requests, replacement.go_back
            )
        return self._savepoints

    # -- the processes that outlive an interpreter -----------------------------------------------------------------

    @property
    def leaders(self) -> frozenset[int]:
        """The kernel sessions of those processes."""
        leaders = self._beside.leaders if self._savepoints is None else self._beside.leaders | self._savepoints.pids
        return leaders if self._branches is None else leaders | self._branches.leaders

    def note_exit(self, pid: int, status: int, usage: Any) -> bool:
        """Notes that a process was reaped; true when it is one of these."""
        is_copy = self._savepoints is not None and self._savepoints.note_exit(pid)
        is_trunk = self._branches is not None and self._branches.note_exit(pid)
        return is_copy or is_trunk or self._beside.note_exit(pid, status, usage)
