"""A front of two nodes in place of the edge of one daemon: each call of a test passes through both.

EXECUTOR_TEST_FLEET=1 asks for it. The front and the nodes' listeners are real, with mutual TLS between them; the
nodes have the fake sessions of the test. session_names.py gives these sessions ids that a node could have made.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_server.api.asking import Asking
from executor_server.api.audit_view import AuditView
from executor_server.api.handlers import Wrapper
from executor_server.api.recordings import Recordings
from executor_server.api.server import RpcServer, ServerSettings
from executor_server.api.service import ExecutorService
from executor_server.core import ExecutorError, NotFound, Principal, Reason, TcpAddress
from executor_server.core.fairness import FairSemaphore
from executor_server.fleet.api.dialing import Dialers
from executor_server.fleet.api.fleet_news import FleetNews
from executor_server.fleet.api.front_admin import FrontAdmin
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_service import BY_HAND, FrontService
from executor_server.fleet.api.front_sessions import SessionNames
from executor_server.fleet.api.front_status import FrontStatus
from executor_server.fleet.api.front_views import FrontViews
from executor_server.fleet.api.moving import Mover
from executor_server.fleet.api.node_approvals import NodeApprovals
from executor_server.fleet.api.node_choice import NodeChoice
from executor_server.fleet.api.node_link import FleetService
from executor_server.fleet.api.node_server import FrontServices, NodeServer
from executor_server.fleet.api.proxy import proxy_handlers
from executor_server.fleet.api.session_creator import SessionCreator
from executor_server.fleet.membership import (
    Control,
    FleetStore,
    FleetUsage,
    FrontHello,
    Members,
    NodeBackend,
    NodeHello,
    NodeReport,
    NodeSession,
    Placement,
    Renewal,
    Reservations,
    TenantUse,
    Timing,
    fingerprint_of,
    issue_front,
    issue_node,
    lease_clock,
)
from executor_server.policy import Policy, QuotasTable
from executor_server.policy.approvals import Approvals
from executor_server.policy.identity import Identities
from executor_server.policy.quotas import Admission, Quotas
from executor_server.sessions import SessionRequest
from executor_server.sessions.leases import Renewal as LeaseRenewal
from tests.rpc.session_names import EPOCH, fleet_id, name_of, renaming
from tests.support.fleet_daemon import NODES
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from tests.rpc.edge import FakeSession, FakeSessions

TIMING = Timing(report_interval_s=0.05, lease_s=3.0, fence_s=10.0)
STOP_GRACE_S = 0.0


# ---------------------------------------------------------------------------------------------------------------------
# A node


class NodeSessions:
    """The fake sessions that are on one node, as its ExecutorService asks for them."""

    def __init__(self, fake: FakeSessions, node: str) -> None:
        self._fake = fake
        self._node = node

    def here(self) -> dict[str, FakeSession]:
        """Returns the node's sessions by their names. Those that a test has made itself are on the first node."""
        for name, session in self._fake.sessions.items():
            if not session.node:
                session.node, session.session_id = NODES[0], fleet_id(name, NODES[0])
        return {name: session for name, session in self._fake.sessions.items() if session.node == self._node}

    async def create(self, principal: Principal, request: SessionRequest) -> FakeSession:
        session = await self._fake.create(principal, request)
        if not session.node:
            session.node, session.session_id = self._node, fleet_id(request.request_id, self._node)
        return session

    async def created(self, principal: Principal, request_id: str) -> FakeSession | None:
        return await self._fake.created(principal, request_id)

    def get(self, principal: Principal, session_id: str) -> FakeSession:
        name = name_of(session_id)
        if name not in self.here():
            raise NotFound(Reason.SESSION_NOT_FOUND, "no such session")
        return self._fake.get(principal, name)

    def list(self, principal: Principal) -> list[FakeSession]:
        own = self.here().values()
        return [session for session in self._fake.list(principal) if session in own]

    async def delete(self, principal: Principal, session_id: str) -> None:
        self.get(principal, session_id)
        del self._fake.sessions[name_of(session_id)]

    async def delete_by_request(self, principal: Principal, request_id: str) -> None:
        await self.delete(principal, fleet_id(request_id, self._node))

    async def prepare_environment(self, principal: Principal, spec: Any) -> Any:
        return await self._fake.prepare_environment(principal, spec)

    def attach(self, session: FakeSession, lease_id: str) -> None:
        self._fake.held[name_of(session.session_id)] = lease_id

    def renew_lease(self, principal: Principal, lease_id: str) -> LeaseRenewal:
        renewal = self._fake.renew_lease(principal, lease_id)
        return LeaseRenewal(self._held(lease_id), renewal.renew_after_s)

    def end_lease(self, principal: Principal, lease_id: str) -> int:
        return self._held(lease_id)

    def _held(self, lease_id: str) -> int:
        return sum(self._fake.held.get(name) == lease_id for name in self.here())


