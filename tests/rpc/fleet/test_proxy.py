"""Claims about a front that passes calls for sessions on to their nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as service_pb
from tests.rpc.edge import refused
from tests.rpc.fleet.conftest import Fleet
from tests.support.polling import eventually_async


async def test_clients_of_a_proxy_never_see_a_nodes_address(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha", address="127.0.0.1:7001"), proxy=True)
    session = await front.create()
    keep = service_pb.KeepAliveRequest(session_id=session.session_id)
    kept = (await front.service.KeepAlive(keep, metadata=front.auth)).session
    got = await front.get(session.session_id)
    listed = (await front.service.ListSessions(service_pb.ListSessionsRequest(), metadata=front.auth)).sessions
    assert [each.address for each in (session, kept, got, *listed)] == ["", "", "", ""]
    assert kept.session_id == session.session_id


async def test_a_stream_of_events_passes_whole_and_in_order(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"), proxy=True)
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="1000")
    numbers = [answer.event.number async for answer in front.service.Execute(request, metadata=front.auth)]
    assert numbers == list(range(1, 1001))


async def test_a_client_that_leaves_ends_the_nodes_call(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node, proxy=True)
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
    front = await fleet.front(node, proxy=True)
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
    front = await fleet.front(await fleet.node("alpha"), proxy=True)
    session = await front.create()

    async def pieces() -> AsyncIterator[service_pb.PutFileRequest]:
        header = service_pb.PutFileHeader(session_id=session.session_id, path="a", size_bytes=3_000_000)
        yield service_pb.PutFileRequest(header=header)
        for _ in range(30):
            yield service_pb.PutFileRequest(data=b"x" * 100_000)

    answer = await front.service.PutFile(pieces(), metadata=front.auth)
    assert (answer.file.path, answer.file.size_bytes) == ("a", 3_000_000)


async def test_a_refusal_of_the_node_reaches_the_client_as_it_is(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node, proxy=True)
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
    front = await fleet.front(node, proxy=True)
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="forever")
    call = front.service.Execute(request, metadata=front.auth, timeout=0.3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await node.changed.wait()


async def test_another_tenants_session_is_not_found(fleet: Fleet) -> None:
    front = await fleet.front(await fleet.node("alpha"), proxy=True, tenants=["acme", "other"])
    session = await front.create(tenant="acme")
    keep = service_pb.KeepAliveRequest(session_id=session.session_id)
    call = front.service.KeepAlive(keep, metadata=front.metadata("other"))
    assert await refused(call) == ("NOT_FOUND", "SESSION_NOT_FOUND")


async def test_hostile_messages_end_at_the_front(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node, proxy=True)
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
    unknown = raw.unary_unary(path + "KeepAlive")(b"", metadata=(("authorization", "Bearer x"),))
    assert await refused(unknown) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert len(node.calls) == calls


async def test_a_node_whose_connection_breaks_is_unavailable_until_it_comes_back(fleet: Fleet) -> None:
    node = await fleet.node("alpha")
    front = await fleet.front(node, proxy=True)
    session = await front.create()
    request = service_pb.ExecuteRequest(session_id=session.session_id, execution_id="e1", code="forever")
    call = front.service.Execute(request, metadata=front.auth)
    node.reports = False  # the front closes a link over which nothing comes, with the calls beside it
    assert await refused(call) == ("UNAVAILABLE", "NODE_FENCED")
    assert await eventually_async(node.changed.is_set)


async def _each(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
