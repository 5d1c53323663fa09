"""A fork server is made for kinds of sandboxes that are wanted again and again, and for no daemon with one session."""

from __future__ import annotations

from executor_server.backends.local.fork_server.demand import _AFTER_S, _MAX_KINDS, _WANTED, _WITHIN_S, Demand


def noted(demand: Demand[str], *times_s: float, kind: str = "kind") -> list[bool]:
    return [demand.note(kind, time_s) for time_s in times_s]


def test_the_fourth_sandbox_is_worth_a_fork_server_when_the_first_is_some_seconds_old() -> None:
    assert noted(Demand(), 0, 0, _AFTER_S, _AFTER_S, _AFTER_S) == [False, False, False, True, True]


def test_a_daemon_that_lives_for_seconds_starts_no_fork_server_whatever_it_makes() -> None:
    assert not any(noted(Demand(), *[_AFTER_S / 100 * each for each in range(100)]))


def test_one_session_of_a_daemon_with_a_warm_pool_starts_none() -> None:
    """The pool makes two at the start, and a third in the place of the one that the session took."""
    assert not any(noted(Demand(), 0, 0, 60))


def test_a_steady_demand_of_any_rate_is_met() -> None:
    assert noted(Demand(), *range(100)).index(True) == _AFTER_S
    assert noted(Demand(), *range(0, 1000, 100)).index(True) == _WANTED - 1


def test_sandboxes_that_were_wanted_long_ago_do_not_count() -> None:
    assert not any(noted(Demand(), 0, 0, 0, _WITHIN_S + 1, _WITHIN_S + 2, _WITHIN_S + 3))


def test_kinds_are_counted_apart_and_a_bounded_number_of_them() -> None:
    demand = Demand[str]()
    noted(demand, 0, 0, 0)
    assert not demand.note("another", _AFTER_S)
    assert demand.note("kind", _AFTER_S)
    for each in range(_MAX_KINDS):
        demand.note(str(each), _AFTER_S)
    assert len(demand._counts) == _MAX_KINDS
    assert not demand.note("kind", _AFTER_S), "it was wanted longest ago"
