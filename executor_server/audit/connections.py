"""Records what sandboxes do over the network: each connection that was made, and each that was refused.

A profile may have `network.audit = "denials"`: then only refusals are recorded. The number of connections is bounded by
the profile (`max_new_connections_per_minute`). A program can provoke refusals without such a bound, so the first ones
of a tenant in every minute are recorded one by one, and the others counted by reason.

Names of hosts, and the sentences of refusals, may hold what a program chose. They are bounded here and printable; a
secret is recorded by the name of the header that it was set in, never by its value.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from executor_server.audit.chain import AuditKind, clipped
from executor_server.audit.fields import SHORT_CHARS, of_execution, of_session
from executor_server.audit.log import AuditLog
from executor_server.core import EgressConnection, EgressDenial, SessionFacts
from executor_server.lifecycle import Observer

DENIALS_WINDOW_S = 60.0
DENIALS_IN_FULL = 100
"""Refusals of one tenant that are recorded one by one in a window."""

# Characters of a name of a host; the longest name has 253.
_HOST_CHARS = 256
_MESSAGE_CHARS = 512
# Tenants that are counted by themselves in a window; the others are counted together.
_MAX_TENANTS = 1024
_OTHERS = "(others)"
# Refusals that came too fast for the proxy to say which.
_TOO_FAST = "too_fast"


@dataclass
class _Window:
    """The refusals of one tenant in the current minute."""

    written: int = 0
    counted: Counter[str] = field(default_factory=Counter)  # by reason


class ConnectionTrail(Observer):
    """Records connections and refusals of the egress proxy."""

    def __init__(self, log: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._denied: dict[str, _Window] = {}  # by tenant
        self._window_end_s = 0.0
        log.on_tick(self._end_window)

    def connection_opened(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        if session.audits_connections:
            self._log.write(AuditKind.CONNECTION_OPENED, {**_of_step(session, execution_id), **_of(connection)})

    def connection_closed(self, session: SessionFacts, execution_id: str, connection: EgressConnection) -> None:
        if not session.audits_connections:
            return
        fields: dict[str, Any] = {
            "duration_s": round(connection.duration_s, 6),
            "reason": connection.reason,
        }
        if connection.sent_bytes is not None and connection.received_bytes is not None:
            fields |= {"sent_bytes": connection.sent_bytes, "received_bytes": connection.received_bytes}
        if connection.secret_used:
            fields["secret_used"] = clipped(connection.secret_used, SHORT_CHARS)
        self._log.write(AuditKind.CONNECTION_CLOSED, {**_of_step(session, execution_id), **_of(connection), **fields})

    def connection_denied(self, session: SessionFacts, execution_id: str, denial: EgressDenial) -> None:
        window = self._window(session)
        if window.written >= DENIALS_IN_FULL:
            window.counted[denial.reason] += 1
            return
        window.written += 1
        fields = {
            "host": clipped(denial.host, _HOST_CHARS),
            "port": denial.port,
            "address": clipped(denial.address, SHORT_CHARS),
            "reason": denial.reason,
            "message": clipped(denial.message, _MESSAGE_CHARS),
        }
        self._log.write(AuditKind.CONNECTION_DENIED, {**_of_step(session, execution_id), **fields})

    def denials_uncounted(self, session: SessionFacts, execution_id: str, count: int) -> None:
        self._window(session).counted[_TOO_FAST] += count

    def _window(self, session: SessionFacts) -> _Window:
        self._end_window()
        tenant = session.owner.tenant
        if tenant not in self._denied and len(self._denied) >= _MAX_TENANTS:
            tenant = _OTHERS
        return self._denied.setdefault(tenant, _Window())

    def _end_window(self) -> None:
        """Records the counted refusals when the minute is over."""
        now_s = self._clock()
        if now_s < self._window_end_s:
            return
        for tenant, window in self._denied.items():
            for reason, count in window.counted.items():
                self._log.write(AuditKind.CONNECTIONS_DENIED, {"tenant": tenant, "reason": reason, "count": count})
        self._denied.clear()
        self._window_end_s = now_s + DENIALS_WINDOW_S


def _of_step(session: SessionFacts, execution_id: str) -> dict[str, Any]:
    """The session, and the execution that ran, if one did."""
    return of_execution(session, execution_id) if execution_id else of_session(session)


def _of(connection: EgressConnection) -> dict[str, Any]:
    return {
        "connection": clipped(connection.connection_id, SHORT_CHARS),
        "host": clipped(connection.host, _HOST_CHARS),
        "port": connection.port,
        "address": clipped(connection.address, SHORT_CHARS),
        "rule": clipped(connection.rule, _HOST_CHARS),
    }
