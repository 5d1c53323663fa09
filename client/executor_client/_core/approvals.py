"""Approvals as the daemon sends them: bounded, and printable whatever a daemon or a program put into them."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client._core.limits import (
    APPROVAL_DETAIL_CHARS_MAX,
    APPROVAL_TEXT_CHARS_MAX,
    APPROVAL_WAIT_MAX_S,
    APPROVALS_MAX,
)
from executor_client._core.requests import made
from executor_client.approvals import DECISIONS, Approval, ApprovalKind
from executor_client.errors import InvalidRequest

_KINDS = {
    admin_pb.APPROVAL_KIND_HOST: ApprovalKind.HOST,
    admin_pb.APPROVAL_KIND_PACKAGE: ApprovalKind.PACKAGE,
    admin_pb.APPROVAL_KIND_TOOL: ApprovalKind.TOOL,
    admin_pb.APPROVAL_KIND_IMPORT: ApprovalKind.IMPORT,
}
_DECISIONS = {
    "once": admin_pb.APPROVAL_DECISION_ONCE,
    "session": admin_pb.APPROVAL_DECISION_SESSION,
    "deny": admin_pb.APPROVAL_DECISION_DENIED,
}


class WaitingApprovals:
    """The waiting requests of the last list. A request keeps its object while it is listed."""

    def __init__(self) -> None:
        self._known: dict[str, Approval] = {}

    def update(self, listed: admin_pb.WatchApprovalsResponse) -> tuple[Approval, ...]:
        """Returns the requests of a new list, the oldest first. Marks the missing ones as ended."""
        waiting = {
            each.approval_id: self._known.get(each.approval_id) or _from_wire(each)
            for each in listed.approvals[:APPROVALS_MAX]
        }
        for approval_id, approval in self._known.items():
            if approval_id not in waiting:
                approval._ended.set()
        self._known = waiting
        return tuple(waiting.values())


def decision(approval_id: str, chosen: object) -> admin_pb.DecideApprovalRequest:
    """Raises InvalidRequest for an unknown decision, and for an id that can't be sent."""
    if not isinstance(chosen, str) or chosen not in _DECISIONS:
        allowed = ", ".join(map(repr, DECISIONS))
        raise InvalidRequest(f"{chosen!r} is not a decision on an approval; use one of {allowed}")
    return made(admin_pb.DecideApprovalRequest, approval_id=approval_id, decision=_DECISIONS[chosen])


def _from_wire(wire: admin_pb.Approval) -> Approval:
    wait_s = min(wire.wait_s, APPROVAL_WAIT_MAX_S) if wire.wait_s > 0 else 0.0
    try:
        create_time = wire.create_time.ToDatetime(UTC)
    except (ValueError, OverflowError):
        create_time = datetime.now(UTC)
    age_s = (datetime.now(UTC) - create_time).total_seconds()
    # The clocks may differ, so the age is only an estimate.
    left_s = wait_s - min(max(age_s, 0.0), wait_s)
    return Approval(
        approval_id=_printable(wire.approval_id),
        kind=_KINDS.get(wire.kind, ApprovalKind.OTHER),
        what=_printable(wire.what),
        detail=_printable(wire.detail, APPROVAL_DETAIL_CHARS_MAX),
        rule=_printable(wire.rule),
        tenant=_printable(wire.tenant),
        session_id=_printable(wire.session_id),
        request_id=_printable(wire.request_id),
        execution_id=_printable(wire.execution_id),
        create_time=create_time,
        wait_s=wait_s,
        _ends_at_s=time.monotonic() + left_s,
    )


def _printable(text: str, most: int = APPROVAL_TEXT_CHARS_MAX) -> str:
    """Escapes all but printable ASCII. The daemon does so, too; an older or hostile one may not."""
    ascii_text = text[:most].encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in ascii_text)
