"""Shared by a session and its collaborators: settings, hooks, ids."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from executor_server.backends.channel import MAX_PAYLOAD_BYTES
from executor_server.core.fairness import ReadingShares
from executor_server.core.lifecycle import AdmissionController, Observer
from executor_server.network.egress import Egress
from executor_server.policy.approvals import Approvals
from executor_server.sessions.connection import ConnectionTimes
from executor_server.sessions.journal import JournalMemory
from executor_server.sessions.recorder import Recorders

_ID_BYTES = 16


@dataclass(frozen=True)
class SessionSettings:
    """The daemon's own bounds on sessions."""

    max_sessions: int = 64
    max_queued_executions: int = 16
    max_finished_executions: int = 64
    journal_bytes: int = 64 * 1024 * 1024
    journal_total_bytes: int = 512 * 1024 * 1024
    staging_bytes: int = MAX_PAYLOAD_BYTES
    max_file_bytes: int = 1024 * 1024 * 1024
    sweep_interval_s: float = 0.5
    ping_interval_s: float = 10.0
    # Seconds of silence after a ping until the guest counts as dead.
    silence_s: float = 60.0
    # Seconds at start-up for all guests of an earlier daemon to answer.
    recovery_s: float = 15.0
    connection: ConnectionTimes = field(default_factory=ConnectionTimes)


class SessionIds:
    """Makes random session ids. A node of a fleet overrides all of it: its ids begin with the node's name."""

    node = ""
    """The name of the node; empty without a fleet."""

    def new(self) -> str:
        return secrets.token_hex(_ID_BYTES)

    def why_lost(self, session_id: str) -> str:
        """Returns the reason why an unknown session of this id is lost; empty if it may never have existed."""
        return ""

    def is_foreign(self, session_id: str) -> bool:
        """True when the id belongs to another daemon, although this one's registry has it."""
        return False


@dataclass(frozen=True)
class SessionHooks:
    """The parts of the daemon that sessions work with.

    `admission` is asked before something happens in a session, and `observer` is notified afterwards. `egress` serves
    sessions with a network, `approvals` asks people, `environment_of` finds a sandbox's environment, `ids` makes
    session ids, and `recorders` makes recordings. `memory` and `reading` share the memory of journals and the reading
    from guests among tenants; the manager sets them.
    """

    admission: AdmissionController = field(default_factory=AdmissionController)
    observer: Observer = field(default_factory=Observer)
    egress: Egress | None = None  # None: listeners in sandboxes are not served
    approvals: Approvals = field(default_factory=Approvals)
    environment_of: Callable[[str], str] = field(default=lambda _sandbox_id: "")
    ids: SessionIds = field(default_factory=SessionIds)
    memory: JournalMemory = field(default_factory=JournalMemory)
    reading: ReadingShares | None = None  # None: not shared
    recorders: Recorders = field(default_factory=Recorders)
