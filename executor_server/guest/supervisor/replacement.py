"""Starts the interpreter, and replaces it when it dies, has to be killed, or can't run another program.

Everything in the sandbox is killed with it: a surviving process could hold the old link, ports and files, and act in
the new generation. The generation rises, tools and prelude are restored, and the next result says that variables were
reset. Two races are handled here:

- A job must not start between the new interpreter's fork and its prelude, or it would run without the prelude. The
  queue of jobs is held until the prelude is due.
- A restored tool or prelude may itself kill the interpreter, at once or after its answer. It is tried again only while
  something else may have been the cause; otherwise the sandbox would replace interpreters for ever.
"""

from __future__ import annotations

from .child_processes import ChildProcesses
from .interpreter_requests import Requests
from .jobs import Job, JobQueue
from .prelude import Prelude
from .results import Results
from .run import Phase, Run
from .runner import Runner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from .savepoints import Savepoints

# Interpreters that may die in a row before they have started; then no other is tried.
_MAX_BOOT_FAILURES = 3


class Replacement:
    """Knows whether the interpreter has started, and what has used it."""

    def __init__(
        self,
        child_processes: ChildProcesses,
        runner: Runner,
        requests: Requests,
        results: Results,
        prelude: Prelude,
        jobs: JobQueue,
        savepoints: Savepoints,
    ) -> None:
        self._child_processes = child_processes
        self._runner = runner
        self._requests = requests
        self._results = results
        self._prelude = prelude
        self._jobs = jobs
        self._savepoints = savepoints
        self._boot_failures = 0
        self._booted = False
        self._resumed = False  # this interpreter continues from a savepoint
        self.restored = False  # prelude or tools were restored in this interpreter, and no job has used it since
        self.failed = False  # no interpreter starts any more

    def start(self) -> None:
        """Starts the children, and gives the interpreter the current rules and tools."""
        self._child_processes.start()
        self._equip()

    def _equip(self) -> None:
        self._runner.post_rules()
        self._requests.post_tools()

    def note_booted(self) -> None:
        self._booted, self._boot_failures = True, 0
        self._prelude.note_booted()

    def replace(self, status: Optional[int], why: str = "") -> None:
        """Starts another interpreter in place of one that died (with this wait status) or has to be killed (None).

        Ends what ran in the old one. `why` is the reason that the old one gave, if it could not continue.
        """
        cpu_time_s = self._runner.cpu_time_s()
        run = self._runner.run
        if self._child_processes.on_branch and self._child_processes.leave_branch():
            # A branch died; the interpreter still exists, unchanged.
            if run is not None:
                self._runner.finish_dead(status, cpu_time_s, why)
            else:
                self._requests.refuse_current()
            return
        over_prelude = run is not None and not run.visible and run.phase == Phase.RUNNING
        # Prelude and tools did not kill it at once, but no job has used it since: one of them did. Try neither again.
        over_both = self.restored and run is None and not self._requests.busy
        if not self._renew():
            return
        self._jobs.held = True
        if why and (run is None or run.phase != Phase.RUNNING):  # else it is that run's error
            self._results.notify_reset(why)
        self._end_what_ran(status, cpu_time_s, why)
        self._jobs.held = False
        if over_both:
            if self._prelude.source:
                self._results.notify("the interpreter died after the prelude; the new one runs without it\n")
            self._requests.give_up_tools()
        self._prelude.due = self._needs_prelude and not (over_prelude or over_both)

    def replace_unfit(self, run: Run, why: str) -> None:
        """Replaces an interpreter that can't run anything after this run, whose result will say so."""
        if run.visible:
            self._results.notify_reset(why)
        else:
            self._results.notify(f"the prelude is skipped, because the interpreter can't be used after it: {why}\n")
        if self._renew():
            self._requests.on_interpreter_replaced()
            self._prelude.due = self._needs_prelude and run.visible

    def go_back(self, savepoint: int) -> bool:
        """Goes back to a savepoint, between two runs. False when that failed: then variables were reset."""
        self._savepoints.before_run = savepoint
        if not self._renew(between_runs=True):
            return False
        self._savepoints.before_run = None
        self._requests.on_interpreter_replaced()
        self._prelude.due = self._needs_prelude
        if self._resumed:
            self._results.note_rollback_requested()
        return self._resumed

    @property
    def _needs_prelude(self) -> bool:
        return bool(self._prelude.source) and not self._resumed

    def _renew(self, *, between_runs: bool = False) -> bool:
        """Kills everything in the sandbox and starts another interpreter; false when none starts any more.

        If a savepoint was taken before the current run, the new one continues from there.
        """
        self._child_processes.stop(between_runs=between_runs)
        self._results.note_replaced()
        self._resumed = self._savepoints.resume(self._savepoints.before_run)
        if self._resumed:
            self._results.note_rolled_back()
            self._booted = True
            self._equip()
            return True
        if not self._booted:
            self._boot_failures += 1
            if self._boot_failures >= _MAX_BOOT_FAILURES:
                self.failed = True
                return False
        self._booted = False
        self.start()
        return True

    def _end_what_ran(self, status: Optional[int], cpu_time_s: float, why: str) -> None:
        run = self._runner.run
        if run is not None and (run.phase == Phase.RUNNING or run.is_branch):
            self._runner.finish_dead(status, cpu_time_s, why)
        elif run is not None:
            # A process of an earlier execution killed the interpreter during the check: this run has not begun.
            self._runner.withdraw()
            if run.visible:
                job = Job(run.request, run.source.encode("utf-8", "replace"))
                job.saved = True
                self._jobs.put_back(job)
        self._requests.on_interpreter_replaced()
