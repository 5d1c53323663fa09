"""AdminService: calls for the operators of the daemon.

Authentication (auth.py) admits admins only, and approvers to the methods about approvals. Each call is recorded here
before it has an effect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial

import structlog

from executor_api.messages import write
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api import checks, to_wire, viewing
from executor_server.api.audit_view import AuditView
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context
from executor_server.api.policy_view import PolicyView
from executor_server.api.session_views import SessionViews
from executor_server.api.shared_admin import SharedAdmin
from executor_server.api.status import DaemonStatus
from executor_server.core import (
    NotFound,
    PreconditionFailed,
    Principal,
    Reason,
    SandboxFailure,
    Unavailable,
)
from executor_server.packages import EnvironmentService
from executor_server.policy import Policy
from executor_server.policy.approvals import Approvals
from executor_server.policy.identity import may_view
from executor_server.policy.quotas import Quotas
from executor_server.sessions import Session, SessionManager

_log = structlog.get_logger(__name__)


class AdminService(SharedAdmin):
    """Serves executor_api.v1.AdminService. `policy`, `reload` and `record` are as for SharedAdmin."""

    def __init__(
        self,
        sessions: SessionManager,
        quotas: Quotas,
        policy: Callable[[], Policy],
        reload: Callable[[], Awaitable[bool]],
        record: Callable[[Principal, str, str], None],
        environments: EnvironmentService,
        approvals: Approvals,
        views: SessionViews,
        status: DaemonStatus,
        audit: AuditView,
        policy_view: PolicyView,
    ) -> None:
        super().__init__(policy, reload, record, approvals, audit, policy_view)
        self._sessions = sessions
        self._quotas = quotas
        self._environments = environments
        self._views = views
        self._status = status

    async def ListAllSessions(
        self, request: admin_pb.ListAllSessionsRequest, context: Context
    ) -> admin_pb.ListAllSessionsResponse:
        tenant = checks.tenant_or_all(request.tenant)
        self._note("ListAllSessions", tenant)
        sessions = sorted(self._sessions.list_all(), key=lambda session: session.create_time_s)
        return admin_pb.ListAllSessionsResponse(
            sessions=[
                self._owned(session, with_request=request.with_requests)
                for session in sessions
                if tenant in ("", session.owner.tenant)
            ]
        )

    def _owned(self, session: Session, *, with_request: bool) -> admin_pb.OwnedSession:
        owned = to_wire.owned_session_to(session)
        if with_request:
            owned.prelude = session.spec.prelude
            owned.lease_id = self._sessions.lease_of((session.owner.tenant, session.session_id))
        return owned

    async def KillSession(self, request: admin_pb.KillSessionRequest, context: Context) -> admin_pb.KillSessionResponse:
        session_id = checks.identifier(request.session_id, "session_id")
        self._note("KillSession", session_id)
        await self._sessions.kill(session_id, unless_used=request.unless_used)
        return admin_pb.KillSessionResponse()

    async def StopExecution(
        self, request: admin_pb.StopExecutionRequest, context: Context
    ) -> admin_pb.StopExecutionResponse:
        session_id = checks.identifier(request.session_id, "session_id")
        execution_id = checks.identifier(request.execution_id, "execution_id")
        self._note("StopExecution", f"{session_id}/{execution_id}")
        self._sessions.find(session_id).stop_execution(execution_id, "an administrator stopped it")
        return admin_pb.StopExecutionResponse()

    async def WatchSessions(self, request: admin_pb.WatchSessionsRequest, context: Context) -> None:
        tenant = checks.tenant_or_all(request.tenant)
        self._note("WatchSessions", tenant)
        async with aclosing(self._views.watch(current_principal.get(), tenant)) as messages:
            async for message in messages:
                await context.write(message)

    async def InspectSession(
        self, request: admin_pb.InspectSessionRequest, context: Context
    ) -> admin_pb.InspectSessionResponse:
        session_id, caller = checks.identifier(request.session_id, "session_id"), current_principal.get()
        self._note("InspectSession", session_id)
        ended = self._views.ended(session_id)
        if ended is not None and may_view(caller, ended.owned.tenant):
            return admin_pb.InspectSessionResponse(session=ended)
        session = self._visible(session_id)
        with_commands = session.spec.audit.view == "content" and bool(session.processes.started)
        if with_commands:
            await session.executions.admit_view(caller, "")
        return self._views.inspect(session, with_commands=with_commands)

    async def GetStatus(self, request: admin_pb.GetStatusRequest, context: Context) -> admin_pb.GetStatusResponse:
        return self._status.read()

    async def GetSessionNetwork(
        self, request: admin_pb.GetSessionNetworkRequest, context: Context
    ) -> admin_pb.GetSessionNetworkResponse:
        session_id = checks.identifier(request.session_id, "session_id")
        self._note("GetSessionNetwork", session_id)
        return to_wire.session_network_to(self._visible(session_id))

    def _visible(self, session_id: str) -> Session:
        """Returns a session that the caller may see. Raises NotFound."""
        session = self._sessions.find(session_id)
        if not may_view(current_principal.get(), session.owner.tenant):
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session {session_id!r}")
        return session

    async def ListExecutions(
        self, request: admin_pb.ListExecutionsRequest, context: Context
    ) -> admin_pb.ListExecutionsResponse:
        session_id = checks.identifier(request.session_id, "session_id")
        self._note("ListExecutions", session_id)
        return viewing.list_executions(self._visible(session_id))

    async def FollowExecution(self, request: admin_pb.FollowExecutionRequest, context: Context) -> None:
        session_id = checks.identifier(request.session_id, "session_id")
        execution_id = checks.identifier(request.execution_id, "execution_id")
        self._note("FollowExecution", f"{session_id}/{execution_id}")
        session = self._visible(session_id)
        async with aclosing(viewing.follow_execution(session, execution_id, request.after_event)) as parts:
            async for part in parts:
                await context.write(part)

    async def FollowSession(self, request: admin_pb.FollowSessionRequest, context: Context) -> None:
        session_id = checks.identifier(request.session_id, "session_id")
        after = request.after_execution_id and checks.identifier(request.after_execution_id, "after_execution_id")
        self._note("FollowSession", session_id)
        session = self._visible(session_id)
        lives = partial(self._sessions.has, session)
        async with aclosing(viewing.follow_session(session, lives, after)) as messages:
            async for message in messages:
                await context.write(message)

    async def ListEnvironments(
        self, request: admin_pb.ListEnvironmentsRequest, context: Context
    ) -> admin_pb.ListEnvironmentsResponse:
        self._note("ListEnvironments")
        statistics = self._environments.statistics()
        return write(
            admin_pb.ListEnvironmentsResponse,
            statistics,
            environments=map(to_wire.environment_to, self._environments.list()),
            builds=map(to_wire.environment_build_to, self._environments.builds()),
        )

    async def GetEnvironment(
        self, request: admin_pb.GetEnvironmentRequest, context: Context
    ) -> admin_pb.GetEnvironmentResponse:
        environment_id = checks.identifier(request.environment_id, "environment_id")
        self._note("GetEnvironment", environment_id)
        found = self._environments.show(environment_id)
        if found is None:
            raise NotFound(Reason.ENVIRONMENT_NOT_FOUND, f"there is no environment {environment_id!r}")
        return to_wire.environment_with_lock_to(found)

    async def CollectEnvironments(
        self, request: admin_pb.CollectEnvironmentsRequest, context: Context
    ) -> admin_pb.CollectEnvironmentsResponse:
        self._note("CollectEnvironments", str(request.max_bytes))
        try:
            collected = await self._environments.collect(request.max_bytes)
        except SandboxFailure as failure:
            _log.error("environments_not_collected", error=str(failure))
            message = "environments can't be measured or removed now; see the daemon's log"
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, message) from failure
        ids = [each.environment_id for each in collected.evicted]
        return write(admin_pb.CollectEnvironmentsResponse, collected, environment_ids=ids)

    async def Drain(self, request: admin_pb.DrainRequest, context: Context) -> admin_pb.DrainResponse:
        if request.node or request.move:
            raise checks.invalid("node", "can be set at the front of a fleet only; this daemon is not one")
        self._note("Drain", "resume" if request.resume else "")
        if request.resume:
            self._sessions.take_again()
        else:
            self._sessions.stop_taking()
        states = [session.state for session in self._sessions.list_all()]
        return admin_pb.DrainResponse(draining=self._sessions.draining, sessions=len(states), busy=states.count("busy"))

    async def GetFleet(self, request: admin_pb.GetFleetRequest, context: Context) -> admin_pb.GetFleetResponse:
        self._note("GetFleet")
        raise PreconditionFailed(Reason.NO_NODE, "this daemon is not the front of a fleet")

    async def GetUsage(self, request: admin_pb.GetUsageRequest, context: Context) -> admin_pb.GetUsageResponse:
        tenant = checks.tenant_or_all(request.tenant)
        self._note("GetUsage", tenant)
        tenants = visible_tenants(tenant, self._quotas.tenants())
        return admin_pb.GetUsageResponse(tenants=[self._usage_of(each) for each in tenants])

    def _usage_of(self, tenant: str) -> admin_pb.TenantUsage:
        policy, use = self._policy(), self._quotas.use_of(tenant)
        profile, quotas = policy.profile_name(tenant) or "", policy.quotas_of(tenant)
        return write(admin_pb.TenantUsage, use, tenant=tenant, profile=profile, quotas=quotas)


def visible_tenants(asked: str, known: Iterable[str]) -> list[str]:
    """Returns the requested tenants that the caller may see. An empty `asked` stands for all those in `known`."""
    caller = current_principal.get()
    if not caller.is_admin:
        return [caller.tenant] if asked in ("", caller.tenant) else []
    return [asked] if asked else list(known)
