"""Requests that wait for a place are served fairly, bounded, and not for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from executor_server.core import ResourceExhausted
from executor_server.fleet.membership.parking import (
    DEFAULT_RETRY_S,
    MAX_WAITING,
    MAX_WAITING_OF_TENANT,
    Parked,
    Parking,
)


def park(parking: Parking[str], tenant: str, kind: str = "base") -> Parked[str]:
    return parking.add(tenant, kind, "request", 0.0)


def serve(parking: Parking[str], places: int, kinds: tuple[str, ...] = ("base",)) -> list[Parked[str]]:
    left = [places]

    def place(parked: Parked[str]) -> bool:
        left[0] -= parked.kind in kinds
        return parked.kind in kinds and left[0] >= 0

    return parking.serve(place)


def test_a_tenant_with_many_requests_gets_one_place_for_each_of_another() -> None:
    parking: Parking[str] = Parking()
    for _ in range(100):
        park(parking, "greedy")
    for _ in range(3):
        park(parking, "modest")
    served = serve(parking, 6)
    assert Counter(parked.tenant for parked in served) == {"greedy": 3, "modest": 3}
    assert len(parking) == 97


def test_rotation_goes_on_where_the_last_place_went() -> None:
    parking: Parking[str] = Parking()
    for tenant in "abc":
        park(parking, tenant)
        park(parking, tenant)
    assert [serve(parking, 1)[0].tenant for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_requests_of_a_kind_keep_their_order_and_do_not_delay_other_kinds() -> None:
    parking: Parking[str] = Parking()
    first, second = park(parking, "a"), park(parking, "a")
    other = park(parking, "a", kind="data")
    assert serve(parking, 5, kinds=("data",)) == [other]
    assert serve(parking, 5) == [first, second]


def test_a_kind_without_a_place_is_tried_once_in_a_call() -> None:
    parking: Parking[str] = Parking()
    for tenant in ("a", "b", "c"):
        park(parking, tenant)
    tried = []

    def place(parked: Parked[str]) -> bool:
        tried.append(parked)
        return False

    assert parking.serve(place) == []
    assert len(tried) == 1


def test_a_request_is_removed_once() -> None:
    parking: Parking[str] = Parking()
    gone, other = park(parking, "b"), park(parking, "a")
    parking.remove(gone)
    parking.remove(gone)
    assert serve(parking, 5) == [other]
    assert len(parking) == 0


def test_waiting_requests_are_bounded_for_each_tenant_and_in_all() -> None:
    parking: Parking[str] = Parking()
    for _ in range(MAX_WAITING_OF_TENANT):
        park(parking, "greedy")
    with pytest.raises(ResourceExhausted, match="too many"):
        park(parking, "greedy")
    for number in range(MAX_WAITING - MAX_WAITING_OF_TENANT):
        park(parking, f"t{number}")
    with pytest.raises(ResourceExhausted) as refused:
        park(parking, "another")
    assert refused.value.retry_after_s == DEFAULT_RETRY_S


def test_the_shortest_wait_that_is_still_ahead_is_named() -> None:
    parking: Parking[str] = Parking()
    assert parking.retry_after_s(0.0) == DEFAULT_RETRY_S
    parking.note_full("n1", 30.0, 0.0)
    parking.note_full("n2", 5.0, 0.0)
    assert parking.retry_after_s(1.0) == 4.0
    assert parking.retry_after_s(6.0) == 24.0
    assert parking.retry_after_s(31.0) == DEFAULT_RETRY_S


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1.0, 0.0, 1e9, None])
def test_a_wait_that_no_node_can_mean_is_replaced(lie: float | None) -> None:
    parking: Parking[str] = Parking()
    parking.note_full("n1", lie, 0.0)
    assert parking.retry_after_s(0.0) == DEFAULT_RETRY_S
