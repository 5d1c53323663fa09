"""The calls of AdminService about approvals, as a daemon and the front of a fleet serve them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api import checks, from_wire
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context
from executor_server.policy.approvals import Approvals

MAX_REASON_CHARS = 256


async def watch_approvals(approvals: Approvals, context: Context) -> None:
    """Sends the caller the requests that wait and that it may decide, until the call ends."""
    async with aclosing(approvals.watch(current_principal.get())) as lists:
        async for waiting in lists:
            await context.write(write(admin_pb.WatchApprovalsResponse, approvals=waiting))


def decide_approval(
    approvals: Approvals, request: admin_pb.DecideApprovalRequest, note: Callable[[str, str], object]
) -> admin_pb.DecideApprovalResponse:
    """Decides for the caller; `note` receives the method and its target before. Raises InvalidRequest, NotFound."""
    approval_id = checks.identifier(request.approval_id, "approval_id")
    decision = from_wire.decision_from(request.decision)
    reason = request.reason
    if len(reason) > MAX_REASON_CHARS or not (reason.isascii() and reason.isprintable()):
        raise checks.invalid("reason", f"must be at most {MAX_REASON_CHARS} printable ASCII characters")
    note("DecideApproval", approval_id)
    approvals.decide(current_principal.get(), approval_id, decision, reason)
    return admin_pb.DecideApprovalResponse()
