"""Nobody gets anywhere without the token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor_api.v1 import executor_service_pb2 as pb
from tests.rpc.edge import AUTH, TOKEN, Edge, refused, serving

DENIED = ("UNAUTHENTICATED", "UNAUTHENTICATED")
METHODS = pb.DESCRIPTOR.services_by_name["ExecutorService"].methods


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with serving(tmp_path) as edge:
        yield edge


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer " + "x" * 43),),
        (("authorization", "Bearer " + TOKEN[:-1]),),
        (("authorization", "Bearer " + TOKEN + "t"),),
        (("authorization", "Basic " + TOKEN),),
        (("authorization", TOKEN),),
        (("authorization", "Bearer  " + TOKEN),),
        (("authorization", "Bearer " + TOKEN), ("authorization", "Bearer " + TOKEN)),
        (("x-authorization", "Bearer " + TOKEN),),
    ],
)
async def test_a_call_without_the_token_is_denied(edge: Edge, metadata: Any) -> None:
    assert await refused(edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=metadata)) == DENIED


@pytest.mark.parametrize("method", [method.name for method in METHODS])
async def test_every_method_denies_strangers_before_it_reads_what_they_send(edge: Edge, method: str) -> None:
    assert await refused(edge.raw(method, "stream_stream")()) == DENIED


async def test_a_stranger_does_not_learn_which_methods_exist(edge: Edge) -> None:
    call = edge.raw("Secret")
    assert await refused(call(b"")) == DENIED
    assert (await refused(call(b"", metadata=AUTH)))[0] == "UNIMPLEMENTED"


async def test_the_scheme_may_be_written_in_any_case(edge: Edge) -> None:
    await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=(("authorization", f"bearer {TOKEN}"),))


async def test_a_probe_needs_no_token_and_sees_the_daemon_going(edge: Edge) -> None:
    health: Any = health_pb2_grpc.HealthStub(edge.channel)
    request = health_pb2.HealthCheckRequest(service="executor_api.v1.ExecutorService")
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    await edge.server.announce_end()
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await refused(health.Watch(request)) == DENIED


async def test_reflection_lists_the_services_to_those_who_have_the_token(edge: Edge) -> None:
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(edge.channel)
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    assert await refused(reflection.ServerReflectionInfo(requests)) == DENIED
    async for answer in reflection.ServerReflectionInfo(requests, metadata=AUTH):
        names = {service.name for service in answer.list_services_response.service}
    assert "executor_api.v1.ExecutorService" in names


async def test_oversized_metadata_does_not_reach_us(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await edge.stub.GetPolicy(pb.GetPolicyRequest(), metadata=(*AUTH, ("x", "y" * 65_536)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
