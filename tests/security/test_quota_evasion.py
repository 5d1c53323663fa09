"""A tenant that has used up its quota, and looks for a way around it, through a real daemon."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import admin_service_pb2_grpc as admin_services
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as services
from executor_server.policy.decide import NO_PROFILE_QUOTAS
from executor_server.policy.identity.token_file import TokenFile
from tests.support.backends import require
from tests.support.daemon import Daemon, code_of, daemon_of
from tests.support.polling import eventually

POLICY = """
[profiles.few.quotas]
sessions = 2
calls = 8
output_bytes_per_hour = 10_000
[tenants.few]
profile = "few"
[tenants.printing]
profile = "few"
[tenants.local]
profile = "few"
"""
TIMEOUT_S = 60.0
STREAMS = 200


@dataclass
class Tenant:
    """A tenant's calls over a connection of its own, and what the daemon has counted of it."""

    name: str
    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]
    admin: Any

    def call(self, method: str, request: Any) -> Any:
        stub = services.ExecutorServiceStub(self.channel)
        return getattr(stub, method)(request, metadata=self.metadata, timeout=TIMEOUT_S)

    def create(self, request_id: str = "") -> str:
        request = pb.CreateSessionRequest(request_id=request_id or uuid.uuid4().hex)
        return str(self.call("CreateSession", request).session.session_id)

    def delete(self, session_id: str) -> None:
        self.call("DeleteSession", pb.DeleteSessionRequest(session_id=session_id))

    def sessions(self) -> list[str]:
        return [session.session_id for session in self.call("ListSessions", pb.ListSessionsRequest()).sessions]

    @property
    def usage(self) -> admin_pb.TenantUsage:
        tenants: Sequence[admin_pb.TenantUsage] = self.admin(admin_pb.GetUsageRequest(tenant=self.name)).tenants
        return tenants[0]


@pytest.fixture(scope="module")
def tenant_named() -> Iterator[Callable[[str], Tenant]]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as daemon, ExitStack() as stack:
        names = ("few", "printing", "nobody")
        tokens = {name: TokenFile(daemon.state_dir / "tokens.json").new(name, "test")[1] for name in names}

        def named(name: str) -> Tenant:
            channel = stack.enter_context(_channel(daemon))
            tenant = Tenant(name, channel, _metadata(tokens[name]), _usage_calls(stack, daemon))
            assert eventually(lambda: code_of(tenant.sessions) == "OK")
            return tenant

        yield named


def _channel(daemon: Daemon) -> grpc.Channel:
    return grpc.insecure_channel(daemon.address, options=[("grpc.use_local_subchannel_pool", 1)])


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def _usage_calls(stack: ExitStack, daemon: Daemon) -> Any:
    get_usage = admin_services.AdminServiceStub(stack.enter_context(_channel(daemon))).GetUsage
    return lambda request: get_usage(request, metadata=_metadata(daemon.token), timeout=TIMEOUT_S)


def test_creations_that_are_cancelled_on_their_way_count_until_they_are_deleted(
    tenant_named: Callable[[str], Tenant],
) -> None:
    tenant = tenant_named("few")
    stub: Any = services.ExecutorServiceStub(tenant.channel)
    for number in range(40):
        request = pb.CreateSessionRequest(request_id=f"cancelled-{number}")
        stub.CreateSession.future(request, metadata=tenant.metadata).cancel()
    with pytest.raises(grpc.RpcError):
        for _ in range(3):
            tenant.create()
    assert eventually(lambda: len(tenant.sessions()) == 2)
    assert tenant.usage.sessions == 2
    for session_id in tenant.sessions():
        tenant.delete(session_id)
    assert tenant.usage.sessions == 0


