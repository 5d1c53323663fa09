"""Tenants have and use no more than their quotas, whatever comes together and whatever dies in between."""

from __future__ import annotations

import asyncio
import copy
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.core.errors import Reason, ResourceExhausted
from executor_server.core.model import (
    AuditRules,
    ExecutionLimits,
    Outcome,
    PolicyRef,
    Principal,
    Result,
    SessionFacts,
    Usage,
    VariablesState,
)
from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.quotas import Capacity, Quotas, TenantUse
from executor_server.policy.quotas.usage_store import MinuteUse, UsageStore
from executor_server.policy.quotas.window import Window
from tests.support.clock import Clock
from tests.support.polling import eventually_async

LIMITS = ExecutionLimits(wall_time_s=60.0, cpu_time_s=120.0, operations=1000, output_bytes=1000)
NOON_S = 1_800_000_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON_S)


def quotas_with(clock: Callable[[], float], store: UsageStore | None = None, **limits: float) -> Quotas:
    table = QuotasTable.model_validate(limits)
    return Quotas(lambda _tenant: table, store, clock, processors=2)


def facts(session_id: str = "s", tenant: str = "t") -> SessionFacts:
    return SessionFacts(
        session_id=session_id,
        owner=Principal(tenant, "token"),
        policy=PolicyRef("p", "1", "f"),
        audit=AuditRules(),
        backend="local",
        image="base",
        warm=True,
        request_id="r",
    )


def used(cpu_time_s: float = 0.0, output_bytes: int = 0) -> Result:
    usage = Usage(wall_time_s=1.0, cpu_time_s=cpu_time_s, output_bytes=output_bytes)
    return Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1, usage)


UNACCOUNTED = Result(Outcome.CANCELLED, VariablesState.LOST, 1)


def run(quotas: Quotas, result: Result, *, session: SessionFacts | None = None, execution_id: str = "e") -> None:
    session = session or facts()
    if session.session_id == "s":
        quotas.session_created(session, 0.0)
    release = quotas.reserve_execution(session, execution_id, LIMITS)
    quotas.execution_started(session, execution_id)
    release()
    quotas.execution_ended(session, execution_id, result, 1.0)


def refusal(reserve: Callable[[], object]) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as refused:
        reserve()
    assert refused.value.reason is Reason.QUOTA_EXCEEDED
    return refused.value


def test_cpu_time_between_executions_is_charged(clock: Clock) -> None:
    quotas = quotas_with(clock, cpu_time_s_per_hour=10.0)
    quotas.session_created(facts(), 0.0)
    quotas.background_used(facts(), 6.0)
    run(quotas, used(cpu_time_s=1.0))
    quotas.background_used(facts(), 4.0)
    assert "cpu_time_s_per_hour: 11 of 10" in refusal(lambda: quotas.reserve_execution(facts(), "f", LIMITS)).message


# -- what there is at one time


def test_requests_that_come_together_cannot_pass_a_quota_together(clock: Clock) -> None:
    quotas = quotas_with(clock, sessions=2)
    quotas.reserve_session("t")
    quotas.reserve_session("t")
    assert "sessions: 2" in refusal(lambda: quotas.reserve_session("t")).message


def test_a_session_is_counted_once_while_it_is_reserved_observed_and_released(clock: Clock) -> None:
    quotas = quotas_with(clock, sessions=2)
    release = quotas.reserve_session("t")
    quotas.session_created(facts(), 0.1)
    release()
    release()  # once more is nothing more
    assert quotas.use_of("t").sessions == 1


def test_a_session_that_ended_makes_room(clock: Clock) -> None:
    quotas = quotas_with(clock, sessions=1)
    quotas.session_recovered(facts())
    refusal(lambda: quotas.reserve_session("t"))
    quotas.session_ended(facts(), "deleted")
    quotas.reserve_session("t")


def test_executions_of_all_sessions_count_together(clock: Clock) -> None:
    quotas = quotas_with(clock, executions=2)
    for name in ("one", "two"):
        quotas.session_created(facts(name), 0.1)
        release = quotas.reserve_execution(facts(name), "e", LIMITS)
        quotas.execution_started(facts(name), "e")
        release()
    assert refusal(lambda: quotas.reserve_execution(facts("one"), "e2", LIMITS)).retry_after_s
    quotas.execution_ended(facts("one"), "e", used(), 1.0)
    quotas.reserve_execution(facts("one"), "e2", LIMITS)


def test_an_execution_that_could_not_be_begun_makes_room(clock: Clock) -> None:
    quotas = quotas_with(clock, executions=1)
    quotas.reserve_execution(facts(), "e", LIMITS)()
    quotas.reserve_execution(facts(), "e", LIMITS)


