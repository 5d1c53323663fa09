"""A real daemon as a node of a fleet: what its clients see while it is linked, killed, stopped, and without its front.

Times of the lease are short here; the rules are those of any others.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_client import AsyncExecutorClient
from executor_server.core import Principal
from executor_server.fleet.membership import Allowance
from executor_server.policy.identity import TokenFile
from tests.rpc.edge import refused
from tests.support.backends import require
from tests.support.fake_front import LOCAL, FakeFront, control_of, front_of, metadata_of
from tests.support.node_daemon import NodeDaemon, node_daemon
from tests.support.polling import eventually_async, eventually_awaited

LEASE = {"lease_s": 1.5, "fence_s": 3.0}
FENCED = ("UNAVAILABLE", "NODE_FENCED")
LOST = ("FAILED_PRECONDITION", "SESSION_LOST")


@pytest.fixture(scope="module")
def shared() -> Iterator[NodeDaemon]:
    """A node for tests that neither kill nor stop it."""
    require("local")
    with node_daemon(fleet="fence_s = 3.0\nlease_s = 1.5\nreport_interval_s = 0.1") as node:
        yield node


@pytest.fixture
def node() -> Iterator[NodeDaemon]:
    require("local")
    with node_daemon(fleet="fence_s = 3.0\nlease_s = 1.5\nreport_interval_s = 0.1") as node:
        yield node


@pytest.fixture
def patient() -> Iterator[NodeDaemon]:
    """A node whose sandboxes wait for their daemon for as long as a loaded machine needs to start another."""
    require("local")
    with node_daemon(fleet="fence_s = 120.0\nlease_s = 30.0") as node:
        yield node


_terms = iter(range(1, 1000))


@asynccontextmanager
async def linked(node: NodeDaemon, **hello: Any) -> AsyncIterator[FakeFront]:
    """A front of the next term, with the control of an empty fleet in force."""
    fields = {**LEASE, "term": next(_terms), **hello}
    async with front_of(node.front_folder, node.link_address, node.name, **fields) as front:
        await front.control(control_of())
        yield front


class Direct:
    """A client's calls at the node, with the statuses that they end with."""

    def __init__(self, node: NodeDaemon) -> None:
        self.channel = grpc.aio.insecure_channel(node.address)
        self.stub: Any = pb_grpc.ExecutorServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {node.token}"),)

    def get(self, session_id: str) -> Any:
        return self.stub.GetSession(pb.GetSessionRequest(session_id=session_id), metadata=self.metadata, timeout=20)

    def execute(self, session_id: str, code: str, execution_id: str = "e1") -> Any:
        request = pb.ExecuteRequest(session_id=session_id, execution_id=execution_id, code=code)
        return self.stub.Execute(request, metadata=self.metadata, timeout=60)

    def attach(self, session_id: str, execution_id: str = "e1") -> Any:
        request = pb.AttachExecutionRequest(session_id=session_id, execution_id=execution_id)
        return self.stub.AttachExecution(request, metadata=self.metadata, timeout=60)

    async def state(self, session_id: str) -> tuple[str, str]:
        """The status of GetSession: OK, or code and reason."""
        call = self.get(session_id)
        return ("OK", "") if await call.code() is grpc.StatusCode.OK else await refused(call)


@asynccontextmanager
async def direct(node: NodeDaemon) -> AsyncIterator[Direct]:
    client = Direct(node)
    try:
        yield client
    finally:
        await client.channel.close(None)


async def output_of(call: Any) -> str:
    """The text that an execution has printed, once its stream has ended."""
    events = [response.event async for response in call]
    assert events[-1].WhichOneof("kind") == "result"
    return "".join(event.log.text for event in events if event.WhichOneof("kind") == "log")


# -- in good times