class _Linked:
    """The node, as its link sees it (`LinkedNode`)."""

    def __init__(self, node: str, sessions: NodeSessions) -> None:
        self._node = node
        self._sessions = sessions
        self._sequence = 0
        self.front_instance = ""
        self._reported: dict[str, NodeSession] = {}
        self._control: Control | None = None
        self._instance = secrets.token_hex(16)

    async def hello(self, hello: FrontHello) -> NodeHello:
        assert hello.lost_epoch < EPOCH
        self.front_instance = hello.instance
        return NodeHello(self._node, EPOCH, self._instance)

    def report(self, *, full: bool) -> NodeReport:
        self._sequence += 1
        now = {
            session.session_id: NodeSession(session.session_id, session.owner.tenant, name)
            for name, session in self._sessions.here().items()
        }
        before, self._reported = ({} if full else self._reported), now
        return NodeReport(
            self._sequence,
            EPOCH,
            max_sessions=1000,
            control_fingerprint=self._control.fingerprint if self._control is not None else "",
            backends=(NodeBackend("local", images=("base",)),),
            full=full,
            opened=tuple(each for session_id, each in now.items() if session_id not in before),
            closed=tuple(before.keys() - now.keys()),
            tenants={each.tenant: TenantUse() for each in now.values()},
        )

    def renewed(self, renewal: Renewal) -> None:
        """It keeps its sessions without heartbeats."""

    async def take_control(self, control: Control) -> None:
        self._control = control