def test_executions_that_an_earlier_daemon_began_count(clock: Clock) -> None:
    quotas = quotas_with(clock, executions=1)
    quotas.session_recovered(facts())
    quotas.execution_recovered(facts(), "e")
    refusal(lambda: quotas.reserve_execution(facts(), "e2", LIMITS))


def test_what_ran_in_a_session_that_ended_is_counted_no_more(clock: Clock) -> None:
    quotas = quotas_with(clock)
    quotas.session_recovered(facts())
    quotas.execution_recovered(facts(), "e")
    quotas.session_ended(facts(), "deleted")
    assert quotas.use_of("t").executions == 0


def test_calls_count_while_they_are_open(clock: Clock) -> None:
    quotas = quotas_with(clock, calls=1)
    release = quotas.reserve_call("t")
    refusal(lambda: quotas.reserve_call("t"))
    release()
    quotas.reserve_call("t")


def test_one_tenant_does_not_count_for_another(clock: Clock) -> None:
    quotas = quotas_with(clock, sessions=1, creations_per_minute=1)
    quotas.reserve_session("t")
    quotas.reserve_session("u")


def test_another_policy_counts_at_once(clock: Clock) -> None:
    table = QuotasTable(sessions=1)
    quotas = Quotas(lambda _tenant: table, None, clock)
    quotas.reserve_session("t")
    table = QuotasTable(sessions=2)
    quotas.reserve_session("t")


# -- what is used


def test_creations_of_a_minute_are_limited_and_the_refusal_says_until_when(clock: Clock) -> None:
    quotas = quotas_with(clock, creations_per_minute=2)
    for _ in range(2):
        quotas.reserve_session("t")()
        clock.now_s += 10
    retry_after_s = refusal(lambda: quotas.reserve_session("t")).retry_after_s
    assert retry_after_s == 41.0  # the first of them, 20 s ago, and the second that it fell into
    clock.now_s += retry_after_s
    quotas.reserve_session("t")


@pytest.mark.parametrize(
    ("limits", "result", "message"),
    [
        ({"cpu_time_s_per_hour": 10.0}, used(cpu_time_s=12.5), "cpu_time_s_per_hour: 12.5 of 10 are used"),
        ({"output_bytes_per_hour": 100}, used(output_bytes=100), "output_bytes_per_hour: 100 of 100 are used"),
    ],
)
def test_who_has_used_the_quota_of_an_hour_waits_until_it_is_over(
    clock: Clock, limits: dict[str, float], result: Result, message: str
) -> None:
    quotas = quotas_with(clock, None, **limits)
    run(quotas, result)
    refused = refusal(lambda: quotas.reserve_execution(facts(), "e2", LIMITS))
    assert message in refused.message
    assert refused.retry_after_s is not None and 3600 <= refused.retry_after_s <= 3660
    clock.now_s += refused.retry_after_s - 1
    refusal(lambda: quotas.reserve_execution(facts(), "e2", LIMITS))
    clock.now_s += 1
    quotas.reserve_execution(facts(), "e2", LIMITS)


def test_an_execution_that_its_session_took_along_counts_with_what_it_can_have_used(clock: Clock) -> None:
    quotas = quotas_with(clock)
    quotas.session_created(facts(), 0.1)
    for execution_id in ("runs", "waits"):
        quotas.reserve_execution(facts(), execution_id, LIMITS)
        quotas.execution_started(facts(), execution_id)
    clock.now_s += 7
    quotas.execution_ended(facts(), "runs", UNACCOUNTED, 7.0)
    quotas.execution_ended(facts(), "waits", UNACCOUNTED, 7.0)
    assert quotas.use_of("t").cpu_time_s_in_last_hour == 14.0  # on both of two processors


def test_an_execution_that_its_session_took_along_counts_with_the_output_that_came(clock: Clock) -> None:
    quotas = quotas_with(clock)
    quotas.session_created(facts(), 0.0)
    quotas.execution_started(facts(), "e")
    clock.now_s += 3
    quotas.execution_ended(facts(), "e", replace(UNACCOUNTED, usage=Usage(output_bytes=5)), 3.0)
    use = quotas.use_of("t")
    assert use.output_bytes_in_last_hour == 5
    assert use.cpu_time_s_in_last_hour == pytest.approx(6.0)


def test_what_it_can_have_used_is_at_most_its_limit(clock: Clock) -> None:
    quotas = quotas_with(clock)
    quotas.session_created(facts(), 0.1)
    quotas.reserve_execution(facts(), "e", LIMITS)
    quotas.execution_started(facts(), "e")
    clock.now_s += 3000
    quotas.execution_ended(facts(), "e", UNACCOUNTED, 3000.0)
    assert quotas.use_of("t").cpu_time_s_in_last_hour == LIMITS.cpu_time_s


