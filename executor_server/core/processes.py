"""Processes that calls start in a sandbox, ports that are forwarded from it, and changes of its files, as values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

ENVIRONMENT_VARIABLES_MAX = 64
ENVIRONMENT_BYTES_MAX = 64 * 1024
"""Bytes of the names and values of a session's environment variables, and of a process's own."""
TERMINAL_CHARS_MAX = 1000
"""Columns, or rows, of a terminal."""


@dataclass(frozen=True)
class ProcessRules:
    """Permissions for the processes that calls start in a session."""

    allowed: bool = True
    pty: bool = True  # they may have terminals
    max: int = 32  # at one time
    max_output_bytes: int = 2**30  # output of one process that leaves the sandbox


@dataclass(frozen=True)
class PortRules:
    """Ports of a session that may be forwarded: ranges, both ends included."""

    allowed: tuple[tuple[int, int], ...] = ((1, 65_535),)
    max_connections: int = 64  # connections of one session at one time

    @property
    def written(self) -> tuple[str, ...]:
        """The ranges as the policy file has them: "8000", "3000-3999"."""
        return tuple(str(low) if low == high else f"{low}-{high}" for low, high in self.allowed)

    def allows(self, port: int) -> bool:
        return any(low <= port <= high for low, high in self.allowed)


DEFAULT_PROCESS_RULES = ProcessRules()
ANY_PORT = PortRules()


@dataclass(frozen=True)
class FileChange:
    """A change of a file of the workspace; `kind` is created, changed or deleted."""

    path: str
    kind: str
    is_directory: bool


@dataclass(frozen=True)
class FileChanges:
    """Changes that a watch reports together. `overflowed`: there were more before them, which are lost."""

    changes: tuple[FileChange, ...] = ()
    overflowed: bool = False


@dataclass(frozen=True)
class TerminalSize:
    columns: int
    rows: int


class SignalTarget(enum.Enum):
    """The processes that get a signal. The values are the words on the guest channel."""

    GROUP = "group"
    PROCESS = "process"
    TREE = "tree"


class ProcessOutcome(enum.Enum):
    """The end of a process. The values are the words on the guest channel, in logs and in metrics."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMEOUT = "timeout"
    LOST = "lost"


@dataclass(frozen=True)
class ProcessRequest:
    """A process as a client asks for it. The same id again must come with the same values."""

    process_id: str
    argv: tuple[str, ...]
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    pty: TerminalSize | None = None
    stdin: bool = False
    timeout_s: float | None = None
    prefers_bash: bool = False  # bash in place of argv[0], where the sandbox has it
    merge_stderr: bool = False  # stderr goes to stdout's pipe


@dataclass(frozen=True)
class ProcessStarted:
    pid: int


@dataclass(frozen=True)
class ProcessOutput:
    stream: str  # "stdout" or "stderr"
    data: bytes


@dataclass(frozen=True)
class ProcessOutputCut:
    omitted_bytes: int


@dataclass(frozen=True)
class ProcessResult:
    """The terminal event of a process. `exit_code` is as a shell reports it; None when the process is lost."""

    outcome: ProcessOutcome
    exit_code: int | None = None
    signal: int = 0
    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    peak_memory_bytes: int = 0
    output_bytes: int = 0
    lost_reason: str = ""


ProcessEventKind = ProcessStarted | ProcessOutput | ProcessOutputCut | ProcessResult


@dataclass(frozen=True)
class ProcessEvent:
    """A numbered event of a process; the first has number 1."""

    number: int
    kind: ProcessEventKind


@dataclass(frozen=True)
class ProcessFacts:
    """The facts of one process that observers and admission get. `argv` is for the audit log alone."""

    process_id: str
    argv: tuple[str, ...]
    env_names: tuple[str, ...]
    has_pty: bool


@dataclass(frozen=True)
class PortUse:
    """One forwarded connection that has ended: its port and the bytes that went in and out of the sandbox."""

    port: int
    received_bytes: int  # by the program in the sandbox
    sent_bytes: int
    wall_time_s: float
