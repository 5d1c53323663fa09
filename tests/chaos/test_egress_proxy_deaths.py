"""The egress proxy's process is killed under transfers, again and again: sessions, counts and descriptors survive it.

tests/chaos/test_network_kills.py does the same below a whole daemon. Here the listeners are the test's own, so that
each byte can be compared with what was counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from executor_server.core import NetworkRules
from executor_server.guest.egress import reasons
from executor_server.guest.egress.protocols import Limits
from executor_server.network.egress import EgressService
from executor_server.network.egress import service as egress_module
from tests.support.egress_service import SOON_S, BoundSession, bind, egress_service, settings_for
from tests.support.internet.world import Internet
from tests.support.rounds import rounds

ROUNDS = rounds(20, 3)
TRANSFERS = 8
MIB = 2**20
LARGE = NetworkRules(max_received_bytes=2**40, max_new_connections_per_minute=100_000)


async def _transfer(session: BoundSession, host: str) -> int:
    """Reads an endless file until the connection ends; returns the bytes that arrived."""
    reader, writer = await session.connect()
    writer.write(f"GET http://{host}/endless HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    received = 0
    try:
        while data := await reader.read(65536):
            received += len(data)
    except ConnectionError:
        pass
    writer.transport.abort()
    return received


async def _hello(session: BoundSession, host: str) -> bytes:
    reader, writer = await session.connect()
    writer.write(f"GET http://{host}/hello.txt HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    async with asyncio.timeout(SOON_S):
        answer = await reader.read(-1)
    writer.close()
    return answer.rpartition(b"\r\n\r\n")[2]


async def _replaced(service: EgressService, pid: int | None) -> None:
    async with asyncio.timeout(SOON_S):
        while service.pid in (None, pid):  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0.005)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_killed_proxy_is_replaced_under_transfers_and_nothing_is_lost_but_its_last_moment(
    internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress_module, "_MAX_BACKOFF_S", 0.1)
    host = internet.name("files")
    chance = random.Random(4)  # the moments of the kills
    async with egress_service(settings_for(internet)) as service:
        sessions = [
            await bind(service, NetworkRules(**{**LARGE.__dict__, "allowed": (f"{host}:80",)}), f"s{number}")
            for number in range(2)
        ]
        received = dict.fromkeys((each.session_id for each in sessions), 0)
        descriptors = 0
        for number in range(ROUNDS):
            pid = service.pid
            assert pid is not None
            transfers = [
                (each, asyncio.ensure_future(_transfer(each, host))) for each in sessions for _ in range(TRANSFERS // 2)
            ]
            for each in sessions:
                before = each.sink.received_bytes
                await each.sink.until(lambda each=each, before=before: each.sink.received_bytes > before + MIB)
                # Each of the round's transfers is one that the kill breaks.
                begun = number * (TRANSFERS // 2 + 1) + TRANSFERS // 2
                await each.sink.until(lambda each=each, begun=begun: len(each.sink.opened) >= begun)
            await asyncio.sleep(chance.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            for each, transfer in transfers:
                async with asyncio.timeout(SOON_S):
                    received[each.session_id] += await transfer
            await _replaced(service, pid)
            assert not psutil.pid_exists(pid)
            for each in sessions:
                assert await _hello(each, host) == b"hello from outside\n"
                await service.settle(each.session_id)
            if number == 0:
                descriptors = _descriptors()
        assert service.restarts == ROUNDS
        assert _descriptors() <= descriptors + 2
        for each in sessions:
            _check_reports(each, received[each.session_id])


def _check_reports(session: BoundSession, received: int) -> None:
    """Every connection that was opened has ended once; of the bytes that arrived, what a process had not reported when
    it was killed is missing in the totals, and that is bounded."""
    sink = session.sink
    opened, closed = [each.connection_id for each in sink.opened], [each.connection_id for each in sink.closed]
    assert len(set(opened)) == len(opened) == ROUNDS * (TRANSFERS // 2 + 1)
    assert sorted(opened) == sorted(closed)
    ends = [each.reason for each in sink.closed]
    assert ends.count(reasons.PROXY_ENDED) == ROUNDS * TRANSFERS // 2
    assert ends.count(reasons.ENDED) == ROUNDS
    assert sink.denied == []
    unreported = ROUNDS * (Limits().report_bytes + 2**16)
    assert sink.received_bytes >= received - unreported


async def test_totals_go_on_where_the_killed_proxy_ended(internet: Internet) -> None:
    """A session can't have its bytes again from each process."""
    host = internet.name("files")
    limit = 20 * MIB
    async with egress_service(settings_for(internet)) as service:
        session = await bind(service, NetworkRules(allowed=(f"{host}:80",), max_received_bytes=limit))
        received = 0
        for _ in range(3):
            pid = service.pid
            assert pid is not None
            before = session.sink.received_bytes
            transfer = asyncio.ensure_future(_transfer(session, host))
            await session.sink.until(lambda before=before: session.sink.received_bytes >= before + 4 * MIB)
            os.kill(pid, signal.SIGKILL)
            received += await transfer
            await _replaced(service, pid)
        received += await _transfer(session, host)
        assert received <= limit + 4 * (Limits().report_bytes + 512 * 1024)
        await session.sink.until(lambda: session.sink.closed[-1].reason == reasons.RECEIVED_BYTES)


async def test_session_can_be_bound_released_and_changed_while_there_is_no_proxy(internet: Internet) -> None:
    host = internet.name("files")
    rules = NetworkRules(allowed=(f"{host}:80",))
    async with egress_service(settings_for(internet)) as service:
        kept, gone = (
            await bind(service, NetworkRules(allowed=("a.example",)), "kept"),
            await bind(service, rules, "gone"),
        )
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
        await asyncio.sleep(0)
        service.change("kept", rules)
        service.exhaust("kept", reasons.TENANT_QUOTA)
        await service.release("gone")
        late = await bind(service, rules, "late")
        assert await _hello(late, host) == b"hello from outside\n"
        assert (await kept.tunnel(f"{host}:80"))[0] == 403
        service.exhaust("kept", None)
        assert await _hello(kept, host) == b"hello from outside\n"
        assert gone.sink.closed == []


async def test_proxy_that_is_killed_while_it_starts_is_started_again() -> None:
    async with egress_service() as service:
        binding = asyncio.ensure_future(bind(service, NetworkRules(allowed=("a.example",))))
        async with asyncio.timeout(SOON_S):
            while not (children := _proxies()):  # noqa: ASYNC110 - the kernel has no event for it
                await asyncio.sleep(0.001)
        children[0].kill()
        # The session that waited for it fails, or is served by the next one; a later one is served.
        await asyncio.wait([binding])
        session = await bind(service, NetworkRules(allowed=("a.example",)), "next")
        assert (await session.tunnel("b.example:443"))[0] == 403


def _proxies() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        try:
            if (
                any("executor_server.network.proxy" in word or "no_imports" in word for word in child.cmdline())
                and "authority" not in child.cmdline()
            ):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