def _node(
    certificates: Path,
    name: str,
    sessions: NodeSessions,
    server_settings: ServerSettings,
    current_policy: Callable[[], Policy],
    admin: admin_grpc.AdminServiceServicer,
) -> NodeServer:
    service = ExecutorService(
        current_policy, cast("Any", sessions), cast("Any", None), Approvals(), Recordings(Path("unused"))
    )
    linked = _Linked(name, sessions)
    return NodeServer(
        TcpAddress("127.0.0.1", 0),
        certificates,
        FrontServices(FleetService(linked), service, admin),
        server_settings,
        _refused,
        lambda: linked.front_instance,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The front


class _WithoutEnvironments(admin_grpc.AdminServiceServicer):
    """A node's answers to administrators: it has no environment, and answers nothing else."""

    async def GetEnvironment(self, request: admin_pb.GetEnvironmentRequest, context: Any) -> Any:
        raise NotFound(Reason.ENVIRONMENT_NOT_FOUND, f"there is no environment {request.environment_id!r}")


class FrontedServer(RpcServer):
    """The front's server. It starts and stops its nodes too."""

    def __init__(
        self,
        sessions: FakeSessions,
        server_settings: ServerSettings,
        identities: Identities,
        current_policy: Callable[[], Policy],
        *,
        admin: admin_grpc.AdminServiceServicer | None = None,
        quotas: Quotas | None = None,
        wrappers: Sequence[Wrapper] = (),
        reload: Callable[[], Awaitable[bool]] | None = None,
        **more: Any,
    ) -> None:
        """`admin` serves the first node, and the other one has no environments; `reload` is the front's.

        `more` goes to RpcServer.
        """
        self._ends = AsyncExitStack()
        directory = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="behind-")))
        front_folder = issue_front(directory / "certificates").folder
        admins = {NODES[0]: admin} if admin is not None else {}
        self._nodes = [
            _node(
                issue_node(directory / "certificates", name).folder,
                name,
                NodeSessions(sessions, name),
                server_settings,
                current_policy,
                admins.get(name) or _WithoutEnvironments(),
            )
            for name in NODES
        ]
        control = Control(b"", fingerprint_of(b"", b"k" * 32), b"k" * 32)
        store = FleetStore(directory / "fleet")
        self._ends.callback(store.close)

        def quotas_of(tenant: str) -> QuotasTable:
            return current_policy().quotas_of(tenant)

        members = Members(store, TIMING, lease_clock(), time.time())
        usage, news, placement = FleetUsage(quotas_of), FleetNews(None, None, int), Placement(members)
        creations = Reservations(members, quotas_of)
        dialers = Dialers(front_folder)
        self._fleet = FrontFleet(
            members, usage, dialers.current, lambda: control, news, version="1", wrong_retry_s=30.0
        )
        placement.set_fingerprint(control.fingerprint)
        choice = NodeChoice(members, placement, park_s=0.0)
        own_quotas = quotas or Quotas(lambda _: QuotasTable())
        admission = Admission(own_quotas, FairSemaphore(1), None)
        approvals = Approvals()
        self._ends.callback(approvals.close)
        views = FrontViews(self._fleet)
        self._fleet.followers += [NodeApprovals(self._fleet, approvals).follow, views.follow]
        names, asking = SessionNames(self._fleet), Asking(approvals)
        making = SessionCreator(current_policy, self._fleet, names, creations, choice, admission, asking, news)
        mover = Mover(self._fleet, making, names, current_policy, news)
        front_admin = FrontAdmin(
            self._fleet,
            creations,
            own_quotas,
            mover,
            lambda: choice.parked,
            approvals,
            current_policy,
            reload or _unchanged,
            _drop,
            AuditView(None, directory),
            cast("Any", None),
            FrontStatus("1", time.time(), approvals, current_policy, None),
            views,
        )
        self._making = making
        super().__init__(
            FrontService(current_policy, self._fleet, making, names),
            identities,
            server_settings,
            admin=front_admin if admin is not None else None,
            quotas=quotas,
            wrappers=(*wrappers, renaming(sessions.sessions)),
            handlers=proxy_handlers(self._fleet, by_hand=BY_HAND),
            **more,
        )

    async def start(self) -> list[str]:
        listening = await super().start()
        addresses = []
        for node in self._nodes:
            self._ends.push_async_callback(node.stop, STOP_GRACE_S)
            addresses.append(str(node.bind()))
            await node.start()
        # Links end before their nodes do: gRPC writes to stderr of connections that a server has ended.
        self._ends.push_async_callback(self._fleet.close)
        self._ends.push_async_callback(self._making.close)
        await self._fleet.start()
        self._fleet.follow(frozenset(addresses))
        assert await eventually_async(lambda: self._serving() == set(NODES))
        return listening

    def _serving(self) -> set[str]:
        fleet = self._fleet
        return {member.name for member in fleet.members if fleet.state_of(member) == "serving"}

    async def stop(self, grace_s: float) -> None:
        await super().stop(grace_s)
        await self._ends.aclose()


def _refused(_method: str, _error: ExecutorError) -> None:
    """The observer hears of it from the front."""


async def _unchanged() -> bool:
    return False


def _drop(_principal: Principal, _method: str, _target: str) -> None:
    """There is no audit log."""