def test_numbers_without_end_stay_numbers(clock: Clock) -> None:
    quotas = quotas_with(clock)
    run(quotas, used(cpu_time_s=1e308, output_bytes=10**300))
    run(quotas, used(cpu_time_s=1e308, output_bytes=10**300))
    assert quotas.use_of("t").output_bytes_in_last_hour == 2**51


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 5)), max_size=60))
def test_a_window_never_holds_less_than_its_span_nor_more_than_a_part_beyond(steps: list[tuple[int, int]]) -> None:
    window, added, now_s = Window(6, 10.0), [], NOON_S
    for pause_s, amount in steps:
        now_s += pause_s / 10
        window.add(amount, now_s)
        added.append((now_s, amount))
        within = sum(each for at_s, each in added if at_s > now_s - 60)
        beyond = sum(each for at_s, each in added if at_s > now_s - 70.001)
        assert within <= window.total(now_s) <= beyond
        wait_s = window.wait_s(3, now_s)
        assert copy.deepcopy(window).total(now_s + wait_s) < 3


def test_a_clock_that_is_set_back_forgives_nothing(clock: Clock) -> None:
    quotas = quotas_with(clock, cpu_time_s_per_hour=10.0)
    run(quotas, used(cpu_time_s=6.0))
    clock.now_s -= 7200
    run(quotas, used(cpu_time_s=6.0))
    refusal(lambda: quotas.reserve_execution(facts(), "e2", LIMITS))


def test_setting_the_hosts_clock_neither_forgives_nor_locks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = Quotas(lambda _: QuotasTable(creations_per_minute=2))
    quotas.reserve_session("t")()
    set_back_s = time.time() - 86_400
    monkeypatch.setattr(time, "time", lambda: set_back_s)
    quotas.reserve_session("t")()
    refused = refusal(lambda: quotas.reserve_session("t"))
    assert refused.retry_after_s is not None
    assert refused.retry_after_s <= 62
    set_forward_s = set_back_s + 2 * 86_400
    monkeypatch.setattr(time, "time", lambda: set_forward_s)
    refusal(lambda: quotas.reserve_session("t"))


def test_tenants_that_use_nothing_are_forgotten(clock: Clock) -> None:
    quotas = quotas_with(clock)
    quotas.reserve_session("idle")()
    quotas.reserve_call("busy")
    clock.now_s += 62
    assert quotas.tenants() == ["busy"]
    assert quotas.use_of("busy") == TenantUse(calls=1)


def test_a_thousand_tenants_of_an_hour_ago_leave_nothing(clock: Clock) -> None:
    quotas = quotas_with(clock)
    for number in range(1000):
        quotas.reserve_session(f"t{number}")()
    clock.now_s += 3600
    quotas.reserve_session("new")
    assert list(quotas._tenants) == ["new"]


# -- what is written down


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@pytest.fixture
def store(path: Path) -> Iterator[UsageStore]:
    store = UsageStore(path)
    yield store
    store.close()


def after_a_kill(path: Path, clock: Clock, **limits: float) -> tuple[Quotas, UsageStore]:
    """As the next daemon knows it; the last one has closed nothing."""
    store = UsageStore(path)
    return quotas_with(clock, store, **limits), store


async def test_a_killed_daemon_does_not_forgive_what_was_used(path: Path, store: UsageStore, clock: Clock) -> None:
    quotas = quotas_with(clock, store)
    run(quotas, used(cpu_time_s=6.0, output_bytes=10))
    clock.now_s += 90
    run(quotas, used(cpu_time_s=6.0, output_bytes=10))
    assert await eventually_async(lambda: len(store.load(0)) == 2)
    later, its_store = after_a_kill(path, clock, cpu_time_s_per_hour=12.0)
    refusal(lambda: later.reserve_execution(facts(), "e", LIMITS))
    assert later.use_of("t") == TenantUse(cpu_time_s_in_last_hour=12.0, output_bytes_in_last_hour=20)
    its_store.close()
    quotas.close()


