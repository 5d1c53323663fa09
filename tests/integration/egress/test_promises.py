"""The egress service keeps its promises to sessions (executor_server/network/egress/interface.py)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from executor_server.core.network import NO_NETWORK_USE, NetworkRules, NetworkUsage
from executor_server.guest.egress import reasons
from executor_server.network.egress import Egress, EgressError
from tests.support.egress_service import SOON_S, RecordingSink, egress_service, settings_for
from tests.support.internet.world import RAW_PORT, Internet

KIB = 1024
# Bytes by which a bound may be passed.
OVERRUN_BYTES = 256 * KIB


class Transfer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._received = 0

    async def receive(self) -> int:
        try:
            while True:
                async with asyncio.timeout(0.5):
                    data = await self._reader.read(64 * KIB)
                if not data:
                    return self._received
                self._received += len(data)
        except (TimeoutError, ConnectionError):
            return self._received

    def close(self) -> None:
        self._writer.close()


class Programs:
    def __init__(self, session_id: str, address: tuple[str, int], transfers: list[Transfer]) -> None:
        self.session_id, self._address, self._transfers = session_id, address, transfers

    async def transfer(self, host: str, size_bytes: int) -> Transfer | None:
        reader, writer = await asyncio.open_connection(*self._address)
        self._transfers.append(Transfer(reader, writer))
        writer.write(f"CONNECT {host}:{RAW_PORT} HTTP/1.1\r\nHost: {host}:{RAW_PORT}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head:
            return None
        writer.write(f"source {size_bytes}\n".encode())
        return self._transfers[-1]


class Bench:
    def __init__(self, egress: Egress, internet: Internet) -> None:
        self.egress = egress
        self.transfers: list[Transfer] = []
        self.hosts = (internet.name("raw"), internet.name("raw"))

    def rules(self, *hosts: str) -> NetworkRules:
        return NetworkRules(tuple(f"{host}:{RAW_PORT}" for host in hosts))

    def programs(self, session_id: str, listener: socket.socket) -> Programs:
        return Programs(session_id, listener.getsockname(), self.transfers)

    def refused_rules(self) -> NetworkRules:
        return self.rules(*(f"n{number}.example" for number in range(400_000)))

    def close(self) -> None:
        for transfer in self.transfers:
            transfer.close()


@pytest.fixture
async def bench(internet: Internet) -> AsyncIterator[Bench]:
    async with egress_service(settings_for(internet)) as service:
        made = Bench(service, internet)
        yield made
        made.close()


@asynccontextmanager
async def bound(
    bench: Bench, *hosts: str, used: NetworkUsage = NO_NETWORK_USE, total_bytes: int | None = None
) -> AsyncIterator[tuple[Programs, RecordingSink]]:
    """A session that may reach these hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sink, given = RecordingSink(), listener.dup()
        await bench.egress.bind("s", bench.rules(*hosts), given, sink, used, total_bytes)
        yield bench.programs("s", listener), sink
        await bench.egress.release("s")


# -- the promises


async def test_everything_was_reported_when_a_session_is_settled(bench: Bench) -> None:
    one, _ = bench.hosts
    async with bound(bench, one) as (programs, sink):
        transfer = await programs.transfer(one, 100_000)
        assert transfer is not None
        assert await transfer.receive() == 100_000
        await bench.egress.settle("s")
        assert sink.received_bytes >= 100_000
        assert len(sink.opened) == 1
        transfer.close()


async def test_everything_was_reported_when_a_session_is_released_and_its_listener_is_closed(bench: Bench) -> None:
    one, _ = bench.hosts
    async with bound(bench, one) as (programs, sink):
        transfer = await programs.transfer(one, 100_000)
        assert transfer is not None
        await transfer.receive()
        await bench.egress.release("s")
        assert sink.received_bytes >= 100_000
        assert [each.reason for each in sink.closed] == [reasons.SESSION_ENDED]
        await bench.egress.release("s")
        assert len(sink.closed) == 1


async def test_a_bound_holds_bytes_up_and_closes_nothing(bench: Bench) -> None:
    one, _ = bench.hosts
    used = NetworkUsage(1, 0, 100 * KIB, 100 * KIB)
    async with bound(bench, one, used=used, total_bytes=1200 * KIB) as (programs, sink):
        transfer = await programs.transfer(one, 8000 * KIB)
        assert transfer is not None
        first = await transfer.receive()
        assert first <= 1000 * KIB + OVERRUN_BYTES
        await bench.egress.settle("s")
        assert not sink.closed
        assert sink.received_bytes >= 1000 * KIB - KIB, "the bound is reached"
        bench.egress.allow("s", 3200 * KIB)
        second = await transfer.receive()
        assert 3000 * KIB - KIB <= second <= 3000 * KIB + OVERRUN_BYTES
        bench.egress.allow("s", None)
        async with asyncio.timeout(SOON_S):
            while await transfer.receive() < 8000 * KIB:
                pass


async def test_an_exhausted_session_is_closed_and_refused_for_the_reason_until_it_is_not(bench: Bench) -> None:
    one, _ = bench.hosts
    async with bound(bench, one) as (programs, sink):
        transfer = await programs.transfer(one, 1000)
        assert transfer is not None
        await transfer.receive()
        bench.egress.exhaust("s", reasons.TENANT_QUOTA)
        await sink.until(lambda: sink.closed)
        assert sink.closed[0].reason == reasons.TENANT_QUOTA
        assert await programs.transfer(one, 1000) is None
        assert sink.denied[0].reason == reasons.TENANT_QUOTA
        bench.egress.exhaust("s", None)
        assert await programs.transfer(one, 1000) is not None


async def test_other_rules_close_what_they_do_not_allow(bench: Bench) -> None:
    one, two = bench.hosts
    async with bound(bench, one, two) as (programs, sink):
        transfers = [await programs.transfer(host, 1000) for host in bench.hosts]
        assert None not in transfers
        bench.egress.change("s", bench.rules(two))
        await sink.until(lambda: sink.closed)
        assert [(each.host, each.reason) for each in sink.closed] == [(one, reasons.RULE_GONE)]
        assert await programs.transfer(one, 1000) is None
        for transfer in transfers:
            assert transfer is not None
            transfer.close()


async def test_calls_for_a_session_that_is_not_bound_do_nothing(bench: Bench) -> None:
    bench.egress.change("unknown", bench.rules())
    bench.egress.allow("unknown", 0)
    bench.egress.exhaust("unknown", reasons.TENANT_QUOTA)
    await bench.egress.settle("unknown")
    await bench.egress.release("unknown")


async def test_a_session_that_can_not_be_bound_leaves_nothing(bench: Bench) -> None:
    rules = bench.refused_rules()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = listener.dup()
        with pytest.raises(EgressError):
            await bench.egress.bind("s", rules, given, RecordingSink(), NO_NETWORK_USE)
        assert given.fileno() == -1, "the listener is closed"
        await bench.egress.release("s")