def test_output_of_executions_whose_session_is_deleted_counts(tenant_named: Callable[[str], Tenant]) -> None:
    tenant = tenant_named("printing")
    session_id = tenant.create()
    request = pb.ExecuteRequest(session_id=session_id, execution_id="e", code="print('x' * 20_000)\nwhile True: pass")
    events = tenant.call("Execute", request)
    printed = 0
    while printed < 20_000:
        printed += len(next(events).event.log.text)
    tenant.delete(session_id)
    assert tenant.usage.output_bytes_in_last_hour >= 20_000
    again = tenant.create()
    refused = pb.ExecuteRequest(session_id=again, execution_id="e", code="1")
    assert code_of(lambda: list(tenant.call("Execute", refused))) == "RESOURCE_EXHAUSTED"
    tenant.delete(again)


@pytest.mark.parametrize(("name", "most"), [("few", 8), ("nobody", NO_PROFILE_QUOTAS.calls)])
def test_streams_that_stay_open_are_as_many_as_the_quota_of_calls(
    tenant_named: Callable[[str], Tenant], name: str, most: int
) -> None:
    """A tenant without a profile too: its token holds, so it could fill the daemon with health watches."""
    tenant = tenant_named(name)
    watch = health_pb2_grpc.HealthStub(tenant.channel).Watch
    streams = [watch(health_pb2.HealthCheckRequest(), metadata=tenant.metadata) for _ in range(STREAMS)]
    open_ones = [stream for stream in streams if code_of(partial(next, stream)) == "OK"]
    assert len(open_ones) <= most
    assert tenant.usage.calls <= most
    for stream in streams:
        stream.cancel()
    assert eventually(lambda: tenant.usage.calls == 0)


def test_a_session_deleted_while_it_is_made_leaves_no_room_taken(tenant_named: Callable[[str], Tenant]) -> None:
    tenant = tenant_named("few")

    def make_and_delete() -> None:
        for _ in range(5):
            try:
                session_id = tenant.create("the-same")
            except grpc.RpcError as error:  # two that are being deleted have the room
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                continue
            assert code_of(partial(tenant.delete, session_id)) in ("OK", "NOT_FOUND")

    threads = [threading.Thread(target=make_and_delete) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session_id in tenant.sessions():
        tenant.delete(session_id)
    assert (tenant.usage.sessions, tenant.usage.executions) == (0, 0)


# Sends messages that the handler refuses as fast as they go, on eight streams, until it is ended.
_FLOOD = """
import asyncio, sys, grpc
from executor_api.v1 import executor_service_pb2 as pb, executor_service_pb2_grpc as services
METHOD, REQUEST, ADDRESS, TOKEN = sys.argv[1:]
request, access = getattr(pb, REQUEST)(), (("authorization", f"Bearer {TOKEN}"),)
async def requests():
    while True:
        yield request
async def flood():
    async with grpc.aio.insecure_channel(ADDRESS, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = getattr(services.ExecutorServiceStub(channel), METHOD)
        while True:
            try:
                await call(request if REQUEST.startswith("Cancel") else requests(), metadata=access)
            except grpc.RpcError:
                print("refused", flush=True)
async def main():
    await asyncio.gather(*(flood() for _ in range(8)))
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("method", "request_type"), [("PutFile", "PutFileRequest"), ("CancelExecution", "CancelExecutionRequest")]
)
def test_messages_that_are_refused_hold_up_no_other_tenant(method: str, request_type: str) -> None:
    """Five thousand a second made single calls of others hang for three to ten seconds."""
    require("local")
    with daemon_of("pool.size = 0\n") as daemon, daemon.client_of("neighbour") as neighbour:
        token = daemon.new_token("flooding")
        command = [sys.executable, "-c", _FLOOD, method, request_type, daemon.address, token]
        with neighbour.create_session() as session, subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
            assert flood.stdout is not None
            for _ in range(8):
                assert flood.stdout.readline() == b"refused\n"
            times = []
            for _ in range(20):
                began_s = time.monotonic()
                session.execute("1")
                times.append(time.monotonic() - began_s)
            flood.kill()
    assert max(times) < 3.0
