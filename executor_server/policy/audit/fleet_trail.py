"""Records what a front does: where it places sessions, which nodes it has links to, which it has lost, what it moves.

Requests and refusals are recorded as in a daemon. All that happens in a session is in the audit log of its node.
"""

from __future__ import annotations

from executor_server.core import Principal
from executor_server.policy.audit.chain import AuditKind, clipped
from executor_server.policy.audit.fields import SHORT_CHARS, of_principal
from executor_server.policy.audit.log import AuditLog

_PROBLEM_CHARS = 256


class FleetTrail:
    """Records the events of a fleet."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    def session_placed(self, principal: Principal, request_id: str, session_id: str, node: str) -> None:
        fields = {"request": clipped(request_id, SHORT_CHARS), "session": session_id, "node": node}
        self._log.write(AuditKind.SESSION_PLACED, {**of_principal(principal), **fields})

    def node_linked(self, node: str, address: str, epoch: int) -> None:
        self._log.write(AuditKind.NODE_LINKED, {"node": node, "address": address, "epoch": epoch})

    def node_lost(self, node: str, epoch: int, sessions: int) -> None:
        self._log.write(AuditKind.NODE_LOST, {"node": node, "epoch": epoch, "sessions": sessions})

    def session_lost(self, tenant: str, session_id: str, reason: str) -> None:
        self._log.write(AuditKind.SESSION_LOST, {"tenant": tenant, "session": session_id, "reason": reason})

    def session_moved(self, tenant: str, session_id: str, new_session_id: str, problem: str) -> None:
        """`new_session_id` is empty if the session was not moved."""
        fields = {"session": session_id, "new_session": new_session_id, "problem": clipped(problem, _PROBLEM_CHARS)}
        self._log.write(AuditKind.SESSION_MOVED, {"tenant": tenant, **fields})
