"""Brings the requests that wait for an approval on nodes to the front's approvals, and the decisions back.

While a node is linked, the front watches its requests as an approver would, so they wait there. Each one that the front
may show waits here too. A decision made here is passed to the node, in the name of the approver. When the link or the
front ends, the request keeps waiting at its node until its time is over; the next link lists it again.

A node may be hostile. Its requests count for its own sessions only, and the front knows their tenants.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any, cast

import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.values.outline import OUTLINE_CHARS_MAX
from executor_server.api import checks
from executor_server.api.errors import PassedOn
from executor_server.core import ExecutorError
from executor_server.fleet.api.front_fleet import FRONT_PRINCIPAL, FrontFleet
from executor_server.fleet.api.front_link import FrontLink
from executor_server.fleet.api.node_calls import (
    ASK_TIME_S,
    RETRY_S,
    NodeSilent,
    ask,
    begin_stream,
    keep_following,
    translated,
)
from executor_server.policy.approvals import (
    MAX_WAITING,
    MAX_WHAT_CHARS,
    Approval,
    ApprovalKind,
    Approvals,
    Decision,
    Ruling,
)

MAX_WAIT_S = 3600.0
_KINDS = {admin_pb.ApprovalKind.Value(f"APPROVAL_KIND_{kind.name}"): kind for kind in ApprovalKind}
_DECISIONS = {
    decision: cast("Any", admin_pb.ApprovalDecision.Value(f"APPROVAL_DECISION_{decision.name}"))
    for decision in Decision
}

_log = structlog.get_logger(__name__)


class NodeApprovals:
    """Follows the requests of each node that is linked."""

    def __init__(self, fleet: FrontFleet, approvals: Approvals) -> None:
        self._fleet = fleet
        self._approvals = approvals

    async def follow(self, link: FrontLink) -> None:
        """Relays the requests of a node. The end of its link cancels this."""
        await keep_following(link.node, partial(self._follow, link), "fleet_approvals_not_followed")

    async def _follow(self, link: FrontLink) -> None:
        """Raises ExecutorError, RefusedByNode when the node's list ends."""
        relayed: dict[str, asyncio.Task[None]] = {}
        is_first = True
        call = begin_stream(link, "WatchApprovals", admin_pb.WatchApprovalsRequest(), FRONT_PRINCIPAL)
        try:
            with translated(link.node):
                async for listed in call:
                    waiting = {each.approval_id: each for each in listed.approvals[:MAX_WAITING]}
                    for approval_id in relayed.keys() - waiting.keys():
                        relayed.pop(approval_id).cancel()
                    for approval_id in waiting.keys() - relayed.keys():
                        # Those of the first list have waited before: for a front that has ended, or for this link.
                        relay = self._relay(link, waiting[approval_id], patient=is_first)
                        relayed[approval_id] = asyncio.create_task(relay)
                    is_first = False
        finally:
            call.cancel()
            for task in relayed.values():
                task.cancel()
            await asyncio.gather(*relayed.values(), return_exceptions=True)

    async def _relay(self, link: FrontLink, wire: admin_pb.Approval, *, patient: bool) -> None:
        """Waits for a decision and passes it to the node, whose own time limit ends a request without one."""
        try:
            tenant = await self._tenant_of(link.node, wire.session_id)
            ruling = await self._approvals.relay(_approval(wire, tenant), patient=patient)
            while True:
                try:
                    return await _decide(link, wire.approval_id, ruling)
                except NodeSilent as silent:
                    _log.warning("fleet_decision_unanswered", node=link.node, problem=silent.problem)
                    await asyncio.sleep(RETRY_S)
        except (ExecutorError, PassedOn) as error:
            _log.warning("fleet_approval_not_relayed", node=link.node, problem=str(error))
        except Exception:  # noqa: BLE001 - a background owner: one request must not end the others
            _log.exception("fleet_approval_failed", node=link.node)

    async def _tenant_of(self, node: str, session_id: str) -> str:
        """Returns the tenant of a session of this node, once its report or its creation is known."""
        checks.identifier(session_id, "session_id")
        while (known := self._fleet.members.sessions.find(session_id)) is None or known.node != node:  # noqa: ASYNC110 - few wait here, and not for long
            await asyncio.sleep(RETRY_S)
        return known.tenant


async def _decide(link: FrontLink, approval_id: str, ruling: Ruling) -> None:
    request = admin_pb.DecideApprovalRequest(
        approval_id=approval_id, decision=_DECISIONS[ruling.decision], reason=ruling.reason
    )
    await ask(link, "DecideApproval", request, ruling.by or FRONT_PRINCIPAL, ASK_TIME_S)


def _approval(wire: admin_pb.Approval, tenant: str) -> Approval:
    """Raises InvalidRequest."""
    if wire.kind not in _KINDS:
        raise checks.invalid("approvals.kind", "is unknown")
    if not math.isfinite(wire.wait_s) or not 0 < wire.wait_s <= MAX_WAIT_S:
        raise checks.invalid("approvals.wait_s", f"must be more than 0 and at most {MAX_WAIT_S:g}")
    return Approval(
        approval_id=checks.identifier(wire.approval_id, "approvals.approval_id"),
        tenant=tenant,
        session_id=wire.session_id,
        request_id="",
        execution_id=checks.identifier(wire.execution_id, "approvals.execution_id") if wire.execution_id else "",
        kind=_KINDS[wire.kind],
        what=_text(wire.what, MAX_WHAT_CHARS, "approvals.what"),
        detail=_text(wire.detail, OUTLINE_CHARS_MAX, "approvals.detail"),
        rule=_text(wire.rule, MAX_WHAT_CHARS, "approvals.rule"),
        create_time_s=0.0,
        wait_s=wire.wait_s,
    )


def _text(text: str, most: int, field: str) -> str:
    if len(text) > most or not (text.isascii() and text.isprintable()):
        raise checks.invalid(field, f"must be at most {most} printable ASCII characters")
    return text
