"""Branches: executions that run in a copy of the interpreter, and leave the session as it was.

Theory of operation. The interpreter takes a savepoint, whose process starts at once in the place of the interpreter and
runs the execution. So a branch is an execution like any other: it is checked, counted, limited, interrupted, and its
tools are answered. Meanwhile the interpreter waits, with its sockets and its children, and no other job begins.

When the program has ended, the branch reports its changes. If the program succeeded, a savepoint of the branch is
taken, from which the session can continue later. Then the branch and all processes that it started are killed, the
interpreter restores the files of the workspace, and only then the result is sent.

A branch that ends early, or has to be killed, takes the same path without the first steps. Branches run one after the
other, because they share the workspace.

Trust. A branch is agent code with the same uid as the interpreter, and can kill it. Then the session loses its
variables, and says so. The branch gains nothing.
"""

from __future__ import annotations

from executor_api.limits import SAVEPOINTS_MAX

from ..wire.link_messages import BeginBranch, BranchChanges, EndBranch, RestoreFiles
from ..wire.messages import ErrorDetail
from ..wire.savepoint_messages import MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS, MAX_REASON_CHARS, BranchEnded
from ..wire.schema import read_object
from .run import Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..wire.guest_channel import Channel
    from ..wire.link_messages import Answered
    from ..wire.messages import Execute
    from .child_processes import ChildProcesses
    from .copies import Taken
    from .interpreter_requests import Requests
    from .jobs import Job, JobQueue
    from .replacement import Replacement
    from .results import Results
    from .savepoints import Savepoints

_DIED = "its process has ended"
_TRUNK_DIED = "the interpreter, which has ended, and with it the copy of the workspace"
# Seconds for a branch to record its variables, to compare them, and to copy itself with its files. Comparing honest
# values takes 2 s at most. Methods of agent values can delay each step; then the branch is killed.
_ANSWER_TIME_S = 8.0


class _EndedRun:
    """A run that has ended, and the contents of its result."""

    def __init__(self, run: Run, outcome: str, detail: Optional[ErrorDetail], left_out: list[str]) -> None:
        self.run = run
        self.outcome = outcome
        self.detail = detail
        self.output, run.output = run.output, None  # else the runner closes it
        self.left_out = left_out
        self.number: Optional[int] = None
        self.why_not_kept = ""
        self.changes: Optional[BranchChanges] = None


class Branches:
    """Runs one branch at a time."""

    def __init__(
        self,
        channel: Channel,
        results: Results,
        jobs: JobQueue,
        children: ChildProcesses,
        requests: Requests,
        savepoints: Savepoints,
        replacement: Replacement,
    ) -> None:
        self._channel = channel
        self._results = results
        self._jobs = jobs
        self._children = children
        self._requests = requests
        self._savepoints = savepoints
        self._replacement = replacement
        self._request: Optional[Execute] = None
        self._left_out: list[str] = []
        self._ending: Optional[_EndedRun] = None

    # -- beginning -----------------------------------------------------------------------------------------------

    def begin(self, request: Execute, job: Job) -> None:
        """Makes a branch for a job, which is put back until the branch exists."""
        self._jobs.put_back(job)
        self._request = request

        def on_forked(taken: Optional[Taken], why_not: str) -> None:
            branch = self._savepoints.start_branch(taken) if taken is not None else None
            if taken is None or branch is None:
                self._refuse(request, why_not or _DIED)
                return
            self._left_out = [*taken.entry.left_out]
            self._children.enter_branch(branch)
            self._requests.ask(BeginBranch(), (), on_begun, _ANSWER_TIME_S)

        def on_begun(answer: Answered, _body: bytes) -> None:
            if not answer.ok or not self._children.on_branch:
                self._leave()
                self._refuse(request, answer.message or _DIED)
            elif job not in self._jobs:
                self._leave()  # it was cancelled meanwhile, and its result has been sent

        self._savepoints.fork(request.savepoint_file_bytes or 0, on_forked)

    def _leave(self) -> None:
        if self._children.on_branch and not self._children.leave_branch():
            self._replacement.replace(None)

    def _refuse(self, request: Execute, why_not: str) -> None:
        """Ends the execution before any of it has run."""
        if self._jobs.cancel(request.id) is None:
            return
        run = Run(request, "", 0, self._channel)
        message = f"no branch could be made: {why_not}"
        ended = BranchEnded(refused=why_not[:MAX_REASON_CHARS] or "no reason was given", left_out=[])
        self._results.send(run, "exception", ErrorDetail(type="BranchRefused", message=message), ended)

    # -- ending --------------------------------------------------------------------------------------------------

    def on_run_end(self, run: Run, outcome: str, detail: Optional[ErrorDetail], unfit: str) -> None:
        """Ends the branch of this run, then sends the result. `unfit`: why the branch can't run anything more."""
        self._ending = ending = _EndedRun(run, outcome, detail, self._left_out)
        if not self._children.on_branch:
            ending.why_not_kept = _DIED
            self._restore_files(ending)
        elif unfit:
            ending.why_not_kept = unfit
            self._close(ending)
        else:
            self._requests.ask(EndBranch(), (), self._on_changes, _ANSWER_TIME_S)

    def _on_changes(self, answer: Answered, body: bytes) -> None:
        ending = self._ending
        assert ending is not None and self._request is not None
        if answer.ok:
            ending.changes = read_object(BranchChanges, body, "changes")
            if ending.outcome == "succeeded":
                kept = min(self._request.branches or 1, SAVEPOINTS_MAX)
                self._savepoints.keep_branch(
                    kept, self._request.savepoint_file_bytes or 0, self._on_kept, _ANSWER_TIME_S
                )
                return
            ending.why_not_kept = "its program has not succeeded"
        else:
            ending.why_not_kept = answer.message or _DIED
        self._close(ending)

    def _on_kept(self, number: Optional[int], why_not: str) -> None:
        assert self._ending is not None
        self._ending.number, self._ending.why_not_kept = number, why_not
        self._close(self._ending)

    def _close(self, ending: _EndedRun) -> None:
        self._leave()
        self._restore_files(ending)

    def _restore_files(self, ending: _EndedRun) -> None:
        if self._children.trunk_ended:
            ending.left_out.append(_TRUNK_DIED)
            self._finish(ending)
            return
        generation = self._results.generation

        def on_restored(answer: Answered, _body: bytes) -> None:
            if self._results.generation != generation:
                ending.left_out.append(_TRUNK_DIED)  # it was killed before, and is reaped only now
            elif not answer.ok:
                ending.left_out.append(answer.message[:MAX_LEFT_OUT_CHARS] or "files of the workspace")
            self._finish(ending)

        self._requests.ask(RestoreFiles(), (), on_restored)

    def _finish(self, ending: _EndedRun) -> None:
        self._ending = self._request = None
        run, run.output = ending.run, ending.output
        ended = BranchEnded(
            number=ending.number,
            why_not_kept=ending.why_not_kept[:MAX_REASON_CHARS],
            variables=ending.changes.variables.cut() if ending.changes is not None else None,
            files=ending.changes.files.cut() if ending.changes is not None else None,
            left_out=ending.left_out[:MAX_LEFT_OUT],
        )
        self._results.send(run, ending.outcome, ending.detail, ended)
        run.close()
        self._children.have_checker()  # the client has its answer, and may send a source next
