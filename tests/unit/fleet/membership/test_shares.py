"""Allowances over nodes never let a tenant pass its quota by more than the bound that shares.py states."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.fleet.membership.messages import Allowance, TenantUse
from executor_server.fleet.membership.shares import HOUR_S, Shares, first_allowance
from executor_server.policy import QuotasTable
from tests.support.simulated_fleet.shares import NodeShares

QUOTAS = QuotasTable(executions=4, cpu_time_s_per_hour=1000, output_bytes_per_hour=10_000, egress_bytes_per_hour=8000)


def shares(quotas: QuotasTable = QUOTAS) -> Shares:
    return Shares(lambda tenant: quotas)


def test_a_tenant_on_one_node_gets_its_whole_quota() -> None:
    allowed = shares().reported("n1", {"t": TenantUse()}, 1, 0)
    assert allowed == {"t": Allowance(4, 1000.0, 10_000, 8000)}


def test_nodes_share_the_rest_equally_and_use_counts_for_all() -> None:
    fleet = shares()
    for sequence in range(1, 8):
        for node, use in (("n1", TenantUse(1, 400.0)), ("n2", TenantUse(0, 0.0))):
            allowed = fleet.reported(node, {"t": use}, sequence, sequence - 1)["t"]
            assert allowed.cpu_time_s is not None
            if sequence > 3:
                assert allowed.cpu_time_s == use.cpu_time_s + 300.0
    assert fleet.use("t") == TenantUse(1, 400.0)


def test_a_tenant_without_quotas_has_no_allowance() -> None:
    assert shares(QuotasTable()).reported("n1", {"t": TenantUse(5)}, 1, 0) == {}


def test_a_field_without_a_quota_stays_open() -> None:
    allowed = shares(QuotasTable(executions=2)).reported("n1", {"t": TenantUse()}, 1, 0)["t"]
    assert allowed == Allowance(2)


def test_every_node_may_run_one_execution_while_there_is_room() -> None:
    fleet = shares(QuotasTable(executions=1))
    for node in ("n1", "n2", "n3"):
        fleet.placed("t", node)
    for node in ("n1", "n2", "n3"):
        assert fleet.reported(node, {"t": TenantUse()}, 1, 0)["t"].executions == 1
    assert fleet.reported("n1", {"t": TenantUse(1)}, 2, 1)["t"].executions == 1
    assert fleet.reported("n2", {"t": TenantUse()}, 2, 1)["t"].executions == 0


def test_an_allowance_that_was_not_confirmed_is_not_given_to_another_node() -> None:
    fleet = shares(QuotasTable(output_bytes_per_hour=1000))
    fleet.reported("n1", {"t": TenantUse()}, 1, 0)
    assert fleet.reported("n2", {"t": TenantUse()}, 1, 0)["t"].output_bytes == 0
    fleet.reported("n1", {"t": TenantUse()}, 2, 1)
    assert fleet.reported("n2", {"t": TenantUse()}, 2, 1)["t"].output_bytes == 0
    fleet.reported("n1", {"t": TenantUse()}, 3, 2)
    assert fleet.reported("n2", {"t": TenantUse()}, 3, 2)["t"].output_bytes == 500


def test_the_use_of_a_lost_node_counts_for_an_hour() -> None:
    fleet = shares()
    fleet.reported("n1", {"t": TenantUse(3, 600.0)}, 1, 0)
    fleet.lost("n1", 100.0)
    assert fleet.use("t") == TenantUse(0, 600.0)
    assert fleet.reported("n2", {"t": TenantUse()}, 1, 0)["t"] == Allowance(4, 400.0, 10_000, 8000)
    fleet.prune(100.0 + HOUR_S)
    assert fleet.use("t") == TenantUse()


def test_tenants_without_end_are_forgotten() -> None:
    fleet = shares()
    for sequence in range(1, 1000):
        fleet.reported("n1", {f"t{sequence}": TenantUse()}, sequence, sequence - 1)
    assert len(fleet._tenants) <= 250


def test_a_node_without_an_allowance_uses_the_first_one() -> None:
    node = NodeShares(lambda tenant: QUOTAS)
    assert node.allowance("t") == first_allowance(QUOTAS) == Allowance(1, 62.5, 625, 500)
    node.renewed({"t": Allowance(3)})
    node.reporting({"t": TenantUse()})
    assert node.allowance("t") == Allowance(3)
    node.reporting({})
    assert node.allowance("t") == Allowance(1, 62.5, 625, 500)
    assert NodeShares(lambda tenant: QuotasTable()).allowance("t") == Allowance()


class Fleet:
    """Nodes that use all that they may, at any moment, while reports and answers are late or lost."""

    def __init__(self, nodes: int, quotas: QuotasTable, seed: int) -> None:
        self.draws = random.Random(seed)
        self.front = shares(quotas)
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.ends = {node: NodeShares(lambda tenant: quotas) for node in self.nodes}
        self.running = dict.fromkeys(self.nodes, 0)
        self.output = dict.fromkeys(self.nodes, 0)
        self.sequence = dict.fromkeys(self.nodes, 0)
        self.confirmed = dict.fromkeys(self.nodes, 0)
        for node in self.nodes:
            self.front.placed("t", node)

    def step(self) -> None:
        node = self.draws.choice(self.nodes)
        end, act = self.ends[node], self.draws.random()
        if act < 0.4:
            allowed = end.allowance("t")
            assert allowed.executions is not None and allowed.output_bytes is not None
            if self.running[node] < allowed.executions:
                self.running[node] += 1
            self.output[node] = max(self.output[node], allowed.output_bytes)
        elif act < 0.6:
            self.running[node] = self.draws.randint(0, self.running[node])
        else:
            self.exchange(node, end)

    def exchange(self, node: str, end: NodeShares) -> None:
        self.sequence[node] += 1
        use = {"t": TenantUse(self.running[node], 0.0, self.output[node])}
        end.reporting(use)
        if self.draws.random() < 0.2:
            return  # the report is lost
        allowed = self.front.reported(node, use, self.sequence[node], self.confirmed[node])
        if self.draws.random() > 0.3:
            end.renewed(allowed)
            self.confirmed[node] = self.sequence[node]


@pytest.mark.parametrize("executions", [1, 3, 10])
@given(nodes=st.integers(1, 6), seed=st.integers(0, 2**32))
def test_the_bound_holds_whatever_is_late_or_lost(executions: int, nodes: int, seed: int) -> None:
    quota_bytes = 16_000
    fleet = Fleet(nodes, QuotasTable(executions=executions, output_bytes_per_hour=quota_bytes), seed)
    for _ in range(150):
        fleet.step()
        assert sum(fleet.running.values()) <= executions + nodes - 1
        assert sum(fleet.output.values()) <= quota_bytes
