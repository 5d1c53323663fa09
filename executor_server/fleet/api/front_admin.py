"""AdminService of a front: merges the answers of its nodes, describes the fleet, and drains nodes.

Calls about one session are not here: proxy.py passes them on to the session's node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, cast

import structlog

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api import checks
from executor_server.api.admin import visible_tenants
from executor_server.api.audit_view import AuditView
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context
from executor_server.api.policy_view import PolicyView
from executor_server.api.shared_admin import SharedAdmin
from executor_server.core import ExecutorError, NotFound, Principal, Reason, Unavailable
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_sessions import owned_in_order
from executor_server.fleet.api.front_status import FrontStatus
from executor_server.fleet.api.front_views import FrontViews
from executor_server.fleet.api.moving import Mover
from executor_server.fleet.api.node_calls import (
    RETRY_S,
    NodeSilent,
    RefusedByNode,
    answers_of,
    ask,
    ask_all,
    begin_stream,
)
from executor_server.fleet.api.proxy import receive
from executor_server.fleet.membership import Reservations, is_node_name, lease_clock, node_of
from executor_server.policy import Policy
from executor_server.policy.approvals import Approvals
from executor_server.policy.quotas import Quotas

_log = structlog.get_logger(__name__)

COLLECTION_TIME_S = 600.0
"""Seconds for a node to remove environments."""


_NO_ENVIRONMENT = Reason.ENVIRONMENT_NOT_FOUND.value


class FrontAdmin(SharedAdmin):
    """Serves executor_api.v1.AdminService for a fleet."""

    def __init__(
        self,
        fleet: FrontFleet,
        reservations: Reservations,
        quotas: Quotas,
        mover: Mover,
        parked: Callable[[], int],
        approvals: Approvals,
        policy: Callable[[], Policy],
        reload: Callable[[], Awaitable[bool]],
        record: Callable[[Principal, str, str], None],
        audit: AuditView,
        policy_view: PolicyView,
        status: FrontStatus,
        views: FrontViews,
    ) -> None:
        """`policy`, `reload` and `record` are as for SharedAdmin."""
        super().__init__(policy, reload, record, approvals, audit, policy_view)
        self._fleet = fleet
        self._reservations = reservations
        self._quotas = quotas
        self._mover = mover
        self._parked = parked
        self._status = status
        self._views = views

    async def ListAllSessions(
        self, request: admin_pb.ListAllSessionsRequest, context: Context
    ) -> admin_pb.ListAllSessionsResponse:
        principal = self._note("ListAllSessions", checks.tenant_or_all(request.tenant))
        answers = await ask_all(self._fleet.links(), "ListAllSessions", request, principal)
        owned = [
            each
            for node, answer in answers
            for each in answer.sessions
            if each.session.session_id.startswith(f"{node}-")
        ]
        return admin_pb.ListAllSessionsResponse(sessions=owned_in_order(owned))

    async def WatchSessions(self, request: admin_pb.WatchSessionsRequest, context: Context) -> None:
        tenant = checks.tenant_or_all(request.tenant)
        principal = self._note("WatchSessions", tenant)
        async with aclosing(self._views.watch(principal, tenant)) as messages:
            async for message in messages:
                await context.write(message)

    async def TailAudit(self, request: admin_pb.TailAuditRequest, context: Context) -> None:
        session_node = node_of(request.session_id)
        link = self._fleet.link_of(request.node or session_node or "")
        if link is None and request.node:
            raise self._not_linked(request.node)
        if link is None:
            await super().TailAudit(request, context)
            return
        principal = self._note("TailAudit", request.tenant)
        asked = admin_pb.TailAuditRequest()
        asked.CopyFrom(request)
        asked.ClearField("node")
        await receive(begin_stream(link, "TailAudit", asked, principal, context), link.node, context)

    def _not_linked(self, node: str) -> ExecutorError:
        if not is_node_name(node) or self._fleet.members.get(node) is None:
            return NotFound(Reason.NO_NODE, f"there is no node {node!r}")
        return NodeSilent(node)

    async def GetStatus(self, request: admin_pb.GetStatusRequest, context: Context) -> admin_pb.GetStatusResponse:
        answers = await ask_all(self._fleet.links(), "GetStatus", request, current_principal.get())
        return self._status.merged([answer for _, answer in answers])

    async def Drain(self, request: admin_pb.DrainRequest, context: Context) -> admin_pb.DrainResponse:
        if not is_node_name(request.node):
            raise checks.invalid("node", "must name a node of the fleet: a front has no sessions that could be drained")
        what = "resume " if request.resume else "move " if request.move else ""
        principal = self._note("Drain", f"{what}{request.node}")
        link = self._fleet.link_of(request.node)
        if link is None:
            raise self._not_linked(request.node)
        asked = admin_pb.DrainRequest(resume=request.resume)
        answer: admin_pb.DrainResponse = await ask(link, "Drain", asked, principal, None)
        if request.move and not request.resume:
            answer.moved.extend(await self._mover.move_all(link, principal))
        return answer

    async def GetUsage(self, request: admin_pb.GetUsageRequest, context: Context) -> admin_pb.GetUsageResponse:
        tenant = checks.tenant_or_all(request.tenant)
        self._note("GetUsage", tenant)
        known = {*self._quotas.tenants(), *self._fleet.members.sessions.tenants(), *self._fleet.usage.tenants()}
        return admin_pb.GetUsageResponse(
            tenants=[self._usage_of(each) for each in visible_tenants(tenant, sorted(known))]
        )

    def _usage_of(self, tenant: str) -> admin_pb.TenantUsage:
        policy, use = self._policy(), self._fleet.usage.use(tenant)
        return write(
            admin_pb.TenantUsage,
            tenant=tenant,
            profile=policy.profile_name(tenant) or "",
            sessions=self._fleet.members.sessions.count(tenant),
            executions=use.executions,
            creations_in_last_minute=self._reservations.in_last_minute(tenant, lease_clock()),
            cpu_time_s_in_last_hour=use.cpu_time_s,
            output_bytes_in_last_hour=use.output_bytes,
            calls=self._quotas.use_of(tenant).calls,
            egress_bytes_in_last_hour=use.egress_bytes,
            quotas=policy.quotas_of(tenant),
        )

    async def ListEnvironments(
        self, request: admin_pb.ListEnvironmentsRequest, context: Context
    ) -> admin_pb.ListEnvironmentsResponse:
        principal = self._note("ListEnvironments")
        answers = await ask_all(self._fleet.links(), "ListEnvironments", request, principal)
        found = [answer for _, answer in answers]
        return admin_pb.ListEnvironmentsResponse(
            environments=(each for answer in found for each in answer.environments),
            builds=(each for answer in found for each in answer.builds),
            total_bytes=sum(answer.total_bytes for answer in found),
            max_bytes=sum(answer.max_bytes for answer in found),
        )

    async def GetEnvironment(
        self, request: admin_pb.GetEnvironmentRequest, context: Context
    ) -> admin_pb.GetEnvironmentResponse:
        environment_id = checks.identifier(request.environment_id, "environment_id")
        principal = self._note("GetEnvironment", environment_id)
        links = self._fleet.links()
        answers = await answers_of(links, "GetEnvironment", request, principal)
        found = [answer for answer in answers if isinstance(answer, admin_pb.GetEnvironmentResponse)]
        if found:
            return found[0]
        absent = [
            answer for answer in answers if isinstance(answer, RefusedByNode) and answer.reason == _NO_ENVIRONMENT
        ]
        if len(absent) < max(len(links), self._fleet.expected):
            message = f"not all nodes answer now, and no other has an environment {environment_id!r}"
            raise Unavailable(Reason.NODE_FENCED, message, retry_after_s=RETRY_S)
        raise NotFound(Reason.ENVIRONMENT_NOT_FOUND, f"no node has an environment {environment_id!r}")

    async def CollectEnvironments(
        self, request: admin_pb.CollectEnvironmentsRequest, context: Context
    ) -> admin_pb.CollectEnvironmentsResponse:
        principal = self._note("CollectEnvironments", str(request.max_bytes))
        links = self._fleet.links()
        answers = await ask_all(links, "CollectEnvironments", request, principal, COLLECTION_TIME_S)
        if links and not answers:
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, "no node could remove environments", retry_after_s=RETRY_S)
        found = [answer for _, answer in answers]
        return admin_pb.CollectEnvironmentsResponse(
            environment_ids=_each_once(each for answer in found for each in answer.environment_ids),
            freed_bytes=sum(answer.freed_bytes for answer in found),
            total_bytes=sum(answer.total_bytes for answer in found),
        )

    async def GetFleet(self, request: admin_pb.GetFleetRequest, context: Context) -> admin_pb.GetFleetResponse:
        self._note("GetFleet")
        fleet = self._fleet
        nodes = [self._node(member.name) for member in sorted(fleet.members, key=lambda each: each.name)]
        nodes += [
            admin_pb.FleetNode(
                node=link.node,
                link_address=str(link.address),
                state=admin_pb.NODE_STATE_REFUSED if link.is_refused else admin_pb.NODE_STATE_CONNECTING,
                problem=link.problem,
            )
            for link in fleet.strange_links()
        ]
        hello = fleet.members.hello()
        return admin_pb.GetFleetResponse(
            nodes=nodes,
            front_id=hello.front_id,
            term=hello.term,
            control_fingerprint=fleet.control.fingerprint,
            parked=self._parked(),
        )

    def _node(self, name: str) -> admin_pb.FleetNode:
        fleet, member = self._fleet, self._fleet.members.get(name)
        assert member is not None
        hello, report = member.hello, member.report
        shown = admin_pb.FleetNode(
            node=name,
            link_address=fleet.address_of(name),
            state=cast("Any", admin_pb.NodeState.Value(f"NODE_STATE_{fleet.state_of(member).upper()}")),
            problem=fleet.problem_of(member),
            epoch=member.epoch,
            sessions=len(member.sessions),
            creating=len(member.creating) + len(member.foreign),
            lease_left_s=member.renewed_s + fleet.members.timing.lease_s - lease_clock(),
        )
        if hello is not None:
            shown.program_version = hello.program_version
            shown.labels.update(hello.labels)
        if report is not None:
            shown.max_sessions, shown.load, shown.warm = report.max_sessions, report.load, sum(report.warm.values())
        return shown


def _each_once(ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(ids))
