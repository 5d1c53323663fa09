"""The number of machines that a fleet asks for."""

from __future__ import annotations

from executor_server.fleet.ray.front_actor import HOLD_S, MAX_MORE_NODES, Scaling


def test_a_fleet_in_which_nothing_waits_asks_for_nothing() -> None:
    assert Scaling().decide(0.0, parked=0, nodes=3, places=64) == 0


def test_waiting_requests_ask_for_as_many_nodes_as_they_need() -> None:
    assert Scaling().decide(0.0, parked=1, nodes=3, places=64) == 4
    assert Scaling().decide(0.0, parked=130, nodes=3, places=64) == 6


def test_a_thousand_waiting_requests_ask_for_a_few_nodes_at_a_time() -> None:
    assert Scaling().decide(0.0, parked=100_000, nodes=3, places=1) == 3 + MAX_MORE_NODES


def test_the_request_stands_while_the_machine_comes_and_goes_with_it() -> None:
    scaling = Scaling()
    assert scaling.decide(0.0, parked=1, nodes=3, places=64) == 4
    assert scaling.decide(HOLD_S / 2, parked=0, nodes=3, places=64) == 4
    assert scaling.decide(HOLD_S / 2 + 1, parked=0, nodes=4, places=64) == 0


def test_the_request_is_withdrawn_when_no_machine_comes() -> None:
    scaling = Scaling()
    scaling.decide(0.0, parked=1, nodes=3, places=64)
    assert scaling.decide(HOLD_S, parked=0, nodes=3, places=64) == 0


def test_nodes_without_a_number_of_places_count_as_one_place_each() -> None:
    assert Scaling().decide(0.0, parked=2, nodes=1, places=0) == 3
