"""The observer: notified of events in sessions.

The session layer notifies one Observer; `Observers` forwards each notification to several (quotas, audit, metrics,
traces). Observers can't object; admission can (admission.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from executor_server.core import (
    EgressConnection,
    EgressDenial,
    ExecutorError,
    FileInfo,
    LimitWarning,
    PortUse,
    Principal,
    ProcessFacts,
    ProcessResult,
    Result,
    SessionFacts,
    ToolCall,
)
from executor_server.core.lifecycle.admission import Answer, StateFacts

T = TypeVar("T")


class SessionEnd(enum.StrEnum):
    """The reasons, from a closed list, for which the daemon ends a session; its client reads them."""

    DELETED = "the session was deleted"
    EXPIRED = "the session expired"
    OWNER_CLOSED = "its client ended"
    OWNER_GONE = "its client was silent for too long"
    KILLED = "an administrator ended the session"
    STOPPED = "the daemon stopped"
    LEASE_LOST = "the node lost its lease"
    FOREIGN = "its id is of another node or another epoch than the daemon that came back"


class Observer:
    """Called in the event loop, right after each event. Must neither block nor raise."""

    def session_created(self, session: SessionFacts, took_s: float) -> None:
        """A session was created, `took_s` after the request."""

    def session_recovered(self, session: SessionFacts) -> None:
        """A session of an earlier daemon was recovered, alive."""

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        """A session has lost its sandbox."""

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        """A session was removed, lost or not; `reason` is a SessionEnd, or a sentence where none fits."""

    def execution_started(self, session: SessionFacts, execution_id: str) -> None:
        """An execution was sent to the guest, and runs or waits there."""

    def execution_recovered(self, session: SessionFacts, execution_id: str) -> None:
        """An execution that an earlier daemon started runs or waits."""

    def limit_warned(self, session: SessionFacts, execution_id: str, warning: LimitWarning) -> None:
        """A budget is nearly spent."""

    def execution_ended(self, session: SessionFacts, execution_id: str, result: Result, took_s: float) -> None:
        """An execution has ended, `took_s` after this daemon received it."""

    def background_used(self, session: SessionFacts, cpu_time_s: float) -> None:
        """CPU time that a sandbox used outside executions since the last call."""

    def tool_called(self, session: SessionFacts, execution_id: str, call: ToolCall) -> None:
        """A client must run a tool."""

    def tool_answered(self, session: SessionFacts, execution_id: str, answer: Answer) -> None:
        """The answer to a tool call was sent to the sandbox."""

    def file_got(self, session: SessionFacts, file: FileInfo) -> None:
        """A file is being sent to a client."""

    def state_exported(self, session: SessionFacts, state: StateFacts) -> None:
        """A session's state is being sent to a client."""

    def state_restored(self, session: SessionFacts, state: StateFacts) -> None:
        """A state has been restored in the session."""

    def connection_opened(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        """The egress proxy made a connection for the session's sandbox. `execution_id` is empty when none ran."""

    def connection_closed(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        """Such a connection has ended; its reason and sums are final. The execution is the one that opened it."""

    def connection_denied(self, session: SessionFacts, execution_id: str, denial: EgressDenial) -> None:
        """The egress proxy refused a request of the session's sandbox."""

    def denials_uncounted(self, session: SessionFacts, execution_id: str, count: int) -> None:
        """The proxy refused `count` more requests, too fast to list."""

    def network_moved(self, session: SessionFacts, sent_bytes: int, received_bytes: int) -> None:
        """Bytes that the sandbox sent and received through the proxy since the last call."""

    def process_started(self, session: SessionFacts, process: ProcessFacts) -> None:
        """A process runs in the sandbox."""

    def process_recovered(self, session: SessionFacts, process: ProcessFacts) -> None:
        """A process that an earlier daemon started runs in the sandbox."""

    def process_ended(self, session: SessionFacts, process_id: str, result: ProcessResult) -> None:
        """Such a process has ended, or is lost with its session."""

    def port_closed(self, session: SessionFacts, use: PortUse) -> None:
        """A connection to a port of the sandbox has ended."""

    def guest_misbehaved(self, session: SessionFacts | None, what: str) -> None:
        """A guest broke the protocol; `what` is the daemon's description and holds no text of the guest."""

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        """A call was refused; None stands for an unknown caller."""


class Observers(Observer):
    """Forwards every notification, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        pass_on(self, Observer, observers)


def pass_on(to: T, kind: type[T], observers: Sequence[T]) -> None:
    """Sets each method of `kind` on `to`: it calls the method of every observer that overrides it, in order."""
    for name, inherited in vars(kind).items():
        if not name.startswith("_"):
            own = [each for each in observers if getattr(type(each), name) is not inherited or name in vars(each)]
            setattr(to, name, partial(_notify, [getattr(observer, name) for observer in own]))


def _notify(methods: Sequence[Callable[..., None]], *facts: object) -> None:
    for method in methods:
        method(*facts)
