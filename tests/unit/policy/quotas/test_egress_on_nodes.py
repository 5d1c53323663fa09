"""A node of a fleet uses no more of an egress quota, which holds for all nodes together, than its front lets it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.egress_windows import MIN_WINDOW_BYTES
from executor_server.policy.quotas.quotas import Quotas
from tests.support.clock import Clock
from tests.unit.policy.quotas.test_quotas import NOON_S, facts


def quotas_with(**limits: Any) -> Quotas:
    table = QuotasTable.model_validate(limits)
    return Quotas(lambda _tenant: table, None, Clock(NOON_S))


async def test_windows_of_the_network_shrink_to_what_the_node_may_use() -> None:
    quotas = quotas_with(egress_bytes_per_hour=2**40)
    quotas.session_created(facts(), 0.1)
    full = quotas.network_window("t")
    assert full is not None and full > MIN_WINDOW_BYTES
    asked: list[str] = []
    quotas.on_window_change(asked.append)
    quotas.limit_egress({"t": 8 * MIN_WINDOW_BYTES})
    assert asked == ["t"]
    assert quotas.network_window("t") == 2 * MIN_WINDOW_BYTES


async def test_sessions_that_wait_are_asked_again_when_the_node_may_use_more() -> None:
    quotas = quotas_with(egress_bytes_per_hour=2**40)
    quotas.session_created(facts(), 0.1)
    quotas.limit_egress({"t": 0})
    asked: list[str] = []
    quotas.on_window_change(asked.append)
    assert quotas.network_window("t") == 0
    quotas.limit_egress({"t": 0})
    assert asked == []
    quotas.limit_egress({"t": 2**30})
    assert asked == ["t"]
    assert quotas.network_window("t")
    quotas.close()


@pytest.mark.parametrize("moved_bytes", [0, 10])
async def test_sessions_of_a_node_that_may_use_nothing_wait_for_the_next_report(moved_bytes: int) -> None:
    """They asked again in each turn of the event loop: no part of the node's own use would make room for a bound of 0."""
    quotas = quotas_with(egress_bytes_per_hour=2**40)
    quotas.session_created(facts(), 0.1)
    quotas.network_moved(facts(), moved_bytes, 0)
    quotas.limit_egress({"t": 0})
    asked: list[str] = []

    def ask_again(tenant: str) -> None:
        asked.append(tenant)
        assert quotas.network_window(tenant) == 0

    quotas.on_window_change(ask_again)
    ask_again("t")
    for _ in range(20):
        await asyncio.sleep(0)
    assert asked == ["t"]
    quotas.close()