async def test_a_daemon_that_stops_writes_down_the_last_second(path: Path, store: UsageStore, clock: Clock) -> None:
    quotas = quotas_with(clock, store)
    run(quotas, used(cpu_time_s=6.0))
    quotas.close()
    assert store.load(0) == [MinuteUse("t", int(NOON_S // 60), 6.0, 0, 0)]


async def test_what_a_disk_that_fails_does_not_take_is_kept_no_longer_than_it_counts(
    store: UsageStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas, tried = quotas_with(clock, store), list[int]()

    def fails(used: Sequence[MinuteUse], from_minute: int) -> bool:
        tried.append(len(used))
        return False

    monkeypatch.setattr(store, "write", fails)
    for _ in range(180):
        quotas._charge("t", cpu_time_s=1.0, output_bytes=1)
        quotas._write()
        clock.now_s += 60
    quotas.close()
    assert max(tried) <= 61


async def test_what_is_older_than_an_hour_is_let_go_of(store: UsageStore, clock: Clock) -> None:
    quotas = quotas_with(clock, store)
    run(quotas, used(cpu_time_s=6.0))
    quotas.close()
    clock.now_s += 3661
    later = quotas_with(clock, store)
    run(later, used(cpu_time_s=1.0), session=replace(facts(), owner=Principal("u", "token")))
    later.close()
    assert [each.tenant for each in store.load(0)] == ["u"]


async def test_what_could_not_be_written_is_written_with_what_follows(
    store: UsageStore, path: Path, clock: Clock
) -> None:
    quotas = quotas_with(clock, store)
    other = sqlite3.connect(path, isolation_level=None)
    store._database.execute("PRAGMA busy_timeout = 1")
    other.execute("BEGIN IMMEDIATE")
    run(quotas, used(cpu_time_s=6.0))
    quotas.close()
    other.execute("ROLLBACK")
    other.close()
    run(quotas, used(cpu_time_s=1.0), session=replace(facts(), owner=Principal("u", "token")))
    quotas.close()
    assert {each.tenant for each in store.load(0)} == {"t", "u"}


@pytest.mark.parametrize(
    "content", [b"", b"not a database at all, though of some length" * 100, b"SQLite format 3\0" + bytes(5000)]
)
def test_a_file_that_is_harmed_is_put_aside_and_the_daemon_counts_anew(
    path: Path, clock: Clock, content: bytes
) -> None:
    path.write_bytes(content)
    quotas, store = after_a_kill(path, clock)
    asyncio.run(_use_and_close(quotas))
    assert len(store.load(0)) == 1
    assert not content or path.with_name("usage.db.harmed").read_bytes() == content
    store.close()


async def _use_and_close(quotas: Quotas) -> None:
    run(quotas, used(cpu_time_s=1.0))
    quotas.close()


def test_a_row_of_use_that_was_changed_counts_for_nothing(path: Path) -> None:
    store = UsageStore(path)
    whole = MinuteUse("whole", 5, 1.5, 10, 30)
    store.write([whole, MinuteUse("changed", 5, 2.5, 20, 0)], 0)
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE usage SET cpu_time_s = 9999.0 WHERE tenant = 'changed'")
    database.close()
    store = UsageStore(path)
    assert store.load(0) == [whole]
    store.close()


# -- what all tenants share


def test_a_tenant_without_quotas_leaves_as_many_free_as_it_has() -> None:
    """One tenant gets half at most, the next half of the rest, so later tenants always find some."""
    quotas = Quotas(lambda _: QuotasTable(), capacity=Capacity(calls=8, sessions=4, is_shared=lambda: True))

    def take(tenant: str, reserve: Callable[[str], object]) -> int:
        taken = 0
        with pytest.raises(ResourceExhausted, match="must leave as many free"):
            while reserve(tenant):
                taken += 1
        return taken

    assert [take(tenant, quotas.reserve_call) for tenant in "abc"] == [4, 2, 1]
    assert [take(tenant, quotas.reserve_session) for tenant in "ab"] == [2, 1]


def test_a_tenant_that_is_alone_may_have_everything() -> None:
    quotas = Quotas(lambda _: QuotasTable(), capacity=Capacity(calls=8, sessions=4, is_shared=lambda: False))
    assert all(quotas.reserve_call("a") for _ in range(8))


def test_calls_have_a_rate_where_there_are_several_tenants() -> None:
    def rate(table: QuotasTable, *, is_shared: bool) -> int | None:
        capacity = Capacity(calls=8, sessions=4, is_shared=lambda: is_shared)
        return Quotas(lambda _: table, capacity=capacity).calls_per_second("a")

    assert rate(QuotasTable(), is_shared=True) == 500
    assert rate(QuotasTable(), is_shared=False) is None
    assert rate(QuotasTable(calls_per_second=7), is_shared=True) == 7


def test_a_quota_of_its_own_is_all_that_counts_for_a_tenant() -> None:
    quotas = Quotas(lambda _: QuotasTable(calls=8), capacity=Capacity(calls=8, sessions=4, is_shared=lambda: True))
    assert all(quotas.reserve_call("a") for _ in range(8))
