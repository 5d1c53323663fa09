"""The calls of AdminService that a daemon and the front of a fleet serve alike: policy, audit log, approvals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import structlog

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_server.api import checks, from_wire
from executor_server.api.audit_view import AuditView
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context
from executor_server.api.policy_view import PolicyView
from executor_server.core import InvalidRequest, Principal, Reason
from executor_server.core.config import ConfigError
from executor_server.policy import Policy
from executor_server.policy.approvals import Approvals

MAX_REASON_CHARS = 256

_log = structlog.get_logger(__name__)


class SharedAdmin(admin_grpc.AdminServiceServicer):
    """Serves these calls.

    `policy` returns the policy in force. `reload` reads policy file and tokens again, returns True if the policy has
    changed, and raises ConfigError if they can't be used. `record` receives the caller, the method and its target.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        reload: Callable[[], Awaitable[bool]],
        record: Callable[[Principal, str, str], None],
        approvals: Approvals,
        audit: AuditView,
        policy_view: PolicyView,
    ) -> None:
        self._policy = policy
        self._reload = reload
        self._record = record
        self._approvals = approvals
        self._audit = audit
        self._policy_view = policy_view

    async def Reload(self, request: admin_pb.ReloadRequest, context: Context) -> admin_pb.ReloadResponse:
        """Changes nothing if the files have problems."""
        self._note("Reload")
        try:
            changed = await self._reload()
        except ConfigError as error:
            listed = "\n".join(error.problems)
            message = f"nothing was reloaded; the files have problems:\n{listed}"
            raise InvalidRequest(Reason.INVALID_FIELD, message) from error
        now = self._policy()
        return admin_pb.ReloadResponse(version=now.version, fingerprint=now.fingerprint, changed=changed)

    async def WatchApprovals(self, request: admin_pb.WatchApprovalsRequest, context: Context) -> None:
        self._note("WatchApprovals")
        async with aclosing(self._approvals.watch(current_principal.get())) as lists:
            async for waiting in lists:
                await context.write(write(admin_pb.WatchApprovalsResponse, approvals=waiting))

    async def DecideApproval(
        self, request: admin_pb.DecideApprovalRequest, context: Context
    ) -> admin_pb.DecideApprovalResponse:
        approval_id = checks.identifier(request.approval_id, "approval_id")
        decision = from_wire.decision_from(request.decision)
        reason = request.reason
        if len(reason) > MAX_REASON_CHARS or not (reason.isascii() and reason.isprintable()):
            raise checks.invalid("reason", f"must be at most {MAX_REASON_CHARS} printable ASCII characters")
        self._note("DecideApproval", approval_id)
        self._approvals.decide(current_principal.get(), approval_id, decision, reason)
        return admin_pb.DecideApprovalResponse()

    async def TailAudit(self, request: admin_pb.TailAuditRequest, context: Context) -> None:
        self._note("TailAudit", checks.tenant_or_all(request.tenant))
        async with aclosing(self._audit.tail(current_principal.get(), request)) as messages:
            async for message in messages:
                await context.write(message)

    async def ShowPolicy(self, request: admin_pb.ShowPolicyRequest, context: Context) -> admin_pb.ShowPolicyResponse:
        self._note("ShowPolicy")
        return await self._policy_view.show(request.rules)

    async def ExplainPolicy(
        self, request: admin_pb.ExplainPolicyRequest, context: Context
    ) -> admin_pb.ExplainPolicyResponse:
        tenant = checks.tenant_or_all(request.tenant) or current_principal.get().tenant
        self._note("ExplainPolicy", tenant)
        return await self._policy_view.explain(current_principal.get(), tenant, request.question)

    def _note(self, method: str, target: str = "") -> Principal:
        """Records a call before it has an effect. Returns its caller."""
        principal = current_principal.get()
        self._record(principal, method, target)
        _log.info("admin_called", method=method, target=target, tenant=principal.tenant, principal=principal.name)
        return principal
