"""ExecutorService of a front: it places sessions and answers for lost ones. Nodes answer everything else.

Methods whose request names a session are in proxy.py, with three exceptions: GetSession and DeleteSession also serve
lost sessions, and RenameSession concerns the other nodes too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_server.api import checks, to_wire
from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context
from executor_server.core import PreconditionFailed, Reason, Unavailable
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_link import FrontLink
from executor_server.fleet.api.front_sessions import SessionNames, in_order, lost_session, of_node
from executor_server.fleet.api.node_calls import RETRY_S, ask, ask_all, time_left_s
from executor_server.fleet.api.session_creator import SessionCreator
from executor_server.fleet.membership import Tombstone, node_of
from executor_server.policy import Policy

BY_HAND = frozenset({"GetSession", "RenameSession", "DeleteSession", "TailAudit"})
"""Methods that a front answers itself, although their requests may name a session."""


class FrontService(service_grpc.ExecutorServiceServicer):
    """Serves executor_api.v1.ExecutorService for a fleet."""

    def __init__(
        self, policy: Callable[[], Policy], fleet: FrontFleet, creations: SessionCreator, names: SessionNames
    ) -> None:
        """`policy` returns the one in force."""
        self._policy = policy
        self._fleet = fleet
        self._creations = creations
        self._names = names

    async def CreateSession(
        self, request: service_pb.CreateSessionRequest, context: Context
    ) -> service_pb.CreateSessionResponse:
        session = await self._creations.create(current_principal.get(), request)
        return service_pb.CreateSessionResponse(session=session)

    async def PrepareEnvironment(
        self, request: service_pb.PrepareEnvironmentRequest, context: Context
    ) -> service_pb.PrepareEnvironmentResponse:
        return await self._creations.prepare(current_principal.get(), request, time_left_s(context))

    async def GetSession(
        self, request: service_pb.GetSessionRequest, context: Context
    ) -> service_pb.GetSessionResponse:
        principal = current_principal.get()
        if bool(request.session_id) == bool(request.name):
            raise checks.invalid("session_id", "or name must be given, and not both")
        if request.name:
            named = await self._names.named(principal, checks.session_name(request.name))
            request = service_pb.GetSessionRequest(session_id=named.session_id, lease_id=request.lease_id)
        found = self._find(request.session_id)
        if isinstance(found, Tombstone):
            return service_pb.GetSessionResponse(session=lost_session(found))
        answer: service_pb.GetSessionResponse = await ask(found, "GetSession", request, principal, time_left_s(context))
        return answer

    async def RenameSession(
        self, request: service_pb.RenameSessionRequest, context: Context
    ) -> service_pb.RenameSessionResponse:
        principal = current_principal.get()
        name = checks.session_name(request.name) if request.name else ""
        found = self._find(request.session_id)
        if isinstance(found, Tombstone):
            raise PreconditionFailed(Reason.SESSION_LOST, f"the session is lost: {found.reason}")
        async with self._names.giving(principal, name, request.session_id):
            answer: service_pb.RenameSessionResponse = await ask(
                found, "RenameSession", request, principal, time_left_s(context)
            )
        return answer

    async def ListSessions(
        self, request: service_pb.ListSessionsRequest, context: Context
    ) -> service_pb.ListSessionsResponse:
        principal = current_principal.get()
        answers = await ask_all(self._fleet.links(), "ListSessions", request, principal)
        sessions = [session for node, answer in answers for session in of_node(node, answer.sessions)]
        sessions += map(lost_session, self._fleet.members.sessions.tombstones_of(principal.tenant))
        return service_pb.ListSessionsResponse(sessions=in_order(sessions))

    async def ListRecordings(
        self, request: service_pb.ListRecordingsRequest, context: Context
    ) -> service_pb.ListRecordingsResponse:
        answers = await ask_all(self._fleet.links(), "ListRecordings", request, current_principal.get())
        found = [each for node, answer in answers for each in answer.recordings if node_of(each.session_id) == node]
        found.sort(key=lambda each: each.create_time.ToNanoseconds())
        return service_pb.ListRecordingsResponse(recordings=found)

    async def DeleteSession(
        self, request: service_pb.DeleteSessionRequest, context: Context
    ) -> service_pb.DeleteSessionResponse:
        if bool(request.session_id) == bool(request.request_id):
            raise checks.invalid("session_id", "or request_id must be given, and not both")
        principal = current_principal.get()
        if request.request_id:
            await self._creations.withdraw(principal, checks.identifier(request.request_id, "request_id"))
            return service_pb.DeleteSessionResponse()
        found = self._find(request.session_id)
        if isinstance(found, Tombstone):
            self._fleet.members.forget_lost(found.session_id)
            return service_pb.DeleteSessionResponse()
        answer: service_pb.DeleteSessionResponse = await ask(
            found, "DeleteSession", request, principal, time_left_s(context)
        )
        return answer

    async def RenewLease(
        self, request: service_pb.RenewLeaseRequest, context: Context
    ) -> service_pb.RenewLeaseResponse:
        answers = await self._of_tenant("RenewLease", request, checks.lease_id(request.lease_id))
        renewed = [answer for answer in answers if answer.renew_after_s > 0]
        return service_pb.RenewLeaseResponse(
            sessions=sum(answer.sessions for answer in renewed),
            renew_after_s=min((answer.renew_after_s for answer in renewed), default=RETRY_S),
        )

    async def EndLease(self, request: service_pb.EndLeaseRequest, context: Context) -> service_pb.EndLeaseResponse:
        lease_id = checks.lease_id(request.lease_id)
        cancelled = self._creations.end_of_lease(current_principal.get().tenant, lease_id)
        answers = await self._of_tenant("EndLease", request, lease_id)
        return service_pb.EndLeaseResponse(sessions=cancelled + sum(answer.sessions for answer in answers))

    async def GetPolicy(self, request: service_pb.GetPolicyRequest, context: Context) -> service_pb.GetPolicyResponse:
        return service_pb.GetPolicyResponse(policy=to_wire.policy_to(self._policy().describe(current_principal.get())))

    async def _of_tenant(self, method: str, request: Any, lease_id: str) -> list[Any]:
        """Asks each node that has sessions of the caller's tenant. Raises Unavailable if none of these answers."""
        principal = current_principal.get()
        nodes = self._fleet.members.sessions.nodes_of(principal.tenant)
        links = [link for node in nodes if (link := self._fleet.link_of(node)) is not None]
        answers = await ask_all(links, method, request, principal)
        if nodes and not answers:
            # An answer of 0 sessions would say that the lease holds nothing any more.
            message = f"no node that has sessions of the lease {lease_id} answers now"
            raise Unavailable(Reason.NODE_FENCED, message, retry_after_s=RETRY_S)
        return [answer for _, answer in answers]

    def _find(self, session_id: str) -> FrontLink | Tombstone:
        session_id = checks.identifier(session_id, "session_id")
        structlog.contextvars.bind_contextvars(session_id=session_id)
        return self._fleet.find(current_principal.get(), session_id)
