"""Checking a source in the checker's process, against interference by the session's own earlier processes.

The race: the checker has the same uid as agent code. A process left over from an earlier step can kill the checker,
stop it, or take its processor time while a later source is checked. If every failed check counted as the fault of its
source, such a process could make us refuse every source; if none did, a parser bomb would be tried for ever. So a check
that may have failed because of interference is repeated once, alone: a fresh checker runs while every other process of
the sandbox is stopped. A second failure is the fault of the source, and only that is reported.
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
    """The outcome and the error of a run that ends."""

# Seconds to parse, check and instrument one source.
CHECK_TIME_S = 10.0
# Seconds without a source after which a checker ends, used or not. Starting another takes a millisecond or two.
CHECKER_REST_S = 10.0
# Seconds from a session's start until it has a checker, unless a source comes earlier. The fork takes as long as the
# rest of a warm session's start, so the client gets its answer first.
CHECKER_START_S = 0.02


class Checking:
    """The check of the current run's source. Its methods return how the run ends, or None while it continues."""

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
        """Called when the time of the check or of the run is over."""
        # If the checker had half of a processor and has no verdict, the source is hard; if it had less, other processes
        # may have interfered.
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
        """Called when the checker has ended without a verdict, with its wait status."""
        if not self._alone:
            self._repeat_alone(run)
            return None
        code, signum = describe_exit(status)
        how = f"signal {signum}" if signum is not None else f"exit code {code}"
        return "exception", _syntax_error(f"the source cannot be parsed: the parser ended with {how}")


def _syntax_error(message: str) -> ErrorDetail:
    return ErrorDetail(type="SyntaxError", message=message, line=1)
