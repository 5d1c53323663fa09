"""Records what sandboxes do over the network: each connection that was made, and each that was refused.

A profile may have `network.audit = "denials"`: then only refusals are recorded. The number of connections is bounded by
the profile (`max_new_connections_per_minute`), that of the records of refusals by refusal_window.py.

Names of hosts, and the sentences of refusals, may contain text that a program chose. They are bounded here and
printable; a secret is recorded by the name of the header that it was set in, never by its value.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from executor_server.core import EgressConnection, EgressDenial, SessionFacts
from executor_server.core.lifecycle import Observer
from executor_server.policy.audit.chain import AuditKind, clipped
from executor_server.policy.audit.fields import SHORT_CHARS, of_execution, of_session
from executor_server.policy.audit.log import AuditLog
from executor_server.policy.audit.refusal_window import RefusalWindow

DENIALS_IN_FULL = 100
"""Refusals of one tenant that are recorded one by one in a minute."""

# Characters of a name of a host; the longest name has 253.
_HOST_CHARS = 256
_MESSAGE_CHARS = 512
# Refusals that came too fast for the proxy to list.
_TOO_FAST = "too_fast"


class ConnectionTrail(Observer):
    """Records connections and refusals of the egress proxy."""

    def __init__(self, log: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._denied = RefusalWindow(DENIALS_IN_FULL, clock, self._denials_counted)
        log.on_tick(self._denied.end)

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
        if not self._denied.records(session.owner.tenant, denial.reason):
            return
        fields = {
            "host": clipped(denial.host, _HOST_CHARS),
            "port": denial.port,
            "address": clipped(denial.address, SHORT_CHARS),
            "reason": denial.reason,
            "message": clipped(denial.message, _MESSAGE_CHARS),
        }
        self._log.write(AuditKind.CONNECTION_DENIED, {**_of_step(session, execution_id), **fields})

    def denials_uncounted(self, session: SessionFacts, execution_id: str, count: int) -> None:
        self._denied.count(session.owner.tenant, _TOO_FAST, number=count)

    def _denials_counted(self, tenant: str, kind: tuple[str, ...], count: int) -> None:
        (reason,) = kind
        self._log.write(AuditKind.CONNECTIONS_DENIED, {"tenant": tenant, "reason": reason, "count": count})


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
