"""A real daemon as a node of a fleet: its sessions while it is linked, killed, stopped, and without its front.

Times of the lease are short here; the rules are those of any others.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as pb
from executor_server.core import Principal
from tests.rpc.edge import refused
from tests.support.backends import require
from tests.support.fake_front import LOCAL, FakeFront, control_of, front_of, metadata_of
from tests.support.node_daemon import NodeDaemon, node_daemon
from tests.support.polling import eventually_async, eventually_awaited

LEASE = {"lease_s": 1.5, "fence_s": 3.0}
LOST = ("FAILED_PRECONDITION", "SESSION_LOST")
USED = ("FAILED_PRECONDITION", "SESSION_USED")
OPERATOR = Principal("local", "front", is_admin=True)


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


def execute(front: FakeFront, session_id: str, code: str, execution_id: str = "e1") -> Any:
    request = pb.ExecuteRequest(session_id=session_id, execution_id=execution_id, code=code)
    return front.service.Execute(request, metadata=metadata_of(LOCAL), timeout=60)


async def state(front: FakeFront, session_id: str) -> tuple[str, str]:
    """The status of GetSession: OK, or code and reason."""
    call = front.service.GetSession(
        pb.GetSessionRequest(session_id=session_id), metadata=metadata_of(LOCAL), timeout=20
    )
    return ("OK", "") if await call.code() is grpc.StatusCode.OK else await refused(call)


async def output_of(call: Any) -> str:
    """The text that an execution has printed, once its stream has ended."""
    events = [response.event async for response in call]
    assert events[-1].WhichOneof("kind") == "result"
    return "".join(event.log.text for event in events if event.WhichOneof("kind") == "log")


# -- in good times


async def test_a_session_that_the_front_made_names_its_node_and_epoch(shared: NodeDaemon) -> None:
    async with linked(shared) as front:
        made = await front.create()
        assert made.node == shared.name
        assert made.session_id.startswith(f"{shared.name}-{front.epoch:08x}")
        assert await output_of(execute(front, made.session_id, "print(1 + 1)")) == "2\n"
        await front.delete(made)


USES: dict[str, Callable[[FakeFront, str], Any]] = {
    "variables": lambda front, session_id: front.service.SetVariables(
        pb.SetVariablesRequest(session_id=session_id), metadata=metadata_of(LOCAL)
    ),
    "tools": lambda front, session_id: front.service.RegisterTools(
        pb.RegisterToolsRequest(session_id=session_id), metadata=metadata_of(LOCAL)
    ),
    "a file": lambda front, session_id: front.service.ManageFile(
        pb.ManageFileRequest(session_id=session_id, path="d", mkdir=pb.MakeDirectory()), metadata=metadata_of(LOCAL)
    ),
    "a name": lambda front, session_id: front.service.RenameSession(
        pb.RenameSessionRequest(session_id=session_id, name="work"), metadata=metadata_of(LOCAL)
    ),
    "a process": lambda front, session_id: ended(
        front.service.StartProcess(
            pb.StartProcessRequest(session_id=session_id, process_id="p1", argv=["true"]), metadata=metadata_of(LOCAL)
        )
    ),
    "an execution": lambda front, session_id: ended(execute(front, session_id, "n = 1")),
}


async def ended(call: Any) -> None:
    """Reads a stream to its end."""
    async for _ in call:
        pass


async def export(front: FakeFront, session_id: str) -> None:
    await ended(front.service.ExportState(pb.ExportStateRequest(session_id=session_id), metadata=metadata_of(LOCAL)))


async def test_a_session_that_was_used_after_its_export_is_not_ended_by_the_move(shared: NodeDaemon) -> None:
    """Whatever counts as use: the copy does not have it."""
    policy = b'version = "1"\ndefault = "p"\n[profiles.p.state]\nexport = true\n'
    async with linked(shared) as front:
        await front.control(control_of(policy))
        made = await front.create()
        request = admin_pb.KillSessionRequest(session_id=made.session_id, unless_used=True)

        def kill() -> Any:
            return front.admin.KillSession(request, metadata=metadata_of(OPERATOR), timeout=60)

        assert await refused(kill()) == USED, "it was never exported"
        for name, use in USES.items():
            await export(front, made.session_id)
            await use(front, made.session_id)
            assert await refused(kill()) == USED, name
        await export(front, made.session_id)
        await kill()
        assert await state(front, made.session_id) == ("NOT_FOUND", "SESSION_NOT_FOUND")


def test_a_node_has_no_door_for_clients(shared: NodeDaemon) -> None:
    assert not list(shared.state_dir.glob("*.sock"))
    assert not (shared.state_dir / "token").exists()
    assert shared.log.count("executor-server listens on ") == 1
    assert f"executor-server listens on {shared.link_address}\n" in shared.log


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


# -- the policy


async def test_a_policy_that_the_node_cant_serve_is_reported(shared: NodeDaemon) -> None:
    async with linked(shared) as front:
        await front.send(control_of(policy=b"nonsense = 1"))
        report = await front.reported(lambda report: report.control_problem)
        assert "policy: " in report.control_problem and "nonsense" in report.control_problem
        assert report.control_fingerprint == ""


async def test_the_fleets_policy_holds(shared: NodeDaemon) -> None:
    policy = b'default = "d"\n[profiles.d]\n[profiles.d.limits.max]\nmemory_bytes = "128MiB"\n[profiles.d.limits.default]\nmemory_bytes = "128MiB"\n'
    async with linked(shared) as front:
        await front.control(control_of(policy=policy))
        made = await front.create()
        assert made.limits.memory_bytes == 128 * 2**20
        await front.delete(made)


# -- the front's silence


async def test_a_front_that_was_silent_for_less_than_the_fence_finds_what_runs(node: NodeDaemon) -> None:
    async with linked(node) as front:
        made = await front.create()
        stream = execute(front, made.session_id, "import time\ntime.sleep(2.5)\nprint('done')")
        front.renews = False
        assert await output_of(stream) == "done\n"
        front.renews = True
        assert await state(front, made.session_id) == ("OK", "")


async def test_a_node_that_is_long_without_its_front_ends_its_sessions_for_good(node: NodeDaemon) -> None:
    async with linked(node) as front:
        made = await front.create()
        await front.unlink()
        assert await eventually_async(lambda: "fleet_fenced" in node.log)
        await front.link()
        assert front.epoch == 2
        await front.reported(lambda report: report.full and not report.opened)
        assert await eventually_awaited(lambda: is_lost(front, made.session_id))
        again = await front.create()
        assert again.session_id.startswith(f"{node.name}-00000002")


async def is_lost(front: FakeFront, session_id: str) -> bool:
    return await state(front, session_id) == LOST


async def test_a_killed_node_comes_back_with_its_sessions_within_its_lease(patient: NodeDaemon) -> None:
    node, lease = patient, {"lease_s": 30.0, "fence_s": 120.0}
    async with linked(node, **lease) as front:
        made = await front.create()
        assert await output_of(execute(front, made.session_id, "x = 41")) == ""
        await front.reported(lambda report: report.opened or made.session_id in front.sessions)
        node.kill()
    node.start_again()
    async with linked(node, **lease) as front:
        assert front.epoch == 1
        assert await eventually_async(lambda: made.session_id in front.sessions)
        assert await state(front, made.session_id) == ("OK", "")
        assert await output_of(execute(front, made.session_id, "print(x + 1)", "e2")) == "42\n"


async def test_sessions_that_the_front_has_reported_lost_never_come_back(node: NodeDaemon) -> None:
    async with linked(node) as front:
        made = await front.create()
        node.kill()
    node.start_again()
    async with linked(node, lost_epoch=1) as front:
        assert front.epoch == 2
        assert front.reports[0].opened == ()
        assert await eventually_awaited(lambda: is_lost(front, made.session_id))


async def test_a_stopped_node_that_goes_on_ends_what_it_had(node: NodeDaemon) -> None:
    """SIGSTOP takes the daemon out of time for longer than the fence."""
    async with linked(node) as front:
        made = await front.create()
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(5)  # longer than lease and fence: the time that passes is the subject
        node.signal(signal.SIGCONT)
        await front.unlink()
        assert await eventually_async(lambda: "fleet_fenced" in node.log)
        await front.link()
        assert await is_lost(front, made.session_id)


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
