"""Checking a source in the checker's process, against interference by the session's own earlier processes.

The race: the checker is a child of the same uid as agent code. A process that an earlier step left behind can kill the
checker, stop it, or take its processor time while a later source is checked. If any failed check counted as the fault
of its source, such a process could have every source refused; if none did, a source that is a parser bomb would be
tried for ever. So a check that fails for a reason that may be interference is repeated once, alone: a fresh checker
runs while every other process of the sandbox is stopped. What fails then is the source's own doing, and only that is
reported.
"""

from __future__ import annotations

import time

from ..wire.link_messages import Check
from ..wire.messages import ErrorDetail
from .outcomes import describe_exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..checks.rules import Rules
    from .child_processes import ChildProcesses
    from .run import Run

    Refusal = tuple[str, Optional[ErrorDetail]]
    """An outcome and an error, with which the run ends."""

# Seconds to parse, check and instrument one source.
CHECK_TIME_S = 10.0
# Seconds without a source after which a checker ends, used or not; starting another takes a millisecond or two.
CHECKER_REST_S = 10.0
# Seconds from a session's beginning until it has a checker, unless a source comes before: the fork takes as long as all
# the rest of a warm session's beginning, and the client is to have its answer first.
CHECKER_START_S = 0.02


class Checking:
    """The check of the current run's source. Its methods return how the run ends, or None while it goes on."""

    def __init__(self, child_processes: ChildProcesses) -> None:
        self._child_processes = child_processes
        self._rules: Optional[Rules] = None
        self._packed_rules = b""
        self._began = 0.0
        self._alone = False

    def begin(self, run: Run, rules: Rules) -> None:
        self._began = run.started
        self._alone = False
        if rules is not self._rules:  # nearly all runs have the same
            self._rules, self._packed_rules = rules, rules.packed()
        self._send(run)

    def _send(self, run: Run) -> None:
        rules, source = self._packed_rules, run.source.encode("utf-8", "surrogatepass")
        check = Check(filename=run.filename, mode=run.request.mode, rules=len(rules))
        self._child_processes.check(check, rules + source)

    def _repeat_alone(self, run: Run) -> None:
        self._alone = True
        self._began = time.monotonic()
        self._child_processes.hold()
        self._send(run)

    @property
    def deadline(self) -> float:
        return self._began + CHECK_TIME_S

    def on_time(self, run: Run, now: float) -> Optional[Refusal]:
        """To be called when the check's time or the run's is up."""
        # A checker that had half of a processor and is not done has a hard source; with less, others may have taken it.
        if self._alone or self._child_processes.check_cpu_s() >= (now - self._began) / 2:
            self._child_processes.renew_checker()
            return "exception", _syntax_error("the source takes too long to parse")
        if now >= run.wall_deadline:
            self._child_processes.renew_checker()
            run.ended_by = "timeout"
            return "timeout", None
        self._repeat_alone(run)
        return None

    def on_exit(self, run: Run, status: int) -> Optional[Refusal]:
        """The checker has ended without a verdict, with this wait status."""
        if not self._alone:
            self._repeat_alone(run)
            return None
        code, signum = describe_exit(status)
        how = f"signal {signum}" if signum is not None else f"exit code {code}"
        return "exception", _syntax_error(f"the source cannot be parsed: the parser ended with {how}")


def _syntax_error(message: str) -> ErrorDetail:
    return ErrorDetail(type="SyntaxError", message=message, line=1)
