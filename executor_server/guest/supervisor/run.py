"""The state of one run of code in the interpreter: deadlines, output, tool calls, its end.

A run is an execution of the daemon's, or the session's prelude, whose request has no id and which sends no events.
Everything that decides an outcome is measured here, outside the interpreter. The interpreter's own report is trusted
only where a false one does no harm: it says that the program has finished, and with which error.
"""

from __future__ import annotations

import os
import time

from executor_api.displays import DISPLAY_TYPE
from executor_api.limits import (
    DISPLAYS_MAX,
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    TOOL_ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_OPEN_MAX,
)

from ..files.artifacts import Artifacts
from ..processes.pipe import Pipe
from ..wire.guest_channel import Channel
from ..wire.link_messages import DRAWING_TIME_S, RunProgram
from ..wire.messages import Execute
from ..wire.session_rules import ExecutionMax
from .output import LogRelay
from .usage import CpuMeter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Union

# Seconds from the interrupt to the kill: time for `finally` blocks and a traceback.
GRACE_S = 1.5
# During GRACE_S, a program that still waits is interrupted again: first after half of it, then at this interval.
INTERRUPT_AGAIN_S = 0.1

# The spent part of a budget at which a warning is due.
_WARN_NUMERATOR, _WARN_DENOMINATOR = 4, 5
# More than any machine executes in a second, and more than the error of the kernel's clocks.
_MAX_OPERATIONS_PER_S = 2 * 10**8
_CPU_ERROR_S = 0.05


WHOLE_EXPRESSION = "whole_expression"
"""The mode of an execution whose value must be sent whole, or the execution fails."""


class Phase:
    CHECKING = "checking"
    RUNNING = "running"


def lowered(request: Execute, ceilings: Optional[ExecutionMax]) -> Execute:
    """Returns the request, lowered to the policy's ceilings for an execution."""
    if ceilings is None:
        return request
    return request.but(**{name: min(getattr(request, name), getattr(ceilings, name)) for name in ceilings.fields})