async def test_a_session_that_the_front_made_is_served_to_its_client(shared: NodeDaemon) -> None:
    async with linked(shared) as front, shared.client() as client:
        made = await front.create()
        assert made.node == shared.name
        assert made.session_id.startswith(f"{shared.name}-{front.epoch:08x}")
        session = await client.get_session(made.session_id)
        assert (await session.execute("1 + 1")).output == 2
        await session.close()


async def test_sessions_are_made_by_the_front_only(shared: NodeDaemon) -> None:
    async with linked(shared) as front, direct(shared) as client:
        request = pb.CreateSessionRequest(request_id="r1")
        assert await refused(client.stub.CreateSession(request, metadata=client.metadata)) == (
            "FAILED_PRECONDITION",
            "NODE_ELSEWHERE",
        )
        made = await front.create(request_id="r1")
        again = await client.stub.CreateSession(request, metadata=client.metadata)
        assert again.session.session_id == made.session_id
        prepare = client.stub.PrepareEnvironment(pb.PrepareEnvironmentRequest(), metadata=client.metadata)
        assert await refused(prepare) == ("FAILED_PRECONDITION", "NODE_ELSEWHERE")
        await front.delete(made)


async def test_labels_of_nodes_are_the_fronts_business(shared: NodeDaemon) -> None:
    async with linked(shared) as front:
        made = await front.create(node_labels={"zone": "b"})
        await front.delete(made)


async def test_reports_name_sessions_as_they_come_and_go(shared: NodeDaemon) -> None:
    async with linked(shared) as front:
        assert front.reports[0].full and not any(report.full for report in front.reports[1:])
        made = await front.create(request_id="r7")
        await front.reported(
            lambda report: made.session_id in {each.session_id for each in report.opened}, earlier=True
        )
        assert (front.sessions[made.session_id].tenant, front.sessions[made.session_id].request_id) == ("local", "r7")
        await front.delete(made)
        await front.reported(lambda report: made.session_id in report.closed, earlier=True)
        last = front.reports[-1]
        assert [(backend.name, backend.ready, backend.images) for backend in last.backends] == [
            ("local", True, ("base",))
        ]
        assert last.max_sessions >= 64 and not last.draining


async def test_a_session_that_comes_and_goes_between_two_reports_is_named_as_ended(shared: NodeDaemon) -> None:
    """The front has known it since it was made, and would count it for ever."""
    async with linked(shared) as front:
        made = [await front.create(request_id=request_id) for request_id in ("r8", "r9")]
        for session in made:
            await front.delete(session)
        ids = {session.session_id for session in made}
        assert await eventually_async(lambda: ids <= {each for report in front.reports for each in report.closed})


async def test_a_node_that_is_drained_says_so(shared: NodeDaemon) -> None:
    async with linked(shared) as front:
        await front.admin.Drain(admin_pb.DrainRequest(), metadata=metadata_of(LOCAL))
        await front.reported(lambda report: report.draining)
        await front.admin.Drain(admin_pb.DrainRequest(resume=True), metadata=metadata_of(LOCAL))
        await front.reported(lambda report: not report.draining)


async def test_a_principal_owns_its_sessions_only(shared: NodeDaemon) -> None:
    other = Principal("other", "test")
    async with linked(shared) as front:
        made = await front.create(LOCAL)
        request = pb.GetSessionRequest(session_id=made.session_id)
        call = front.service.GetSession(request, metadata=metadata_of(other))
        assert await refused(call) == ("NOT_FOUND", "SESSION_NOT_FOUND")
        await front.delete(made)


# -- policy and tokens


async def test_tokens_of_the_front_are_valid_at_once_and_revoked_ones_are_not(shared: NodeDaemon) -> None:
    file = TokenFile(shared.directory / "front-tokens.json")
    record, token = file.new("acme", "ci")
    async with linked(shared) as front, AsyncExecutorClient(shared.address, token=token) as client:
        await front.control(control_of(tokens=file.path.read_bytes()))
        assert await client.list_sessions() == []
        file.revoke(record.id)
        await front.control(control_of(tokens=file.path.read_bytes()))
        async with direct(shared) as caller:
            caller.metadata = (("authorization", f"Bearer {token}"),)
            call = caller.stub.ListSessions(pb.ListSessionsRequest(), metadata=caller.metadata)
            assert await refused(call) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


