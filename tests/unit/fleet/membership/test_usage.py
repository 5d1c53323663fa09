"""Quotas hold for all nodes of a fleet together: the front adds up what they report and what it passes on to them."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import pytest

from executor_server.core import ResourceExhausted
from executor_server.fleet.membership.messages import TenantUse
from executor_server.fleet.membership.usage import HOUR_S, FleetUsage
from executor_server.policy import QuotasTable

QUOTAS = QuotasTable(executions=2, cpu_time_s_per_hour=1000, output_bytes_per_hour=10_000, egress_bytes_per_hour=8_000)


class Fleet:
    """The usage at a front of two nodes."""

    def __init__(self, quotas: QuotasTable = QUOTAS) -> None:
        self.quotas = quotas
        self.usage = FleetUsage(lambda tenant: self.quotas)
        self.calls: dict[str, ExitStack] = {}
        for node in ("n1", "n2"):
            self.usage.reported(node, {})

    def report(self, node: str = "n1", **use: Any) -> int | None:
        return self.usage.reported(node, {"t": TenantUse(**use)}).get("t")

    def begin(self, execution: str, node: str = "n1") -> None:
        stack = ExitStack()
        stack.enter_context(self.usage.executing("t", node, ("s", execution)))
        self.calls[execution] = stack

    def end(self, execution: str) -> None:
        self.calls[execution].close()

    def break_off(self, execution: str) -> None:
        """The call ends and the execution may run on."""
        with suppress(ConnectionError), self.calls[execution]:
            raise ConnectionError

    def is_full(self) -> bool:
        try:
            with self.usage.executing("t", "n2", ("s", "one more")):
                return False
        except ResourceExhausted as refusal:
            assert refusal.retry_after_s
            return True


def test_executions_on_all_nodes_count_from_their_call_to_its_end() -> None:
    fleet = Fleet()
    fleet.begin("1", "n1")
    assert not fleet.is_full()
    fleet.begin("2", "n2")
    with pytest.raises(ResourceExhausted, match="quota executions: 2 of 2 are in use"):
        fleet.begin("3")
    fleet.end("1")
    fleet.begin("3")


def test_an_execution_that_has_ended_does_not_count_though_the_last_report_has_it() -> None:
    fleet = Fleet(QuotasTable(executions=1))
    for number in range(3):
        fleet.begin(str(number))
        fleet.report(executions=1)
        fleet.end(str(number))
    assert not fleet.is_full()


def test_an_execution_whose_call_broke_counts_while_its_node_reports_it() -> None:
    fleet = Fleet(QuotasTable(executions=1))
    fleet.begin("1")
    fleet.break_off("1")
    for _ in range(5):
        assert fleet.is_full()
        fleet.report(executions=1)
    for _ in range(2):
        assert fleet.is_full(), "two reports in a row must lack it"
        fleet.report(executions=0)
    assert not fleet.is_full()


def test_an_execution_that_no_report_has_ever_had_is_forgotten() -> None:
    fleet = Fleet(QuotasTable(executions=1))
    fleet.begin("1")
    fleet.break_off("1")
    fleet.report()
    assert fleet.is_full(), "this report may have been built before"
    fleet.report()
    assert not fleet.is_full()


def test_a_repeated_call_joins_its_execution() -> None:
    fleet = Fleet(QuotasTable(executions=1))
    fleet.begin("1")
    fleet.break_off("1")
    fleet.begin("1")
    fleet.end("1")
    assert not fleet.is_full()


def test_a_refused_call_does_not_count() -> None:
    fleet = Fleet(QuotasTable(executions=1))
    with suppress(ConnectionError), fleet.usage.executing("t", "n1", ("s", "1")) as call:
        call.is_over = True
        raise ConnectionError
    assert not fleet.is_full()


def test_executions_of_an_earlier_front_count_and_their_node_decides_about_repeated_calls() -> None:
    usage = FleetUsage(lambda tenant: QuotasTable(executions=1))
    usage.reported("n1", {"t": TenantUse(executions=1)})
    with pytest.raises(ResourceExhausted), usage.executing("t", "n2", ("s", "1")):
        pass
    with usage.executing("t", "n1", ("s", "may be a repeated one")):
        pass
    for _ in range(3):
        usage.reported("n1", {})
    with usage.executing("t", "n2", ("s", "1")):
        pass


def test_long_executions_of_an_earlier_front_don_t_lift_the_quota() -> None:
    """With one on each node, a tenant could have used the whole quota on each of them."""
    usage = FleetUsage(lambda tenant: QuotasTable(executions=2))
    for node in ("n1", "n2"):
        usage.reported(node, {"t": TenantUse(executions=1)})
    with (
        usage.executing("t", "n1", ("s", "1")),
        usage.executing("t", "n2", ("s", "2")),
        pytest.raises(ResourceExhausted, match="quota executions: 2 of 2 are in use"),
        usage.executing("t", "n1", ("s", "3")),
    ):
        pass


@pytest.mark.parametrize(
    ("use", "quota"),
    [({"cpu_time_s": 500.0}, "cpu_time_s_per_hour"), ({"output_bytes": 5_000}, "output_bytes_per_hour")],
)
def test_sums_of_an_hour_hold_over_all_nodes(use: dict[str, Any], quota: str) -> None:
    fleet = Fleet()
    fleet.report("n1", **use)
    assert not fleet.is_full()
    fleet.report("n2", **use)
    with pytest.raises(ResourceExhausted, match=f"quota {quota}: .* on all nodes"):
        fleet.begin("1")
    with pytest.raises(ResourceExhausted, match=f"quota {quota}: .* on all nodes"):
        fleet.usage.check_use("t")


def test_what_is_left_of_the_egress_quota_is_divided_among_the_nodes() -> None:
    fleet = Fleet()
    assert fleet.report("n1", egress_bytes=1_000) == 8_000
    assert fleet.report("n2", egress_bytes=3_000) == 3_000 + 4_000 // 2
    assert fleet.report("n1", egress_bytes=5_000) == 5_000
    fleet.quotas = QuotasTable()
    assert fleet.report("n1", egress_bytes=5_000) is None


def test_the_use_of_a_lost_node_counts_for_an_hour_and_its_executions_do_not() -> None:
    fleet = Fleet()
    fleet.begin("1")
    fleet.report("n1", executions=2, cpu_time_s=1000.0)
    fleet.usage.lost("n1", 0.0)
    assert fleet.usage.use("t") == TenantUse(cpu_time_s=1000.0)
    fleet.usage.prune(HOUR_S - 1)
    assert fleet.is_full()
    fleet.usage.prune(HOUR_S)
    assert fleet.usage.tenants() == []


def test_a_lost_node_that_reports_again_replaces_what_was_kept() -> None:
    fleet = Fleet()
    fleet.report("n1", output_bytes=4_000)
    fleet.usage.lost("n1", 0.0)
    fleet.report("n1", output_bytes=1_000)
    fleet.usage.prune(2 * HOUR_S)
    assert fleet.usage.use("t") == TenantUse(output_bytes=1_000)


def test_tenants_without_use_are_forgotten() -> None:
    fleet = Fleet()
    fleet.report(executions=1, cpu_time_s=1.0)
    fleet.usage.reported("n1", {})
    fleet.usage.reported("n1", {})
    assert fleet.usage.tenants() == []
