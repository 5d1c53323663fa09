"""Calls that no gRPC library makes: without their message, or with half of it. They cost no other tenant anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_server.api import answers, auth, calls
from executor_server.policy.identity.token_file import TokenFile
from executor_server.policy.identity.tokens import Tokens
from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.quotas import Capacity, Quotas
from tests.rpc.edge import AUTH, TOKEN, FakeSessions, make_server, refusal, settings
from tests.rpc.raw_http2 import EMPTY_MESSAGE, RawConnection, raw_connection, unfinished_message
from tests.support.polling import eventually_async

GET_POLICY = "/executor_api.v1.ExecutorService/GetPolicy"
LIST_SESSIONS = "/executor_api.v1.ExecutorService/ListSessions"
EXECUTE = "/executor_api.v1.ExecutorService/Execute"
CHECK = "/grpc.health.v1.Health/Check"
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED = 0, 3, 8
HOSTILE = "hostile"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the pause before a refusal to zero."""
    monkeypatch.setattr(calls, "REFUSAL_PAUSE_S", 0.0)


@dataclass
class Daemon:
    """A server with two tenants, of which one is hostile."""

    quotas: Quotas
    path: str
    stub: Any
    hostile_token: str
    sessions: FakeSessions

    @property
    def hostile(self) -> Any:
        """The metadata of the hostile tenant's calls."""
        return (("authorization", f"Bearer {self.hostile_token}"),)

    async def serves_others(self) -> None:
        await self.stub.GetPolicy(pb.GetPolicyRequest(), metadata=AUTH, timeout=120)


@asynccontextmanager
async def serving(directory: Path, *, places: int = 1024, **limits: int) -> AsyncIterator[Daemon]:
    """Starts the server; `limits` are the quotas of the hostile tenant."""
    file = TokenFile(directory / "tokens.json")
    _, secret = file.new(HOSTILE, "n")
    tables = {HOSTILE: QuotasTable.model_validate(limits)}
    quotas = Quotas(lambda tenant: tables.get(tenant, QuotasTable()), capacity=Capacity(places, 64, lambda: True))
    sessions = FakeSessions()
    server = make_server(
        sessions,
        replace(settings(f"unix:{directory}/s"), max_concurrent_calls=places),
        tokens=Tokens(TOKEN, file),
        quotas=quotas,
    )
    (address,) = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Daemon(quotas, f"{directory}/s", pb_grpc.ExecutorServiceStub(channel), secret, sessions)
    finally:
        await server.stop(0)


async def begun(connection: RawConnection, daemon: Daemon, count: int, body: bytes | None, *, ends: bool) -> None:
    for _ in range(count):
        await connection.begin(GET_POLICY, daemon.hostile_token, body, ends=ends)


@pytest.mark.parametrize("method", [GET_POLICY, EXECUTE])
async def test_a_call_that_ends_without_a_message_is_answered_and_keeps_no_place(tmp_path: Path, method: str) -> None:
    """grpc.aio itself answers none of these, and counts each until its connection ends."""
    async with serving(tmp_path, places=4) as daemon, raw_connection(daemon.path) as connection:
        for _ in range(8):
            call = await connection.begin(method, daemon.hostile_token, ends=True)
            await call.ended.wait()
            assert (call.status, call.message) == (INVALID_ARGUMENT, "the call has no message")
        await daemon.serves_others()
        assert daemon.quotas.use_of(HOSTILE).calls == 0


async def test_a_call_whose_message_does_not_come_whole_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "FIRST_MESSAGE_TIME_S", 0.01)
    async with serving(tmp_path) as daemon, raw_connection(daemon.path) as connection:
        call = await connection.begin(GET_POLICY, daemon.hostile_token, unfinished_message(1000), ends=False)
        await call.ended.wait()
        assert call.status == INVALID_ARGUMENT
        assert "not whole within" in call.message
        assert await eventually_async(lambda: daemon.quotas.use_of(HOSTILE).calls == 0)


