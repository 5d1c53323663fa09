"""A node's listener for its front: who may call there, for whom, and how a link lives and ends."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_grpc
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_api.v1 import fleet_service_pb2 as fleet_pb
from executor_api.v1 import fleet_service_pb2_grpc as fleet_grpc
from executor_server.api.auth import current_principal
from executor_server.api.server import ServerSettings
from executor_server.core import PreconditionFailed, Principal, Reason, TcpAddress
from executor_server.core.addresses import parse
from executor_server.fleet.api import node_link, wire
from executor_server.fleet.api.node_link import FleetService
from executor_server.fleet.api.node_server import FrontServices, NodeServer
from executor_server.fleet.api.wire import MAX_PRINCIPAL_BYTES, PRINCIPAL_KEY, Caller, caller_from
from executor_server.fleet.membership import (
    Control,
    FrontHello,
    NodeHello,
    NodeReport,
    Renewal,
    issue_front,
    issue_node,
    read_credentials,
)
from tests.rpc.edge import refused
from tests.support.fake_front import INSTANCE, LOCAL, FakeFront, control_of, hello_of, metadata_of
from tests.support.polling import eventually_async

NODE = "n1"
DENIED = ("UNAUTHENTICATED", "UNAUTHENTICATED")
LIST = pb.ListSessionsRequest()


@dataclass
class FakeNode:
    """Says hello and reports; records what it gets."""

    hellos: list[FrontHello] = field(default_factory=list)
    renewals: list[Renewal] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    fulls: list[bool] = field(default_factory=list)
    refuses: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.ended.set()

    async def hello(self, hello: FrontHello) -> NodeHello:
        if self.refuses:
            raise PreconditionFailed(Reason.NODE_REFUSED, "another front holds this node")
        self.hellos.append(hello)
        await self.ended.wait()
        return NodeHello(NODE, 1, "i")

    def report(self, *, full: bool) -> NodeReport:
        self.fulls.append(full)
        return NodeReport(sequence=len(self.fulls), epoch=1, max_sessions=4, full=full)

    def renewed(self, renewal: Renewal) -> None:
        self.renewals.append(renewal)

    async def take_control(self, control: Control) -> None:
        self.controls.append(control)


@dataclass
class Service(pb_grpc.ExecutorServiceServicer):
    """Records who calls; executions last until their callers leave."""

    callers: list[Principal] = field(default_factory=list)

    async def ListSessions(self, request: Any, context: Any) -> pb.ListSessionsResponse:
        self.callers.append(current_principal.get())
        return pb.ListSessionsResponse()

    async def Execute(self, request: pb.ExecuteRequest, context: Any) -> None:
        while True:
            await context.write(pb.ExecuteResponse())
            await asyncio.sleep(3600)


class Admin(admin_grpc.AdminServiceServicer):
    async def GetUsage(self, request: Any, context: Any) -> admin_pb.GetUsageResponse:
        return admin_pb.GetUsageResponse()


@dataclass
class Served:
    address: str
    directory: Path
    node: FakeNode
    service: Service
    obeyed: list[str]
    fronts: list[FakeFront] = field(default_factory=list)

    def front(self, hello: FrontHello | None = None, folder: Path | None = None) -> FakeFront:
        front = FakeFront(folder or self.directory / "front", self.address, NODE, hello)
        self.fronts.append(front)
        return front

    async def linked(self, **hello: Any) -> FakeFront:
        front = self.front(hello_of(**hello))
        await front.link()
        return front


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Served]:
    issue_front(directory)
    folder = issue_node(directory, NODE).folder
    node, service, obeyed = FakeNode(), Service(), [INSTANCE]
    settings = ServerSettings(
        listen=(parse("127.0.0.1:1"),),
        tls=None,
        max_concurrent_calls=16,
    )
    server = NodeServer(
        TcpAddress("127.0.0.1", 0),
        folder,
        FrontServices(FleetService(node), service, Admin()),
        settings,
        lambda _method, _error: None,
        lambda: obeyed[-1],
    )
    address = server.bind()
    await server.start()
    served = Served(str(address), directory, node, service, obeyed)
    try:
        yield served
    finally:
        for front in served.fronts:
            await front.close()
        await server.stop(0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as running:
        yield running


# -- callers


async def test_a_call_is_made_for_the_principal_that_the_front_names(served: Served) -> None:
    front, caller = served.front(), Principal("acme", "token:ci:x", is_admin=False)
    await front.service.ListSessions(LIST, metadata=metadata_of(caller))
    assert served.service.callers == [caller]


async def test_admin_calls_are_for_admins_here_too(served: Served) -> None:
    front = served.front()
    await front.admin.GetUsage(admin_pb.GetUsageRequest(), metadata=metadata_of(LOCAL))
    call = front.admin.GetUsage(admin_pb.GetUsageRequest(), metadata=metadata_of(replace(LOCAL, is_admin=False)))
    assert await refused(call) == ("PERMISSION_DENIED", "ROLE_MISSING")


GOOD = {"tenant": "acme", "name": "x", "is_admin": False, "roles": ["approver"], "front": "i1"}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 3000,
        json.dumps({**GOOD, "more": 1}).encode(),
        json.dumps({"tenant": "acme", "name": "x", "is_admin": False}).encode(),
        json.dumps({**GOOD, "roles": ["approver", 1]}).encode(),
        json.dumps({**GOOD, "roles": "approver"}).encode(),
        json.dumps({**GOOD, "front": 1}).encode(),
        json.dumps({**GOOD, "tenant": ""}).encode(),
        json.dumps({**GOOD, "tenant": "a b"}).encode(),
        json.dumps({**GOOD, "tenant": 1}).encode(),
        json.dumps({**GOOD, "name": ""}).encode(),
        json.dumps({**GOOD, "name": "x\x1b"}).encode(),
        json.dumps({**GOOD, "name": "x" * 257}).encode(),
        json.dumps({**GOOD, "is_admin": 1}).encode(),
        json.dumps({**GOOD, "is_admin": "true"}).encode(),
        json.dumps(GOOD).encode() + b" " * MAX_PRINCIPAL_BYTES,
        json.dumps(GOOD),
    ],
)
def test_a_principal_of_another_form_is_none(value: bytes | str) -> None:
    assert caller_from(json.dumps(GOOD).encode()) == Caller(Principal("acme", "x", roles=("approver",)), "i1")
    assert caller_from(value) is None


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((PRINCIPAL_KEY, b"{}"),),
        (*metadata_of(LOCAL), *metadata_of(LOCAL)),
        (*metadata_of(LOCAL), ("authorization", "Bearer x")),
        (("authorization", "Bearer x"),),
    ],
    ids=["none", "malformed", "two", "with a token", "a token"],
)
async def test_a_call_without_exactly_one_principal_is_denied(served: Served, metadata: Any) -> None:
    assert await refused(served.front().service.ListSessions(LIST, metadata=metadata)) == DENIED


async def test_a_front_that_the_node_does_not_obey_is_denied(served: Served) -> None:
    """It may not know which sessions were reported lost."""
    front = served.front()
    assert await refused(front.service.ListSessions(LIST, metadata=metadata_of(LOCAL, "i0"))) == DENIED
    running = front.service.Execute(pb.ExecuteRequest(), metadata=metadata_of(LOCAL))
    await anext(aiter(running))
    served.obeyed.append("i2")
    assert await refused(running) == DENIED
    await front.service.ListSessions(LIST, metadata=metadata_of(LOCAL, "i2"))


async def test_a_node_cant_call_a_node(served: Served) -> None:
    """Its certificate is of the same authority, but for servers only: the handshake fails."""
    other = read_credentials(issue_node(served.directory, "n2").folder, "node")
    channel = grpc.aio.secure_channel(
        served.address,
        grpc.ssl_channel_credentials(other.authority, other.key, other.certificate),
        options=(("grpc.ssl_target_name_override", f"{NODE}.node.fleet.internal"),),
    )
    stub: Any = pb_grpc.ExecutorServiceStub(channel)
    assert (await refused(stub.ListSessions(LIST, metadata=metadata_of(LOCAL))))[0] == "UNAVAILABLE"
    await channel.close(None)


async def test_a_client_without_a_certificate_cant_call(served: Served) -> None:
    credentials = read_credentials(served.directory / "front", "front")
    channel = grpc.aio.secure_channel(
        served.address,
        grpc.ssl_channel_credentials(credentials.authority),
        options=(("grpc.ssl_target_name_override", f"{NODE}.node.fleet.internal"),),
    )
    stub: Any = pb_grpc.ExecutorServiceStub(channel)
    assert (await refused(stub.ListSessions(LIST, metadata=metadata_of(LOCAL))))[0] == "UNAVAILABLE"
    await channel.close(None)


async def test_health_and_reflection_are_not_served(served: Served) -> None:
    front = served.front()
    check = front.channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
    assert (await refused(check(b"")))[0] == "UNIMPLEMENTED"


async def test_a_renewed_certificate_is_shown_without_a_restart(served: Served) -> None:
    before = await _shown_certificate(served)
    issue_node(served.directory, NODE, days=20)
    assert await _shown_certificate(served) != before


async def _shown_certificate(served: Served) -> bytes:
    folder = served.directory / "front"
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    host, port = served.address.split(":")
    name = f"{NODE}.node.fleet.internal"
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    assert isinstance(shown, bytes)
    return shown


# -- links


async def test_a_link_reports_in_full_once_and_passes_answers_on(served: Served) -> None:
    front = await served.linked()
    await eventually_async(lambda: len(served.node.renewals) > 2)
    assert served.node.fulls[:3] == [True, False, False]
    assert [renewal.sequence for renewal in served.node.renewals[:3]] == [1, 2, 3]
    assert served.node.hellos == [front.hello]


async def test_a_control_is_taken_and_reported_at_once(served: Served) -> None:
    front = await served.linked(report_interval_s=1.0)
    seen = len(front.reports)
    await front.send(control_of(policy=b"x = 1"))
    assert await eventually_async(lambda: served.node.controls and len(front.reports) > seen)
    assert served.node.controls == [control_of(policy=b"x = 1")]


async def test_a_refused_hello_ends_the_link_with_its_reason(served: Served) -> None:
    served.node.refuses = True
    front = served.front()
    with pytest.raises(grpc.aio.AioRpcError, match="another front holds this node") as error:
        await front.link()
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_refused_hello_leaves_the_present_link_alone(served: Served) -> None:
    front = await served.linked()
    served.node.refuses = True
    with pytest.raises(grpc.aio.AioRpcError):
        await served.front().link()
    seen = len(served.node.renewals)
    assert await eventually_async(lambda: len(served.node.renewals) > seen + 2)
    assert front.reports


async def test_a_second_link_takes_the_place_of_the_first(served: Served) -> None:
    first = await served.linked()
    second = await served.linked()
    code, details = await first.end_of_link()
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "the front has opened another link")
    assert await eventually_async(lambda: second.reports)
    assert second.reports[0].full


async def test_the_hello_waits_until_lost_sessions_have_ended(served: Served) -> None:
    served.node.ended.clear()
    linking = asyncio.create_task(served.linked())
    assert await eventually_async(lambda: served.node.hellos)
    assert not linking.done()
    served.node.ended.set()
    await linking


async def test_a_front_that_says_nothing_loses_its_link(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "HELLO_TIME_S", 0.05)
    call = fleet_grpc.FleetServiceStub(served.front().channel).Link()
    assert await refused(call) == ("INVALID_ARGUMENT", "INVALID_FIELD")


@pytest.mark.parametrize(
    "message",
    [
        wire.request_to(Renewal(1)),
        fleet_pb.LinkRequest(),
        fleet_pb.LinkRequest(hello=fleet_pb.FrontHello(front_id="front")),
    ],
    ids=["a renewal first", "nothing", "a hello without times"],
)
async def test_a_link_that_begins_wrongly_is_refused(served: Served, message: fleet_pb.LinkRequest) -> None:
    call: Any = fleet_grpc.FleetServiceStub(served.front().channel).Link()
    await call.write(message)
    assert await refused(call) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_a_wrong_message_ends_the_link(served: Served) -> None:
    front = await served.linked()
    await front.send(front.hello)
    assert (await front.end_of_link())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_node_goes_on_to_report_to_a_front_that_does_not_answer(served: Served) -> None:
    front = served.front(hello_of())
    front.renews = False
    await front.link()
    assert await eventually_async(lambda: len(front.reports) > 3)
    assert served.node.renewals == []
