"""The sessions of a tenant pass its quota of network traffic by no more than a small window each, however late reports come."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.egress_windows import MAX_WINDOW_BYTES, MIN_WINDOW_BYTES
from executor_server.policy.quotas.quotas import Quotas
from executor_server.policy.quotas.usage_store import UsageStore
from tests.support.clock import Clock
from tests.support.polling import eventually_async
from tests.unit.policy.quotas.test_quotas import NOON_S, facts

MIB = 2**20


class Tenant:
    """A tenant's sessions, its quota, and its quotas' clock."""

    def __init__(self, quota_bytes: int | None, sessions: int, store: UsageStore | None = None) -> None:
        self.quota_bytes = quota_bytes
        self.clock = Clock(NOON_S)
        self.quotas = Quotas(lambda _: QuotasTable(egress_bytes_per_hour=self.quota_bytes), store, self.clock)
        self.sessions = [Proxied(self, f"s{number}") for number in range(sessions)]
        self.asked: list[str] = []
        self.quotas.on_window_change(self.ask_again)
        for session in self.sessions:
            self.quotas.session_created(facts(session.name), 0.1)
        for session in self.sessions:
            session.ask()

    def ask_again(self, tenant: str) -> None:
        self.asked.append(tenant)
        for session in self.sessions:
            session.ask()

    @property
    def moved_bytes(self) -> int:
        return sum(session.moved_bytes for session in self.sessions)


@dataclass
class Proxied:
    """A session at the proxy: it moves up to its bound, and reports later."""

    tenant: Tenant
    name: str
    moved_bytes: int = 0
    reported_bytes: int = 0
    window: int = 0
    bound_bytes: float = 0.0
    is_closed: bool = field(default=False)

    def ask(self) -> None:
        """As SessionNetwork does, which knows what was reported."""
        window = self.tenant.quotas.network_window("t")
        self.is_closed = window == 0
        self.window = window or 0
        self.bound_bytes = float("inf") if window is None else self.reported_bytes + window

    def move(self, size: int) -> None:
        if not self.is_closed:
            self.moved_bytes += max(0, int(min(size, self.bound_bytes - self.moved_bytes)))

    def report(self) -> None:
        size, self.reported_bytes = self.moved_bytes - self.reported_bytes, self.moved_bytes
        self.tenant.quotas.network_moved(facts(self.name), size, 0)
        if self.bound_bytes - self.reported_bytes <= self.window // 2:
            self.ask()


_MOVES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 200 * MIB), st.booleans()), max_size=60)


@given(st.integers(1, 400 * MIB), st.integers(1, 8), _MOVES)
def test_a_quota_is_passed_by_no_more_than_the_smallest_window_for_each_session(
    quota_bytes: int, sessions: int, moves: list[tuple[int, int, bool]]
) -> None:
    async def try_it() -> None:
        tenant = Tenant(quota_bytes, sessions)
        for number, size, reports in moves:
            session = tenant.sessions[number % sessions]
            session.move(size)
            if reports:
                session.report()
            assert tenant.moved_bytes <= quota_bytes + sessions * MIN_WINDOW_BYTES
        for session in tenant.sessions:
            session.report()
        spent = tenant.moved_bytes >= quota_bytes
        assert all(session.is_closed for session in tenant.sessions) == spent
        tenant.quotas.close()

    asyncio.run(try_it())


async def test_a_quota_can_be_used_to_its_end_by_one_of_many_sessions() -> None:
    """None may be closed while others have only not used their part."""
    tenant = Tenant(300 * MIB, 8)
    busy = tenant.sessions[3]
    while not busy.is_closed:
        busy.move(50 * MIB)
        busy.report()
    assert 300 * MIB <= tenant.moved_bytes <= 300 * MIB + MIN_WINDOW_BYTES
    tenant.quotas.close()


async def test_without_a_quota_there_is_no_window_and_a_new_one_holds_at_once() -> None:
    tenant = Tenant(None, 1)
    (session,) = tenant.sessions
    session.move(10**12)
    session.report()
    assert session.moved_bytes == 10**12
    tenant.quota_bytes = 1000
    tenant.ask_again("t")
    assert session.is_closed
    tenant.quota_bytes = None
    tenant.ask_again("t")
    assert not session.is_closed
    tenant.quotas.close()


async def test_a_large_quota_is_shared_in_large_windows() -> None:
    tenant = Tenant(2**40, 2)
    assert [session.window for session in tenant.sessions] == [MAX_WINDOW_BYTES] * 2
    tenant.quotas.close()


async def test_a_spent_quota_closes_every_session_and_opens_them_when_the_hour_has_moved_on() -> None:
    tenant = Tenant(MIB, 2)
    idle, busy = tenant.sessions
    while not busy.is_closed:
        busy.move(MIB)
        busy.report()
    assert idle.is_closed, "it must not begin to move now"
    tenant.quotas.close()
    tenant.clock.now_s = NOON_S + 61 * 60 - 0.01
    tenant.ask_again("t")
    assert idle.is_closed
    tenant.clock.now_s = NOON_S + 61 * 60
    assert await eventually_async(lambda: not idle.is_closed)
    assert not busy.is_closed
    assert tenant.quotas.use_of("t").egress_bytes_in_last_hour == 0
    tenant.quotas.close()


async def test_the_next_daemon_knows_what_was_moved(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.db")
    tenant = Tenant(10 * MIB, 1, store)
    tenant.sessions[0].move(2 * MIB)
    tenant.sessions[0].report()
    moved = tenant.moved_bytes
    assert moved > 0
    tenant.quotas.close()
    store.close()
    store = UsageStore(tmp_path / "usage.db")
    later = Tenant(10 * MIB, 1, store)
    assert later.quotas.use_of("t").egress_bytes_in_last_hour == moved
    later.quotas.close()
    store.close()


@pytest.mark.parametrize("sizes", [[2**62], [2**50] * 3])
async def test_reports_without_measure_are_counted_as_far_as_they_can_be(tmp_path: Path, sizes: list[int]) -> None:
    """The proxy is another process, and its numbers must neither overflow a column nor stop the count."""
    store = UsageStore(tmp_path / "usage.db")
    tenant = Tenant(MIB, 1, store)
    for size in sizes:
        tenant.quotas.network_moved(facts("s0"), size, 0)
    assert tenant.sessions[0].is_closed
    tenant.quotas.close()
    assert store.load(0)[0].egress_bytes >= 2**50
    store.close()
