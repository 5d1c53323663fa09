"""Claims about a front that passes calls for sessions on to their nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.fleet.membership import NodeReport, TenantUse
from tests.rpc.edge import refused
from tests.rpc.fleet.conftest import Fleet
from tests.support.polling import eventually_async, eventually_awaited


async def test_a_stream_of_events_passes_whole_and_in_order(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="1000")
    numbers = [answer.event.number async for answer in front.service.Execute(request, metadata=front.auth)]
    assert numbers == list(range(1, 1001))


async def test_a_client_that_leaves_ends_the_nodes_call(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="forever")
    call = front.service.Execute(request, metadata=front.auth)
    await call.read()
    call.cancel()
    await node.changed.wait()
    assert node.calls[-1][0] == "Execute ended"


async def test_a_client_that_does_not_read_holds_its_node_back(fleet: Fleet) -> None:
    """Else the front would take a stream's events into memory without end."""
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    session = await front.create()

    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="100000")
    call = front.service.Execute(request, metadata=front.auth)
    first = await call.read()
    assert first.event.number == 1
    # 100 MB would be through by now if nothing held them back; every other call still passes.
    for number in range(20):
        await front.create(f"other{number}")
    assert not node.changed.is_set()
    call.cancel()
    await node.changed.wait()


async def test_an_upload_passes_with_its_answer(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    session = await front.create()

    async def pieces() -> AsyncIterator[service_pb.PutFileRequest]:
        header = service_pb.PutFileHeader(session_id=session.session_id, path="a", size_bytes=3_000_000)
        yield service_pb.PutFileRequest(header=header)
        for _ in range(30):
            yield service_pb.PutFileRequest(data=b"x" * 100_000)

    answer = await front.service.PutFile(pieces(), metadata=front.auth)
    assert (answer.file.path, answer.file.size_bytes) == ("a", 3_000_000)


def _to_port(session_id: str, port: int = 8000) -> service_pb.ForwardPortRequest:
    return service_pb.ForwardPortRequest(open=service_pb.OpenPort(session_id=session_id, port=port))


async def test_a_connection_to_a_port_passes_both_ways_at_once(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    session = await front.create()
    call = front.service.ForwardPort(metadata=front.auth)
    await call.write(_to_port(session.session_id))
    assert (await call.read()).WhichOneof("part") == "opened"
    for number in range(20):
        data = bytes([number]) * 50_000
        await call.write(service_pb.ForwardPortRequest(data=data))
        assert (await call.read()).data == data
    await call.done_writing()
    assert (await call.read()).WhichOneof("part") == "shutdown"
    assert await call.code() is grpc.StatusCode.OK


async def test_the_end_of_a_connection_to_a_port_reaches_the_other_side(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    session = await front.create()
    ended = front.service.ForwardPort(metadata=front.auth)
    await ended.write(_to_port(session.session_id, port=2))
    assert (await ended.read()).WhichOneof("part") == "opened"
    assert await ended.code() is grpc.StatusCode.OK  # though the client has not ended its own stream

    node.changed.clear()
    left = front.service.ForwardPort(metadata=front.auth)
    await left.write(_to_port(session.session_id))
    await left.read()
    left.cancel()
    await node.changed.wait()
    assert node.calls[-1][0] == "ForwardPort ended"


async def test_a_port_that_the_node_refuses_is_refused_with_its_reason(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    session = await front.create()
    call = front.service.ForwardPort(metadata=front.auth)
    await call.write(_to_port(session.session_id, port=1))
    assert await refused(call) == ("FAILED_PRECONDITION", "PORT_CLOSED")


async def test_a_watch_passes(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"))
    session = await front.create()
    watch = service_pb.WatchFilesRequest(session_id=session.session_id, path="a")
    answers = [answer async for answer in front.service.WatchFiles(watch, metadata=front.auth)]
    assert [change.path for answer in answers for change in answer.changes] == ["a"]


async def test_a_call_that_an_older_node_does_not_know_is_refused_for_good(fleet: Fleet) -> None:
    """A client that reads of a delay tries again, and would do so for ever."""
    front = await fleet.front(await fleet.node("alpha"))
    session = await front.create()
    resize = service_pb.ResizeProcessRequest(session_id=session.session_id, process_id="p1")
    call = front.service.ResizeProcess(resize, metadata=front.auth)
    assert await refused(call) == ("FAILED_PRECONDITION", "NODE_REFUSED")


async def test_a_refusal_of_the_node_reaches_the_client_as_it_is(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    session = await front.create()
    node.end(session.session_id)
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="1")
    call = front.service.Execute(request, metadata=front.auth)
    assert await refused(call) == ("NOT_FOUND", "SESSION_NOT_FOUND")

    async def pieces() -> AsyncIterator[service_pb.PutFileRequest]:
        yield service_pb.PutFileRequest(header=service_pb.PutFileHeader(session_id=session.session_id, path="a"))
        await asyncio.Event().wait()  # the node refuses before the upload ends

    upload = front.service.PutFile(pieces(), metadata=front.auth)
    assert await refused(upload) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_a_deadline_is_the_nodes_too(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="forever")
    call = front.service.Execute(request, metadata=front.auth, timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await node.changed.wait()


async def test_another_tenants_session_is_not_found(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"), tenants=["acme", "other"])
    session = await front.create(tenant="acme")
    keep = service_pb.KeepAliveRequest(session_id=session.session_id)
    call = front.service.KeepAlive(keep, metadata=front.metadata("other"))
    assert await refused(call) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_hostile_messages_end_at_the_front(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node)
    calls = len(node.calls)
    path = "/executor_api.v1.ExecutorService/"
    raw: Any = front.channel
    for method, message in (("KeepAlive", b"\xff\xff"), ("KeepAlive", b"\x0a\x02\xff\xfe"), ("SetVariables", b"")):
        call = raw.unary_unary(path + method)(message, metadata=front.auth)
        assert await refused(call) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    upload = raw.stream_unary(path + "PutFile")(_each(b"\x12\x01x"), metadata=front.auth)
    assert await refused(upload) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert await refused(raw.stream_unary(path + "PutFile")(_each(), metadata=front.auth)) == (
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
    )
    for messages in ((), (b"\x12\x01x",), (b"\xff",)):
        port = raw.stream_stream(path + "ForwardPort")(_each(*messages), metadata=front.auth)
        assert await refused(port) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    unknown = raw.unary_unary(path + "KeepAlive")(b"", metadata=(("authorization", "Bearer x"),))
    assert await refused(unknown) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert len(node.calls) == calls


async def test_a_node_whose_connection_breaks_is_unavailable_until_it_comes_back(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node, lease_s=2.0)
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="forever")
    call = front.service.Execute(request, metadata=front.auth)
    node.reports = False  # the front closes a link over which nothing comes, with the calls beside it
    assert await refused(call) == ("UNAVAILABLE", "NODE_FENCED")
    assert await eventually_async(node.changed.is_set)


async def _each(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def test_no_code_starts_after_the_cpu_time_that_nodes_have_used_together(fleet: Fleet) -> None:
    """Each node knows its own part only, and the front checked nothing but executions."""

    def half(report: NodeReport) -> NodeReport:
        return replace(report, tenants={"local": TenantUse(cpu_time_s=5.0)})

    policy = 'default = "default"\n[profiles.default.quotas]\ncpu_time_s_per_hour = 10\n'
    alpha = await fleet.node("alpha")
    front = await fleet.front(alpha, await fleet.node("beta", report=half), policy=policy)
    session_id = (await front.create("r1", prelude="1")).session_id
    alpha.report = half
    set_variables = service_pb.SetVariablesRequest(session_id=session_id)
    start = service_pb.StartProcessRequest(session_id=session_id, process_id="p1", argv=["true"])
    shipped = pb.ToolSpec(name="t", shipped=pb.ShippedTool())
    register = service_pb.RegisterToolsRequest(session_id=session_id, tools=[shipped])
    create = service_pb.CreateSessionRequest(request_id="r2", prelude="1")
    spent = ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")

    async def is_spent() -> bool:
        return await refused(front.service.SetVariables(set_variables, metadata=front.auth)) == spent

    assert await eventually_awaited(is_spent)
    assert await refused(front.service.StartProcess(start, metadata=front.auth).read()) == spent
    assert await refused(front.service.RegisterTools(register, metadata=front.auth)) == spent
    assert await refused(front.service.CreateSession(create, metadata=front.auth)) == spent
    assert (await front.create("r3")).session_id
