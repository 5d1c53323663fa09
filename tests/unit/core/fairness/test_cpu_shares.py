"""A tenant's share of the processors does not grow with the number of its sandboxes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_server.core.fairness import cpu_shares
from executor_server.core.fairness.cpu_shares import CpuShares
from executor_server.core.model import Outcome, Result, SessionFacts, VariablesState
from tests.support.polling import eventually_async
from tests.unit.policy.quotas.test_quotas import facts

_RESULT = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1)


class Shares:
    """The shares that each session got last, of which a new one has a whole."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.writes = 0
        self.shares = CpuShares(self._set)

    def _set(self, session: SessionFacts, share: float) -> None:
        self.now[session.session_id] = share
        self.writes += 1

    def create(self, *sessions: str, tenant: str = "t") -> None:
        for session in sessions:
            self.shares.session_created(facts(session, tenant), 0.1)
            self.now[session] = 1.0

    def start(self, *sessions: str, tenant: str = "t") -> None:
        """In a session that may be new."""
        for session in sessions:
            if session not in self.now:
                self.create(session, tenant=tenant)
            self.shares.execution_started(facts(session, tenant), "e")

    def end(self, session: str, tenant: str = "t") -> None:
        self.shares.execution_ended(facts(session, tenant), "e", _RESULT, 1.0)


@pytest.fixture
def its() -> Iterator[Shares]:
    its = Shares()
    yield its
    its.shares.close()


async def test_a_tenant_that_runs_in_one_sandbox_has_a_whole_share(its: Shares) -> None:
    its.start("a")
    assert its.now == {"a": 1.0}


async def test_sandboxes_of_one_tenant_divide_its_share(its: Shares) -> None:
    its.start("a", "b", "c", "d")
    assert its.now["d"] == 1 / 4
    its.shares.even_out()
    assert its.now == dict.fromkeys("abcd", 1 / 4)


async def test_a_new_session_gets_the_share_of_one_more(its: Shares) -> None:
    its.start("a")
    its.create("b")
    its.shares.even_out()
    assert its.now == {"a": 1.0, "b": 1 / 2}


async def test_a_session_that_is_used_alone_costs_no_write(its: Shares) -> None:
    its.start("a")
    its.end("a")
    its.shares.session_ended(facts("a"), "deleted")
    assert not its.writes


async def test_a_session_of_an_earlier_daemon_is_weighed_in_any_case(its: Shares) -> None:
    its.shares.session_recovered(facts("a"))
    its.shares.even_out()
    assert (its.now, its.writes) == ({"a": 1.0}, 1)


async def test_shares_follow_by_themselves(its: Shares, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_shares, "EVEN_OUT_DELAY_S", 0.0)
    its.start("a", "b")
    assert await eventually_async(lambda: its.now["a"] == 1 / 2)
    its.end("b")
    assert await eventually_async(lambda: its.now["a"] == 1.0)


async def test_another_tenants_sandboxes_do_not_count(its: Shares) -> None:
    its.start("a", "b")
    its.start("x", tenant="u")
    assert its.now["x"] == 1.0


async def test_what_goes_on_gets_back_what_those_had_that_ended(its: Shares) -> None:
    its.start("a", "b")
    its.end("b")
    its.shares.even_out()
    assert its.now["a"] == 1.0


async def test_a_sandbox_is_busy_until_all_that_waits_in_it_has_ended(its: Shares) -> None:
    its.start("a", "b", "b")
    its.end("b")
    its.shares.even_out()
    assert its.now["a"] == 1 / 2


async def test_a_session_that_ended_divides_nothing_any_more(its: Shares) -> None:
    its.start("a", "b")
    its.shares.session_ended(facts("b"), "deleted")
    its.end("b")
    its.shares.even_out()
    assert its.now["a"] == 1.0


async def test_beginning_costs_one_write_at_most(its: Shares) -> None:
    names = [str(number) for number in range(64)]
    its.create(*names)
    before = its.writes
    its.start(*names)
    assert its.writes <= before + 64


async def test_sandboxes_in_which_nothing_runs_divide_one_share_too(its: Shares) -> None:
    its.create("a", "b", "c", "d")
    its.start("d")
    its.shares.even_out()
    assert its.now == {"a": 1 / 4, "b": 1 / 4, "c": 1 / 4, "d": 1.0}


async def test_what_is_told_of_a_session_that_ended_changes_nothing(its: Shares) -> None:
    its.create("a")
    its.shares.session_ended(facts("a"), "deleted")
    its.shares.execution_started(facts("a"), "e")
    its.end("a")
    its.shares.even_out()
    assert not its.writes