async def test_calls_without_a_message_count_as_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, calls=2) as daemon, raw_connection(daemon.path) as connection:
        await begun(connection, daemon, 2, unfinished_message(1000), ends=False)
        third = await connection.begin(GET_POLICY, daemon.hostile_token, unfinished_message(1000), ends=False)
        await third.ended.wait()
        assert third.status == RESOURCE_EXHAUSTED


async def test_a_call_with_its_message_is_served(tmp_path: Path) -> None:
    """The raw client itself is right: what it leaves out is all that is wrong with the other calls."""
    async with serving(tmp_path) as daemon, raw_connection(daemon.path) as connection:
        call = await connection.begin(GET_POLICY, daemon.hostile_token, EMPTY_MESSAGE, ends=True)
        await call.ended.wait()
        assert call.status == OK


async def test_large_answers_that_nobody_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stopped reading filled the daemon's memory with its answers, one for each call."""
    monkeypatch.setattr(answers, "MAX_UNSENT_BYTES", 2_000_000)
    async with serving(tmp_path) as daemon:
        for name, tenant in (("hostile", daemon.hostile), ("other", AUTH)):
            await daemon.stub.CreateSession(pb.CreateSessionRequest(request_id=name), metadata=tenant)
        for session in daemon.sessions.sessions.values():
            session.spec = replace(session.spec, authorized_imports=tuple(f"{n:0500}" for n in range(1000)))

        async with raw_connection(daemon.path, reads=False) as unread:
            for _ in range(8):
                await unread.begin(LIST_SESSIONS, daemon.hostile_token, EMPTY_MESSAGE, ends=True)
            assert await eventually_async(lambda: daemon.quotas.use_of(HOSTILE).calls >= 3)
            found = await refusal(daemon.stub.ListSessions(pb.ListSessionsRequest(), metadata=daemon.hostile))
            assert (found.code, found.reason, found.retry_delay_s) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                1.0,
            )
            assert await eventually_async(lambda: daemon.quotas.use_of(HOSTILE).calls == 3)
            await daemon.stub.GetPolicy(pb.GetPolicyRequest(), metadata=daemon.hostile)
            await daemon.stub.ListSessions(pb.ListSessionsRequest(), metadata=AUTH)
        assert await eventually_async(lambda: daemon.quotas.use_of(HOSTILE).calls == 0)
        await daemon.stub.ListSessions(pb.ListSessionsRequest(), metadata=daemon.hostile)


async def test_strangers_probes_do_not_use_up_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The health service's Check is open to all, so no tenant's quota counts it."""
    monkeypatch.setattr(auth, "MAX_PROBES", 2)
    async with serving(tmp_path, places=4) as daemon, raw_connection(daemon.path) as connection:
        for _ in range(2):
            await connection.begin(CHECK, None, unfinished_message(1000), ends=False)
        third = await connection.begin(CHECK, None, unfinished_message(1000), ends=False)
        await third.ended.wait()
        assert third.status == RESOURCE_EXHAUSTED
        await daemon.serves_others()


async def test_a_probe_without_a_message_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "PROBE_MESSAGE_TIME_S", 0.01)
    async with serving(tmp_path) as daemon, raw_connection(daemon.path) as connection:
        calls = [
            await connection.begin(CHECK, None, ends=True),
            await connection.begin(CHECK, None, unfinished_message(1000), ends=False),
        ]
        await asyncio.gather(*(call.ended.wait() for call in calls))
        assert [call.status for call in calls] == [INVALID_ARGUMENT, INVALID_ARGUMENT]


@pytest.mark.parametrize(("body", "ends"), [(None, True), (unfinished_message(1 << 20), False)])
async def test_fifteen_hundred_such_calls_of_one_tenant_leave_the_others_theirs(
    tmp_path: Path, body: bytes | None, ends: bool
) -> None:
    """With no quota set: a tenant without one leaves as many calls free for the others as it has."""
    async with serving(tmp_path) as daemon, AsyncExitStack() as stack:
        for _ in range(10):
            connection = await stack.enter_async_context(raw_connection(daemon.path))
            await begun(connection, daemon, 150, body, ends=ends)
        for _ in range(20):
            await daemon.serves_others()
        assert daemon.quotas.use_of(HOSTILE).calls <= 512