async def test_a_policy_that_the_node_cant_serve_is_reported_and_tokens_count_all_the_same(shared: NodeDaemon) -> None:
    file = TokenFile(shared.directory / "other-tokens.json")
    _, token = file.new("acme", "ci")
    async with linked(shared) as front, AsyncExecutorClient(shared.address, token=token) as client:
        await front.send(control_of(policy=b"nonsense = 1", tokens=file.path.read_bytes()))
        report = await front.reported(lambda report: report.control_problem)
        assert "policy: " in report.control_problem and "nonsense" in report.control_problem
        assert report.control_fingerprint == ""
        assert await client.list_sessions() == []


async def test_the_fleets_policy_holds(shared: NodeDaemon) -> None:
    policy = b'default = "d"\n[profiles.d]\n[profiles.d.limits.max]\nmemory_bytes = "128MiB"\n[profiles.d.limits.default]\nmemory_bytes = "128MiB"\n'
    async with linked(shared) as front:
        await front.control(control_of(policy=policy))
        made = await front.create()
        assert made.limits.memory_bytes == 128 * 2**20
        await front.delete(made)


# -- quotas of the whole fleet


async def test_a_node_allows_no_more_executions_than_its_front_does(shared: NodeDaemon) -> None:
    async with linked(shared) as front, direct(shared) as client:
        made = [await front.create() for _ in range(2)]
        front.allowances = {"local": Allowance(executions=1)}
        await front.reported(lambda report: report.renewed > front.reports[0].sequence)
        runs = client.execute(made[0].session_id, "import time\nprint('on')\ntime.sleep(60)")
        assert (await anext(aiter(runs))).event
        await front.reported(lambda report: report.tenants["local"].executions == 1)
        refusal = ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert await refused(client.execute(made[1].session_id, "1")) == refusal
        front.allowances = {"local": Allowance(executions=2)}
        last = front.reports[-1].sequence
        await front.reported(lambda report: report.renewed > last)
        assert await output_of(client.execute(made[1].session_id, "print(1)", "e2")) == "1\n"
        front.allowances = {"local": Allowance()}
        for session in made:
            await front.delete(session)


# -- the lease


async def test_a_node_without_a_link_serves_no_session(node: NodeDaemon) -> None:
    async with direct(node) as client:
        assert await client.state("x") == FENCED


async def test_a_node_without_its_fronts_tokens_refuses_nobodys_token_until_it_has_them(node: NodeDaemon) -> None:
    """A node that comes back with an empty disk knows no client: one whose session is lost must ask the front."""
    async with direct(node) as client:
        client.metadata = (("authorization", "Bearer of-the-front"),)
        assert await client.state("x") == FENCED
        async with linked(node):
            assert await eventually_awaited(lambda: is_unauthenticated(client))


async def is_unauthenticated(client: Direct) -> bool:
    return (await client.state("x"))[0] == "UNAUTHENTICATED"


async def test_a_front_that_is_away_for_less_than_a_lease_is_not_missed(node: NodeDaemon) -> None:
    async with linked(node) as front, direct(node) as client:
        made = await front.create()
        stream = client.execute(made.session_id, "import time\nfor i in range(20): time.sleep(0.1); print(i)")
        front.renews, last = False, front.reports[-1].sequence
        await front.reported(lambda report: report.sequence > last + 5)
        front.renews = True
        assert "19" in await output_of(stream)


async def test_a_lapsed_lease_cuts_streams_and_the_execution_goes_on(node: NodeDaemon) -> None:
    async with linked(node) as front, direct(node) as client:
        made = await front.create()
        stream = client.execute(made.session_id, "import time\ntime.sleep(2.5)\nprint('done')")
        await eventually_async(lambda: front.reports[-1].tenants.get("local"))
        front.renews = False
        assert await refused(stream) == FENCED
        assert await client.state(made.session_id) == FENCED
        front.renews = True
        assert await eventually_awaited(lambda: is_ok(client, made.session_id))
        assert await output_of(client.attach(made.session_id)) == "done\n"


