"""The limits of a profile in the policy file: what a session gets by default, and what it can get at most."""

from __future__ import annotations

from pydantic import model_validator

from executor_server.core import DEFAULT_MAX_FILES
from executor_server.core.config import DAY_S, GIB, MIB, Count, Section, contradiction, refuse
from executor_server.policy.forms import Cpus, Disk, Files, Memory, Output, Processes, Time


class LimitValues(Section):
    """A value for each limit."""

    wall_time_s: Time
    """Seconds of wall clock for one execution. The clock stops while the whole execution waits for a host tool."""
    cpu_time_s: Time
    """Seconds of CPU time for one execution, over all processes of the sandbox."""
    operations: Count
    """Operations (loop iterations and calls of the agent's own code) for one execution."""
    memory_bytes: Memory
    """Bytes of memory of the sandbox."""
    processes: Processes
    """Processes and threads of the sandbox at one time."""
    output_bytes: Output
    """Bytes of output kept of one execution, head and tail; at 16 times as many, the execution is stopped."""
    disk_bytes: Disk
    """Bytes of the workspace; /tmp has the same limit."""
    idle_time_s: Time
    """Seconds without use after which a session is ended."""
    session_time_s: Time
    """Seconds after its creation at which a session is ended."""
    session_operations: Count
    """Operations of all executions of a session together."""
    owner_grace_s: Time
    """Seconds after which a session is ended if its client has died or can't be reached."""
    max_files: Files
    """Files, directories and links in the workspace; /tmp has the same limit."""


class DefaultLimits(LimitValues):
    """The limits of a session that asks for none."""

    wall_time_s: Time = 60.0
    cpu_time_s: Time = 120.0
    operations: Count = 100_000_000
    memory_bytes: Memory = 2 * GIB
    processes: Processes = 128
    output_bytes: Output = MIB
    disk_bytes: Disk = GIB
    idle_time_s: Time = 1800.0
    session_time_s: Time = 28_800.0
    session_operations: Count = 10**12
    owner_grace_s: Time = 120.0
    max_files: Files = DEFAULT_MAX_FILES


class MaxLimits(LimitValues):
    """The highest limits that a session can ask for."""

    wall_time_s: Time = 3600.0
    cpu_time_s: Time = 7200.0
    operations: Count = 10**12
    memory_bytes: Memory = 16 * GIB
    processes: Processes = 4096
    output_bytes: Output = 16 * MIB
    disk_bytes: Disk = 16 * GIB
    idle_time_s: Time = DAY_S
    session_time_s: Time = 7 * DAY_S
    session_operations: Count = 10**15
    owner_grace_s: Time = DAY_S
    max_files: Files = 1_000_000


class ExecutionLimitValues(Section):
    """Limits of one execution. One that is not set is the session's."""

    wall_time_s: Time | None = None
    """Seconds of wall clock."""
    cpu_time_s: Time | None = None
    """Seconds of CPU time, over all processes."""
    operations: Count | None = None
    """Operations."""
    output_bytes: Output | None = None
    """Bytes of output kept."""


# (lower, higher): a limit of the first table may not be above the same limit of the second.
_SESSION_ORDER = (("default", "max"),)
_EXECUTION_ORDER = (
    ("execution_default", "default"),
    ("execution_default", "execution_max"),
    ("execution_max", "max"),
)


class LimitsTable(Section):
    """Defaults and ceilings of what a session and an execution may use."""

    default: DefaultLimits = DefaultLimits()
    max: MaxLimits = MaxLimits()
    execution_default: ExecutionLimitValues = ExecutionLimitValues()
    """The limits of an execution that asks for none, in a session that asked for none."""
    execution_max: ExecutionLimitValues = ExecutionLimitValues()
    """The highest limits of one execution, whatever its session has."""
    cpus: Cpus | None = None
    """Processors that a sandbox may use at a time. Not set: all, shared evenly."""

    @model_validator(mode="after")
    def _check_order(self) -> LimitsTable:
        compared = [(name, pair) for name in LimitValues.model_fields for pair in _SESSION_ORDER]
        compared += [(name, pair) for name in ExecutionLimitValues.model_fields for pair in _EXECUTION_ORDER]
        wrong = []
        for name, (lower, higher) in compared:
            value, ceiling = getattr(getattr(self, lower), name), getattr(getattr(self, higher), name)
            if value is not None and ceiling is not None and value > ceiling:
                must = "must be" if name in getattr(self, lower).model_fields_set else "is not set, and must be"
                text = f"{must} at most {ceiling}, which is limits.{higher}.{name}"
                wrong.append(contradiction((lower, name), text, value, also=[(higher, name)]))
        refuse(self, wrong)
        return self
