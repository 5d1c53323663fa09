"""Values of a session's processes: events, results, descriptions. All are frozen, and none does I/O."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Self

from executor_client._core.short_repr import ShortRepr
from executor_client.errors import ProcessFailed


@dataclass(frozen=True)
class TerminalSize(ShortRepr):
    """The size of a terminal in characters, each from 1 to 1,000."""

    columns: int = 80
    rows: int = 24


@dataclass(frozen=True)
class ProcessOutput(ShortRepr):
    """A piece of output, as the process wrote it: raw bytes that are not safe to print on a terminal."""

    number: int
    """Number of the event; 1 for the first of the process."""
    stream: Literal["stdout", "stderr"]
    """Everything on a terminal is stdout."""
    data: bytes


@dataclass(frozen=True)
class ProcessOutputCut(ShortRepr):
    """Output is omitted here: more than the policy allows for one process, or than is kept while no client reads."""

    number: int
    omitted_bytes: int


ProcessEvent = ProcessOutput | ProcessOutputCut
"""An event that iterating over a process yields."""


@dataclass(frozen=True, kw_only=True)
class ProcessResult(ShortRepr):
    """The end of a process."""

    outcome: Literal["exited", "signalled", "timeout", "lost"]
    exit_code: int | None
    """As a shell reports it: 128 plus the signal's number if a signal ended it. None if it is lost."""
    signal: int = 0
    """The signal that ended it; 0: none."""
    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    """CPU seconds of the process and the children that it waited for."""
    peak_memory_bytes: int = 0
    output_bytes: int = 0
    """Bytes that it wrote, including omitted ones."""
    lost_reason: str = ""
    """Why it is lost; empty otherwise."""

    @property
    def succeeded(self) -> bool:
        """True when it exited with 0."""
        return self.outcome == "exited" and self.exit_code == 0


@dataclass(frozen=True, kw_only=True)
class ProcessInfo(ShortRepr):
    """A process of a session, as the daemon describes it."""

    process_id: str
    argv: tuple[str, ...]
    cwd: str
    """As requested; empty for the workspace."""
    pid: int
    """Its id in the sandbox."""
    has_pty: bool
    has_stdin: bool
    start_time: datetime
    result: ProcessResult | None
    """None while it runs."""
    first_event: int
    """Number of the first event that the daemon still has."""
    last_event: int
    written_bytes: int
    """Bytes that clients have written to it."""

    @property
    def running(self) -> bool:
        return self.result is None


@dataclass(frozen=True, kw_only=True)
class ProcessUsage(ShortRepr):
    """The resources that a process and the children that it waited for used."""

    wall_time_s: float = 0.0
    cpu_time_s: float = 0.0
    peak_memory_bytes: int = 0
    output_bytes: int = 0
    """Bytes that it wrote, including omitted ones."""


@dataclass(frozen=True, kw_only=True)
class ProcessRules(ShortRepr):
    """Rules for the processes of a session."""

    allowed: bool = True
    pty: bool = True
    """True when they may have terminals."""
    max: int = 0
    """Processes of one session at one time."""
    max_output_bytes: int = 0
    """Bytes of one process's output that leave the sandbox."""


@dataclass(frozen=True, kw_only=True)
class PortRules(ShortRepr):
    """Rules for the ports of a session that may be forwarded."""

    allowed: tuple[str, ...] = ()
    """Ports and ranges of them: "8000", "3000-3999"."""
    max_connections: int = 0
    """Connections of one session at one time."""


@dataclass(frozen=True, kw_only=True)
class CompletedProcess(ShortRepr):
    """A command that has ended, with its output."""

    process_id: str
    argv: tuple[str, ...]
    result: ProcessResult
    stdout_bytes: bytes
    """Head and tail if it printed more than the limit; a line between them has the omitted size."""
    stderr_bytes: bytes
    omitted_bytes: int = 0
    """Omitted bytes of both streams."""

    @property
    def stdout(self) -> str:
        """Decoded as UTF-8; invalid bytes are replaced."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def outcome(self) -> Literal["exited", "signalled", "timeout", "lost"]:
        return self.result.outcome

    @property
    def timed_out(self) -> bool:
        """True when its timeout ended it."""
        return self.result.outcome == "timeout"

    @property
    def exit_code(self) -> int | None:
        return self.result.exit_code

    @property
    def signal(self) -> int:
        """The signal that ended it; 0: none."""
        return self.result.signal

    @property
    def usage(self) -> ProcessUsage:
        return ProcessUsage(
            wall_time_s=self.result.wall_time_s,
            cpu_time_s=self.result.cpu_time_s,
            peak_memory_bytes=self.result.peak_memory_bytes,
            output_bytes=self.result.output_bytes,
        )

    @property
    def succeeded(self) -> bool:
        """True when it exited with 0."""
        return self.result.succeeded

    def check(self) -> Self:
        """Returns itself if it exited with 0. Otherwise raises ProcessFailed with the end of its output."""
        if not self.succeeded:
            raise ProcessFailed(_failure(self), self)
        return self


_SHOWN_CHARS = 2000


def _failure(completed: CompletedProcess) -> str:
    result, command = completed.result, " ".join(completed.argv)[:200]
    how = {
        "exited": f"exited with code {result.exit_code}",
        "signalled": f"was ended by signal {result.signal}",
        "timeout": f"was ended after {result.wall_time_s:.1f} s, its timeout",
        "lost": f"is lost: {result.lost_reason}",
    }[result.outcome]
    said = (completed.stderr or completed.stdout).strip()[-_SHOWN_CHARS:]
    return f"{command!r} {how}" + (f"\n{said}" if said else "")
