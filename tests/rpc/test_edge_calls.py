"""A tenant has no more calls open, and makes no more per second, than its quotas allow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc as pb_grpc
from executor_server.api import calls
from executor_server.core.errors import ExecutorError, ResourceExhausted
from executor_server.core.lifecycle.observer import Observer
from executor_server.core.model import Principal
from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.quotas import CALL_RETRY_S, Quotas
from tests.rpc.edge import AUTH, Edge, FakeExecution, FakeSessions, make_server, refusal, settings
from tests.support.polling import eventually_async

TENANT = "local"
_POLICY = pb.GetPolicyRequest()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the pause before a refusal to zero."""
    monkeypatch.setattr(calls, "REFUSAL_PAUSE_S", 0.0)


class Refusals(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def request_refused(self, principal: Principal | None, method: str, error: ExecutorError) -> None:
        assert principal is not None and principal.tenant == TENANT
        self.seen.append((method.rpartition("/")[2], error.reason.value))


class Limited:
    """An edge whose tenant has quotas."""

    def __init__(self, edge: Edge, quotas: Quotas, refusals: Refusals) -> None:
        self.edge = edge
        self.quotas = quotas
        self.refusals = refusals

    def ask(self) -> Any:
        return self.edge.stub.GetPolicy(_POLICY, metadata=AUTH)

    @property
    def open_calls(self) -> int:
        return self.quotas.use_of(TENANT).calls

    async def has_open(self, count: int) -> bool:
        return await eventually_async(lambda: self.open_calls == count)


@asynccontextmanager
async def limited(directory: Path, **limits: int) -> AsyncIterator[Limited]:
    quotas, refusals, sessions = Quotas(lambda _: QuotasTable.model_validate(limits)), Refusals(), FakeSessions()
    server = make_server(sessions, settings(f"unix:{directory}/s"), quotas=quotas, observer=refusals)
    (address,) = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            edge = Edge(server, sessions, address, channel, pb_grpc.ExecutorServiceStub(channel))
            yield Limited(edge, quotas, refusals)
    finally:
        await server.stop(0)


@asynccontextmanager
async def followed(its: Limited, count: int) -> AsyncIterator[Sequence[Any]]:
    """Opens that many streams, which stay open until they are cancelled."""
    edge = its.edge
    session = await edge.session()
    assert await its.has_open(0)
    session.executions["e"] = FakeExecution(stays_open=True)
    request = pb.AttachExecutionRequest(session_id="s1", execution_id="e")
    async with AsyncExitStack() as stack:
        streams = []
        for _ in range(count):
            stream = edge.stub.AttachExecution(request, metadata=AUTH)
            stack.callback(stream.cancel)
            streams.append(stream)
        assert await its.has_open(count)
        yield streams


async def test_a_call_above_the_quota_is_refused_with_a_retry_delay(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=2) as its, followed(its, 2):
        found = await refusal(its.ask())
        assert (found.code.name, found.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert found.retry_delay_s == CALL_RETRY_S
        assert "calls: 2" in found.message
        assert its.refusals.seen == [("GetPolicy", "QUOTA_EXCEEDED")]


async def test_a_refusal_is_sent_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client that asks again at once would be refused thousands of times a second."""
    monkeypatch.setattr(calls, "REFUSAL_PAUSE_S", 0.3)
    async with limited(tmp_path, calls=1) as its, followed(its, 1):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await refusal(its.ask())
        assert loop.time() - began_s >= 0.3


async def test_a_bounded_number_of_refusals_is_held_and_others_are_sent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "REFUSAL_PAUSE_S", 60.0)
    limits = calls.CallLimits(Quotas(lambda _: QuotasTable(calls=1)), max_held=1)

    async def call() -> None:
        await limits.admit(TENANT, "")
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(call()) for _ in range(3)]  # one is open, one is held back
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in done] == [ResourceExhausted]
    for task in pending:
        task.cancel()
    await asyncio.wait(pending)


async def test_a_stream_that_ended_makes_room(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=1) as its, followed(its, 1) as (stream,):
        stream.cancel()
        assert await its.has_open(0)
        await its.ask()


async def test_a_caller_that_sends_no_request_holds_a_call_until_it_goes_away(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=1) as its:
        silent = its.edge.raw("GetPolicy", "stream_unary")(metadata=AUTH)
        assert await its.has_open(1)
        assert (await refusal(its.ask())).reason == "QUOTA_EXCEEDED"
        silent.cancel()
        assert await its.has_open(0)


async def test_a_call_that_fails_is_over(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=1) as its:
        for _ in range(2):
            call = its.edge.stub.GetSession(pb.GetSessionRequest(session_id="none"), metadata=AUTH)
            assert (await refusal(call)).reason == "SESSION_NOT_FOUND"
            assert await its.has_open(0)


async def test_an_upload_is_refused_before_any_of_it_is_read(tmp_path: Path) -> None:
    """With gRPC's blocking client: its asyncio one may replace the status by INTERNAL when a message that it writes
    fails after the status has come (grpc/grpc#36066)."""
    async with limited(tmp_path, calls=1) as its, followed(its, 1):

        def endless() -> Iterator[pb.PutFileRequest]:
            while True:
                yield pb.PutFileRequest(data=bytes(100_000))

        with grpc.insecure_channel(its.edge.address) as channel:
            put_file = pb_grpc.ExecutorServiceStub(channel).PutFile
            refused = await refusal(asyncio.to_thread(put_file, endless(), metadata=AUTH))
        assert refused.reason == "QUOTA_EXCEEDED"


async def test_methods_that_do_not_exist_count_too(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=1) as its, followed(its, 1):
        assert (await refusal(its.edge.raw("Secret")(b"", metadata=AUTH))).reason == "QUOTA_EXCEEDED"


async def test_calls_above_the_rate_wait_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BURST_S", 0.0)
    async with limited(tmp_path, calls_per_second=20) as its:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.gather(*(its.ask() for _ in range(5)))
        assert loop.time() - began_s >= 4 / 20
        assert its.refusals.seen == []


async def test_what_was_not_used_in_the_last_second_may_be_used_at_once(tmp_path: Path) -> None:
    async with limited(tmp_path, calls_per_second=1) as its:
        await its.ask()
        waiting = asyncio.ensure_future(its.ask())
        assert await its.has_open(1)
        waiting.cancel()


async def test_so_many_calls_wait_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_WAITING_CALLS", 2)
    async with limited(tmp_path, calls_per_second=1) as its:
        await its.ask()
        waiting = [asyncio.ensure_future(its.ask()) for _ in range(2)]
        assert await its.has_open(2)
        found = await refusal(its.ask())
        assert found.reason == "QUOTA_EXCEEDED"
        assert found.retry_delay_s is not None and 1 < found.retry_delay_s <= 3
        for call in waiting:
            call.cancel()
        assert await its.has_open(0)


async def test_no_call_waits_longer_than_it_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_WAIT_S", 0.5)
    async with limited(tmp_path, calls_per_second=1) as its:
        await its.ask()
        assert (await refusal(its.ask())).reason == "QUOTA_EXCEEDED"


async def test_waiting_calls_are_open_calls(tmp_path: Path) -> None:
    async with limited(tmp_path, calls=2, calls_per_second=1) as its:
        await its.ask()
        waiting = [asyncio.ensure_future(its.ask()) for _ in range(2)]
        assert await its.has_open(2)
        assert "quota calls:" in (await refusal(its.ask())).message
        for call in waiting:
            call.cancel()


def test_tenants_that_have_stopped_calling_are_forgotten() -> None:
    limits = calls.CallLimits(Quotas(lambda _: QuotasTable()), max_held=0)
    for number in range(100):
        limits._pace_of(f"t{number}", 1000.0).next_s = 1000.0
    limits._pace_of("new", 1002.0)
    assert list(limits._paces) == ["new"]


async def test_a_tenant_at_its_quota_still_renews_its_leases(tmp_path: Path) -> None:
    """Otherwise the daemon would take its client for dead and end its sessions."""
    renew = pb.RenewLeaseRequest(lease_id="a" * 32)
    async with limited(tmp_path, calls=1, calls_per_second=1) as its, followed(its, 1):
        for _ in range(20):
            await its.edge.stub.RenewLease(renew, metadata=AUTH)
        assert (await refusal(its.ask())).reason == "QUOTA_EXCEEDED"


async def test_renewals_beyond_the_quota_are_bounded() -> None:
    limits = calls.CallLimits(Quotas(lambda _: QuotasTable(calls=1)), max_held=0)
    (method,) = [each for each in calls._LEASE_METHODS if each.endswith("RenewLease")]

    async def call() -> None:
        await limits.admit(TENANT, method)
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(call()) for _ in range(calls.LEASE_CALLS + 5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(task.done() for task in tasks) == 4, "one of the quota, and those beyond it"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