async def is_ok(client: Direct, session_id: str) -> bool:
    return await client.state(session_id) == ("OK", "")


async def test_a_node_that_is_long_without_its_front_ends_its_sessions_for_good(node: NodeDaemon) -> None:
    async with linked(node) as front, direct(node) as client:
        made = await front.create()
        await front.unlink()
        assert await eventually_async(lambda: "fleet_fenced" in node.log)
        await front.link()
        assert front.epoch == 2
        await front.reported(lambda report: report.full and not report.opened)
        assert await eventually_awaited(lambda: is_lost(client, made.session_id))
        again = await front.create()
        assert again.session_id.startswith(f"{node.name}-00000002")


async def is_lost(client: Direct, session_id: str) -> bool:
    return await client.state(session_id) == LOST


async def test_a_killed_node_comes_back_with_its_sessions_within_its_lease(patient: NodeDaemon) -> None:
    node, lease = patient, {"lease_s": 30.0, "fence_s": 120.0}
    async with linked(node, **lease) as front, direct(node) as client:
        made = await front.create()
        assert await output_of(client.execute(made.session_id, "x = 41")) == ""
        await front.reported(lambda report: report.opened or made.session_id in front.sessions)
        node.kill()
    node.start_again()
    async with linked(node, **lease) as front, direct(node) as client:
        assert front.epoch == 1
        assert await eventually_async(lambda: made.session_id in front.sessions)
        assert await eventually_awaited(lambda: is_ok(client, made.session_id))
        assert await output_of(client.execute(made.session_id, "print(x + 1)", "e2")) == "42\n"


async def test_sessions_that_the_front_has_reported_lost_never_come_back(node: NodeDaemon) -> None:
    async with linked(node) as front:
        made = await front.create()
        node.kill()
    node.start_again()
    async with linked(node, lost_epoch=1) as front, direct(node) as client:
        assert front.epoch == 2
        assert front.reports[0].opened == ()
        assert await eventually_awaited(lambda: is_lost(client, made.session_id))


async def test_a_stopped_node_that_goes_on_serves_nothing_that_may_be_lost(node: NodeDaemon) -> None:
    """SIGSTOP takes the daemon out of time for longer than its lease; what lies ready when it wakes is not delivered."""
    async with linked(node) as front, direct(node) as client:
        made = await front.create()
        stream = client.execute(made.session_id, "import time\ntime.sleep(1)\nprint('late')")
        await eventually_async(lambda: front.reports[-1].tenants.get("local"))
        node.signal(signal.SIGSTOP)
        front.renews = False
        asked = client.get(made.session_id)
        await asyncio.sleep(2.5)  # longer than the lease: the time that passes is the subject
        node.signal(signal.SIGCONT)
        assert await refused(stream) == FENCED
        assert await refused(asked) == FENCED


async def test_another_front_gets_the_node_only_without_its_sessions(node: NodeDaemon) -> None:
    async with linked(node) as front:
        await front.create()
        other = FakeFront(node.front_folder, node.link_address, node.name)
        other.hello = other.hello.__class__(**{**vars(other.hello), **LEASE, "front_id": "other", "instance": "o"})
        with pytest.raises(grpc.aio.AioRpcError, match="another front holds this node"):
            await other.link()
        await other.close()
        await front.unlink()
        assert await eventually_async(lambda: "fleet_fenced" in node.log)
        await other_link(node)


async def other_link(node: NodeDaemon) -> None:
    async with front_of(node.front_folder, node.link_address, node.name, **LEASE, front_id="other") as other:
        assert other.epoch == 2
        assert (await eventually_async(lambda: other.reports))[0].opened == ()
