"""Who is told what happens in sessions.

The session layer tells one Observer; `Observers` passes it on to several (quotas, audit, metrics, traces). Being told
is no way to object: what has to agree before something happens is a Gate (gate.py).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from executor_server.errors import ExecutorError
from executor_server.gate import Answer, StateFacts
from executor_server.model import FileInfo, LimitWarning, Principal, Result, SessionFacts, ToolCall


class SessionEnd(enum.StrEnum):
    """Why a session ended, where it was none of its own doing: the reason that its client reads, in a closed list."""

    DELETED = "the session was deleted"
    EXPIRED = "the session expired"
    OWNER_CLOSED = "the client that it belonged to has ended"
    OWNER_GONE = "the client that it belonged to was not heard of for too long"
    KILLED = "an administrator ended the session"
    STOPPED = "the daemon stopped"


class Observer:
    """Told of what has happened, in the event loop, right after it has. Must neither block nor raise."""

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        """A session is there; `took_s` after it was asked for."""

    def session_recovered(self, session: SessionFacts) -> None:
        """A session of an earlier daemon is there again, alive."""

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        """Its sandbox is gone."""

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        """It is there no more, lost or not; `reason` is a SessionEnd, or a sentence where none fits."""

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        """The guest was told to run it, when it comes to it."""

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        """An execution that an earlier daemon started runs or waits."""

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        """A budget is nearly spent."""

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        """It has ended; `took_s` after this daemon heard of it."""

    def background_used(self, session: SessionFacts, cpu_time_s: float) -> None:
        """So much CPU time was used in its sandbox beside executions, since it was told last."""

    def tool_called(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        """A client is told to run a tool."""

    def tool_answered(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        """Its answer is on its way into the sandbox."""

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        """A file is on its way to a client."""

    def state_exported(self, session: SessionFacts, state: StateFacts) -> None:
        """A session's state is on its way to a client."""

    def state_restored(self, session: SessionFacts, state: StateFacts) -> None:
        """A state has been restored in the session."""

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        """What came out of a sandbox was not of the protocol; `what` is ours to say, not the guest's."""

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        """A call was refused; None is a caller that nobody knows."""


class Observers(Observer):
    """Passes everything on, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        for each in self._observers:
            each.session_created(session, took_s)

    def session_recovered(self, session: SessionFacts) -> None:
        for each in self._observers:
            each.session_recovered(session)

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        for each in self._observers:
            each.session_lost(session, reason)

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        for each in self._observers:
            each.session_ended(session, reason)

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        for each in self._observers:
            each.execution_started(session, execution_id)

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        for each in self._observers:
            each.execution_recovered(session, execution_id)

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        for each in self._observers:
            each.limit_warned(session, execution_id, warning)

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        for each in self._observers:
            each.execution_ended(session, execution_id, result, took_s)

    def background_used(self, session: SessionFacts, cpu_time_s: float) -> None:
        for each in self._observers:
            each.background_used(session, cpu_time_s)

    def tool_called(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        for each in self._observers:
            each.tool_called(session, execution_id, call)

    def tool_answered(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        for each in self._observers:
            each.tool_answered(session, execution_id, answer)

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        for each in self._observers:
            each.file_got(session, file)

    def state_exported(self, session: SessionFacts, state: StateFacts) -> None:
        for each in self._observers:
            each.state_exported(session, state)

    def state_restored(self, session: SessionFacts, state: StateFacts) -> None:
        for each in self._observers:
            each.state_restored(session, state)

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        for each in self._observers:
            each.guest_misbehaved(session, what)

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        for each in self._observers:
            each.request_refused(principal, method, error)