class Warning:
    """A warning that is due when a run has spent `mark` operations; 0: at its start."""

    __slots__ = ("budget", "mark", "used")

    def __init__(self, budget: int, spent: int = 0) -> None:
        """`spent`: operations of the budget that earlier runs have spent."""
        nearly = -(-budget * _WARN_NUMERATOR // _WARN_DENOMINATOR)
        self.budget = budget
        self.mark = max(0, nearly - spent)
        self.used = max(nearly, spent)


class Call:
    """A tool call: the tool, the id that the interpreter waits for, and the size of the arguments."""

    __slots__ = ("name", "size", "waiting_id")

    def __init__(self, name: str, waiting_id: str, size: int) -> None:
        self.name = name
        self.waiting_id = waiting_id
        self.size = size


class Run:
    """State of one run. The supervisor owns it and acts on it."""

    def __init__(self, request: Execute, source: str, number: int, channel: Channel) -> None:
        self.request = request
        self.source = source
        self.number = number
        self.filename = f"<execution-{number}>" if request.id else "<prelude>"
        self.phase = Phase.CHECKING
        self.started = time.monotonic()
        self.deadline = self.started + request.wall_time_s
        self.interrupted_at: Optional[float] = None  # minus the seconds spent drawing until then
        self.interrupt_after_s = GRACE_S / 2
        self.ended_by: Optional[str] = None  # the outcome, once the supervisor has decided it
        self.logs = LogRelay(channel, request.id, request.output_bytes)
        self.pipes: list[Pipe] = []
        self.write_fds: tuple[int, ...] = ()  # the pipes' other ends, until the interpreter has them
        self.calls: dict[str, Call] = {}  # open tool calls, by the id in the client's answer
        self.calls_made = 0
        self.final_call_id = ""
        self.images = self.displays = 0
        self.images_bytes = 0
        self.output: Union[bytes, int, None] = None  # packed value, inline or in a sealed memory file
        self.output_size = 0
        self.operations = 0
        self.budget = 0  # operations that this run may spend
        self.warnings: dict[str, Warning] = {}  # not sent yet, by limit
        self.imports: list[str] = []  # modules that its source imports
        self.cpu: Optional[CpuMeter] = None  # set when its code starts
        self.cpu_time_s = 0.0
        self.peak_memory_bytes = 0
        self.oom_suspect = False
        self.savepoint: Optional[int] = None  # number of the savepoint before it
        self.savepoint_refused = ""  # why there is none although one was requested
        self.artifacts: Optional[Artifacts] = None  # set while its source is checked; None for the prelude and branches
        self._held = False  # its output is not read for now, or a connection waits for an approval
        self._paused_at: Optional[float] = None  # start of the unsettled part of a pause
        self._paused_cpu_s = 0.0  # CPU seconds spent by then
        self._paused_s = 0.0
        self._drawn_s = 0.0
        self._drawing_since: Optional[float] = None

    @property
    def visible(self) -> bool:
        return bool(self.request.id)

    @property
    def is_branch(self) -> bool:
        """True if it runs in a copy of the interpreter."""
        return bool(self.request.branches)

    def mark_of(self, limit: str) -> Optional[int]:
        """Returns the operations at which the interpreter warns; None if it does not."""
        warning = self.warnings.get(limit)
        return warning.mark if warning is not None and 0 < warning.mark <= self.budget else None

    def take_image(self, size: int, mime: str) -> str:
        """Counts an image or display data; returns the reason if it must be left out."""
        if mime == DISPLAY_TYPE:
            if self.displays >= DISPLAYS_MAX:
                return f"an execution shows at most {DISPLAYS_MAX} objects by display data"
        elif self.images >= IMAGES_MAX:
            return f"an execution shows at most {IMAGES_MAX} images"
        if size > IMAGE_BYTES_MAX:
            return f"an image has at most {IMAGE_BYTES_MAX} bytes"
        if self.images_bytes + size > IMAGES_BYTES_MAX:
            return f"the images of an execution have at most {IMAGES_BYTES_MAX} bytes together"
        self.displays += mime == DISPLAY_TYPE
        self.images += mime != DISPLAY_TYPE
        self.images_bytes += size
        return ""

    def why_no_call(self, size: int) -> str:
        """Returns the reason if a call with arguments of this size can't be opened now."""
        if len(self.calls) >= TOOL_CALLS_OPEN_MAX:
            return f"at most {TOOL_CALLS_OPEN_MAX} tool calls can be open at a time"
        if sum(each.size for each in self.calls.values()) + size > TOOL_ARGUMENTS_BYTES_MAX:
            return f"the arguments of open tool calls have at most {TOOL_ARGUMENTS_BYTES_MAX} bytes together"
        return ""

    def open_call(self, call: Call) -> str:
        """Records a call. Returns an id made here: the program chose the other id, which may not be unique.

        After opening or closing a call, first send the message that another process waits for, then call `set_clock`.
        """
        self.calls_made += 1
        call_id = f"c{self.calls_made}"
        self.calls[call_id] = call
        return call_id

    def hold(self, held: bool) -> None:
        """Stops the clock while the program may wait for us: for its output to be read, or for an approval."""
        self._held = held
        self.set_clock()

    def set_clock(self) -> None:
        """Stops the clock while the run waits for a tool's answer, or is held."""
        waits = self._held or bool(self.calls)
        if waits and self._paused_at is None:
            self._paused_at, self._paused_cpu_s = time.monotonic(), self._spent_s()
        elif not waits:
            self.settle_pause()
            self._paused_at = None

    def settle_pause(self) -> None:
        """Moves the deadline by the time waited since the last call. Called now and then during a pause.

        A program with an open tool call need not be waiting: another thread may compute. So CPU time spent meanwhile
        counts as run time. Otherwise a program could escape its wall time by one call that is never answered.
        """
        if self._paused_at is not None:
            now, spent_s = time.monotonic(), self._spent_s()
            waited_s = max(0.0, now - self._paused_at - max(0.0, spent_s - self._paused_cpu_s))
            self.deadline += waited_s
            self._paused_s += waited_s
            self._paused_at, self._paused_cpu_s = now, spent_s

    def _spent_s(self) -> float:
        return self.cpu.spent_s() if self.cpu is not None else 0.0

    def set_drawing(self, *, begins: bool) -> None:
        """Notes that drawing of figures begins or ends. Agent code can claim this: it gains DRAWING_TIME_S once."""
        now = time.monotonic()
        if self._drawing_since is not None:
            self._drawn_s = min(DRAWING_TIME_S, self._drawn_s + now - self._drawing_since)
        self._drawing_since = now if begins else None

    @property
    def extra_s(self) -> float:
        """Seconds beyond its limits: the time spent drawing, or while something is drawn, all that drawing may take."""
        return self._drawn_s if self._drawing_since is None else DRAWING_TIME_S

    @property
    def wall_deadline(self) -> float:
        """End of its time; infinity during a pause that began before that end."""
        deadline = self.deadline + self.extra_s
        return deadline if self._paused_at is None or deadline <= self._paused_at else float("inf")

    def note_interrupted(self) -> None:
        self.interrupted_at = time.monotonic() - self._drawn_s

    @property
    def kill_at(self) -> Optional[float]:
        """The time to kill an interrupted program that has not ended."""
        return None if self.interrupted_at is None else self.interrupted_at + GRACE_S + self.extra_s

    @property
    def interrupt_at(self) -> float:
        """The time to interrupt a program again; infinity if it was not interrupted."""
        started = self.interrupted_at
        return float("inf") if started is None else started + self.interrupt_after_s + self.extra_s

    def wall_time_s(self) -> float:
        """Returns the seconds run so far, without pauses."""
        now = time.monotonic()
        paused = self._paused_s + (now - self._paused_at if self._paused_at is not None else 0.0)
        return now - self.started - paused

    def close_pipes(self) -> None:
        """Closes the supervisor's ends of the run's pipes."""
        for pipe in self.pipes:
            pipe.close()
        for fd in self.write_fds:
            os.close(fd)
        self.pipes, self.write_fds = [], ()

    def close(self) -> None:
        """Closes the run's pipes and its value."""
        self.close_pipes()
        if isinstance(self.output, int):
            os.close(self.output)
        self.output = None


class Budget:
    """The operations that all runs of a session may spend together: `of_session`.

    Invariant: a run is charged with its whole budget before its code starts, and is refunded the rest at its end. An
    interpreter that dies takes its count with it: without the charge in advance, a program could spend for free by
    killing its own interpreter at the end.
    """

    def __init__(self) -> None:
        self.of_session = 2**63 - 1
        self._spent = 0  # by ended runs, plus the whole budget of the current one

    @property
    def is_spent(self) -> bool:
        return self._spent >= self.of_session

    def charge(self, run: Run, source_bytes: int) -> RunProgram:
        """Charges the run's budget; returns the message that starts its code."""
        asked, left = run.request.operations, self.of_session - self._spent
        if run.visible:
            run.warnings = {"operations": Warning(asked), "session_operations": Warning(self.of_session, self._spent)}
        run.budget = min(asked, left)
        self._spent += run.budget
        return RunProgram(
            filename=run.filename,
            source=source_bytes,
            operations=run.budget,
            operations_mark=run.mark_of("operations"),
            session_mark=run.mark_of("session_operations"),
            session_operations=self.of_session if left < asked else None,
            whole_output=run.request.mode == WHOLE_EXPRESSION,
        )

    def settle(self, run: Run) -> None:
        """Refunds the rest of the budget of a run that has ended and whose interpreter has counted."""
        self._spent -= run.budget - run.operations

    def settle_dead(self, run: Run, cpu_time_s: float) -> None:
        """Charges a run whose interpreter died. Its count is lost, so it pays for all that fits into its CPU time."""
        self._spent -= run.budget - min(run.budget, int((cpu_time_s + _CPU_ERROR_S) * _MAX_OPERATIONS_PER_S))
