"""Leases: what clients hold, when they are overdue, and how many there may be."""

from __future__ import annotations

import pytest

from executor_server.core.errors import Reason, ResourceExhausted
from executor_server.sessions import leases
from executor_server.sessions.leases import Leases, Released, renew_after_s
from tests.support.clock import Clock

ONE, TWO, THREE = ("t", "one"), ("t", "two"), ("t", "three")
A, B = "a" * 32, "b" * 32
GRACE_S = 100.0
LATE_S = GRACE_S + renew_after_s(GRACE_S)


class Bench:
    """Leases that are checked every second, as by a running sweeper."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.graces_s: dict[tuple[str, str], float] = {}
        self.leases = Leases(lambda session: self.graces_s.get(session, GRACE_S), self.clock)
        self.released = Released()

    def wait(self, seconds: float) -> Released:
        released = Released()
        for _ in range(int(seconds)):
            self.clock.now_s += 1.0
            looked = self.leases.overdue()
            for session in looked.sessions:
                self.leases.forget(session)
            released.sessions.extend(looked.sessions)
            released.dropped.extend(looked.dropped)
        return released


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_lease_that_is_renewed_holds_its_sessions_for_ever(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    bench.leases.hold(TWO, A)
    for _ in range(20):
        assert bench.leases.renew("t", A).sessions == 2
        assert bench.wait(GRACE_S) == Released()


def test_sessions_end_when_their_lease_is_overdue_by_their_grace_and_not_before(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    assert bench.wait(LATE_S) == Released()
    assert bench.wait(1) == Released([ONE])


def test_a_cut_of_less_than_the_grace_loses_nothing_wherever_it_begins(bench: Bench) -> None:
    """A client that was cut off right before a renewal still has its whole grace."""
    bench.leases.hold(ONE, A)
    for begins_after_s in range(int(renew_after_s(GRACE_S)) + 1):
        bench.leases.renew("t", A)
        assert bench.wait(begins_after_s + GRACE_S - 1) == Released()


def test_each_session_has_a_grace_of_its_own(bench: Bench) -> None:
    bench.graces_s = {ONE: 10.0, TWO: 50.0}
    bench.leases.hold(ONE, A)
    bench.leases.hold(TWO, A)
    assert bench.leases.renew("t", A).renew_after_s == renew_after_s(10.0)
    assert bench.wait(12) == Released([ONE])
    assert bench.leases.renew("t", A).renew_after_s == renew_after_s(50.0)
    assert bench.wait(60) == Released([TWO])


def test_a_session_that_nobody_holds_is_detached_and_never_overdue(bench: Bench) -> None:
    assert bench.leases.attach(ONE, A) is False
    assert bench.leases.attach(ONE, A) is False, "the first attempt did not make it leased"
    assert bench.wait(10 * GRACE_S) == Released()
    assert bench.leases.renew("t", A).sessions == 0


def test_a_session_lives_while_any_of_its_clients_does(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    assert bench.leases.attach(ONE, B) is True
    assert bench.leases.attach(ONE, B) is False
    for _ in range(3):
        bench.leases.renew("t", B)
        released = bench.wait(GRACE_S - 1)
        assert released.sessions == []
    assert bench.leases.renew("t", A).sessions == 0, "the one that was not heard of has let go"
    assert bench.wait(LATE_S + 1) == Released([ONE])


def test_a_lease_that_ends_takes_with_it_what_it_held_alone(bench: Bench) -> None:
    for session in (ONE, TWO):
        bench.leases.hold(session, A)
    bench.leases.attach(TWO, B)
    assert bench.leases.end("t", A) == Released([ONE], [(TWO, A)])
    bench.leases.forget(ONE)
    assert bench.leases.end("t", A) == Released()
    assert bench.leases.end("t", B) == Released([TWO])


def test_a_lease_of_the_same_id_is_another_one_for_another_tenant(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    assert bench.leases.renew("other", A).sessions == 0
    assert bench.leases.end("other", A) == Released()
    for _ in range(4):
        bench.leases.renew("other", A)
        bench.wait(GRACE_S / 2)
    assert bench.leases.attach(ONE, B) is False, "another tenant's renewals held it"


def test_a_daemon_that_stood_still_gives_the_time_anew(bench: Bench) -> None:
    """Its host slept, or it was stopped: no client could renew a lease meanwhile."""
    bench.leases.hold(ONE, A)
    bench.wait(LATE_S - 2)
    bench.clock.now_s += 3600.0
    assert bench.leases.overdue() == Released()
    assert bench.wait(LATE_S) == Released()
    assert bench.wait(1) == Released([ONE])


def test_the_time_of_recovery_counts_for_nobody(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    bench.clock.now_s += 4.0  # less than the absence of a daemon
    bench.leases.restart_all()
    assert bench.wait(LATE_S) == Released()
    assert bench.wait(1) == Released([ONE])


def test_a_grace_that_a_policy_has_shortened_holds_within_seconds(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    assert bench.wait(60) == Released()
    bench.graces_s = {ONE: 10.0}
    assert bench.wait(3) == Released([ONE])


def test_nothing_is_kept_of_a_lease_without_sessions(bench: Bench) -> None:
    """The bounds hold however many ids a client invents."""
    for number in range(10_000):
        bench.leases.renew("t", f"{number:032x}")
        bench.leases.end("t", f"{number:032x}")
    for _ in range(leases.MAX_TENANT_HOLDS + 1):  # refused at last if anything were kept
        bench.leases.attach(ONE, A)
        bench.leases.hold(ONE, A)
        bench.leases.attach(ONE, B)
        bench.leases.forget(ONE)
        bench.leases.forget(ONE)
        assert bench.leases.renew("t", A).sessions == 0


def test_ten_thousand_leases_of_a_session_are_refused_in_words(bench: Bench) -> None:
    bench.leases.hold(ONE, A)
    for number in range(1, leases.MAX_HOLDERS):
        bench.leases.attach(ONE, f"{number:032x}")
    with pytest.raises(ResourceExhausted, match="256 clients hold this session, the most") as refused:
        bench.leases.attach(ONE, B)
    assert refused.value.reason is Reason.TOO_MANY_SESSIONS
    bench.leases.attach(ONE, A)
    bench.leases.hold(TWO, B)
    bench.wait(LATE_S + 1)
    bench.leases.hold(ONE, A)
    assert bench.leases.attach(ONE, B), "those that were not heard of make room"


def test_what_a_tenant_and_all_may_hold_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_TENANT_HOLDS", 3)
    monkeypatch.setattr(leases, "MAX_HOLDS", 5)
    for session in (ONE, TWO, ("u", "one"), ("v", "one")):
        bench.leases.hold(session, A)
    bench.leases.attach(ONE, B)
    with pytest.raises(ResourceExhausted, match="3 holds of your clients"):
        bench.leases.attach(TWO, B)
    with pytest.raises(ResourceExhausted, match="5 holds of clients on sessions of this daemon"):
        bench.leases.attach(("u", "one"), B)
    bench.leases.hold(THREE, A)  # making a session is never refused here


@pytest.mark.parametrize(("grace_s", "expected_s"), [(0.001, 0.2), (2.0, 0.2), (60.0, 6.0), (120.0, 10.0), (1e6, 10.0)])
def test_how_often_a_client_renews_is_bounded_both_ways(grace_s: float, expected_s: float) -> None:
    assert renew_after_s(grace_s) == expected_s
