"""A node of a fleet uses no more of a quota that holds for all nodes together than its front lets it."""

from __future__ import annotations

from typing import Any

import pytest

from executor_server.core.errors import Reason, ResourceExhausted
from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.egress_windows import MIN_WINDOW_BYTES
from executor_server.policy.quotas.quota_checks import NodeShare
from executor_server.policy.quotas.quotas import Quotas
from tests.support.clock import Clock
from tests.unit.policy.quotas.test_quotas import LIMITS, NOON_S, facts, used


def quotas_with(**limits: Any) -> Quotas:
    table = QuotasTable.model_validate(limits)
    return Quotas(lambda _tenant: table, None, Clock(NOON_S))


def run(quotas: Quotas, execution_id: str, **use: Any) -> None:
    release = quotas.reserve_execution(facts(), execution_id, LIMITS)
    quotas.execution_started(facts(), execution_id)
    release()
    if use:
        quotas.execution_ended(facts(), execution_id, used(**use), 1.0)


def test_executions_above_the_share_are_refused_as_by_a_quota() -> None:
    quotas = quotas_with(executions=8)
    quotas.session_created(facts(), 0.1)
    quotas.share_with_nodes({"t": NodeShare(executions=1)})
    run(quotas, "e1")
    with pytest.raises(ResourceExhausted, match=r"quota executions: .* other nodes") as refusal:
        run(quotas, "e2")
    assert refusal.value.reason is Reason.QUOTA_EXCEEDED and refusal.value.retry_after_s
    quotas.share_with_nodes({"t": NodeShare(executions=2)})
    run(quotas, "e2")


@pytest.mark.parametrize(
    ("share", "use", "quota"),
    [
        (NodeShare(cpu_time_s=10.0), {"cpu_time_s": 10.0}, "cpu_time_s_per_hour"),
        (NodeShare(output_bytes=100), {"output_bytes": 100}, "output_bytes_per_hour"),
    ],
)
def test_use_above_the_share_is_refused(share: NodeShare, use: dict[str, Any], quota: str) -> None:
    quotas = quotas_with()
    quotas.session_created(facts(), 0.1)
    quotas.share_with_nodes({"t": share})
    run(quotas, "e1", **use)
    with pytest.raises(ResourceExhausted, match=f"quota {quota}: "):
        run(quotas, "e2")


def test_the_quota_holds_beside_the_share() -> None:
    quotas = quotas_with(executions=1)
    quotas.session_created(facts(), 0.1)
    quotas.share_with_nodes({"t": NodeShare(executions=5)})
    run(quotas, "e1")
    with pytest.raises(ResourceExhausted, match="quota executions: 1 at one time"):
        run(quotas, "e2")


def test_a_share_holds_until_another_names_the_tenant() -> None:
    quotas = quotas_with()
    quotas.session_created(facts(), 0.1)
    quotas.share_with_nodes({"t": NodeShare(executions=0)})
    quotas.share_with_nodes({"other": NodeShare(executions=7)})
    with pytest.raises(ResourceExhausted):
        run(quotas, "e1")
    quotas.share_with_nodes({"t": NodeShare()})
    run(quotas, "e1")


def test_shares_of_forgotten_tenants_are_forgotten() -> None:
    quotas = quotas_with()
    quotas.session_created(facts(), 0.1)
    quotas.share_with_nodes({"t": NodeShare(executions=0)})
    quotas.session_ended(facts(), "deleted")
    assert quotas.tenants() == [] and quotas._shares == {}


async def test_windows_of_the_network_shrink_to_the_share() -> None:
    quotas = quotas_with(egress_bytes_per_hour=2**40)
    quotas.session_created(facts(), 0.1)
    full = quotas.network_window("t")
    assert full is not None and full > MIN_WINDOW_BYTES
    asked: list[str] = []
    quotas.on_window_change(asked.append)
    quotas.share_with_nodes({"t": NodeShare(egress_bytes=8 * MIN_WINDOW_BYTES)})
    assert asked == ["t"]
    assert quotas.network_window("t") == 2 * MIN_WINDOW_BYTES


async def test_sessions_that_wait_for_the_share_are_asked_again_when_it_grows() -> None:
    quotas = quotas_with()
    quotas.session_created(facts(), 0.1)
    quotas.share_with_nodes({"t": NodeShare(egress_bytes=0)})
    asked: list[str] = []
    quotas.on_window_change(asked.append)
    assert quotas.network_window("t") == 0
    quotas.share_with_nodes({"t": NodeShare(egress_bytes=0)})
    assert asked == []
    quotas.share_with_nodes({"t": NodeShare(egress_bytes=2**30)})
    assert asked == ["t"]
    assert quotas.network_window("t")
    quotas.close()
