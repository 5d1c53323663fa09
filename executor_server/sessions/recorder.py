"""The interface through which sessions report to the recordings that the daemon makes of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from executor_server.core import Event, Payload, ProcessEvent, RecordRules
from executor_server.sessions.journal import ExecutionRequest, ToolFailure

if TYPE_CHECKING:
    from executor_server.sessions.session import Session


@dataclass
class RecordingStats:
    """Counts since the start of the daemon, by mode and by the reason for an early end; and what is kept now."""

    begun: Counter[str] = field(default_factory=Counter)
    ended_early: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    kept_bytes: int = 0


class SessionRecorder(Protocol):
    """Records one session. Its methods neither wait nor raise."""

    def begin(self, request: ExecutionRequest) -> None:
        """Records an execution that begins."""
        ...

    def event(self, execution_id: str, event: Event, size_bytes: int) -> None:
        """Records an event of an execution, which takes `size_bytes` in memory."""
        ...

    def answer(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        """Records the answer to a tool call."""
        ...

    def process_event(self, process_id: str, event: ProcessEvent) -> None:
        """Records an event of a command."""
        ...

    def unseen(self, what: str) -> None:
        """Counts something that happens and is not recorded."""
        ...

    def hold_to(self, rules: RecordRules) -> None:
        """Applies another policy from now on."""
        ...

    def end(self) -> None:
        """Closes the recording: the session has ended."""
        ...


class Recorders:
    """Makes the recorders of sessions; this one makes none."""

    def recorder_of(self, session: Session, *, is_recovered: bool = False) -> SessionRecorder | None:
        """Returns the recorder of a new session, or of one of an earlier daemon; None if it is not recorded."""
        return None
