"""Adds up what tenants use on all nodes, and checks the quotas that depend on it.

Nodes report sums for each tenant: executions now; CPU time, output and egress bytes within the last hour. Each node
holds its tenants to the whole quota by itself. The front checks each execution before it passes the call on:

- CPU time and output: against the reported sums, also before other calls that start code. A quota can be exceeded by
  what runs when it is reached, and by what the nodes have not reported yet.
- Executions: it counts those that it has passed on, and those that nodes report without an open call. On a node with
  executions of an earlier front a call may repeat one, so there the front counts only its own: at most the quota again.

Traffic moves without a call that the front could refuse. So the front's answer to a report says how much egress a
tenant may use on that node: its use there, and an equal share of the rest of its quota. The quota can be exceeded by
the traffic between two reports.

The use of a lost node counts for one more hour, or until the node reports again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from executor_server.core import Reason, ResourceExhausted
from executor_server.fleet.membership.messages import TenantUse
from executor_server.policy import QuotasTable
from executor_server.policy.quotas import check_number

HOUR_S = 3600.0
EXECUTION_RETRY_S = 1.0
SUM_RETRY_S = 5.0
_MICRO = 1_000_000

Sums = tuple[int, int, int]
"""Microseconds of CPU time, bytes of output, bytes of egress. Integers: sums of them don't drift."""
Execution = tuple[str, str]
"""Session and execution id."""


@dataclass(slots=True)
class _Call:
    """An execution that the front has passed on to a node."""

    reports: int  # reports of the node so far; the one after the next is the first that surely includes the execution
    streams: int = 1  # open calls that wait for its end; 0: it may run on without one
    is_over: bool = False


@dataclass(slots=True)
class _OnNode:
    """The use of a tenant on one node."""

    sums: Sums = (0, 0, 0)
    executions: int = 0  # as reported
    earlier: int = 0  # executions that no call of this front has begun
    calls: dict[Execution, _Call] = field(default_factory=dict)

    @property
    def is_nothing(self) -> bool:
        return not (any(self.sums) or self.executions or self.earlier or self.calls)

    def take(self, executions: int, reports: int) -> None:
        """Takes the reported number; forgets executions without an open call that two reports in a row lack."""
        before, self.executions = self.executions, executions
        waited_for = sum(1 for call in self.calls.values() if call.streams and call.reports + 2 <= reports)
        alone = [key for key, call in self.calls.items() if not call.streams and call.reports + 2 <= reports]
        missing = self.earlier + len(alone) - max(0, max(before, executions) - waited_for)
        for key in alone[: max(0, missing)]:
            del self.calls[key]
        self.earlier = max(0, self.earlier - max(0, missing - len(alone)))


@dataclass(slots=True)
class _Tenant:
    nodes: dict[str, _OnNode] = field(default_factory=dict)
    sums: Sums = (0, 0, 0)
    executions: int = 0


class FleetUsage:
    """The use that the nodes of one front report. `quotas_of` is called for each check: a new policy holds at once."""

    def __init__(self, quotas_of: Callable[[str], QuotasTable]) -> None:
        self._quotas_of = quotas_of
        self._tenants: dict[str, _Tenant] = {}
        self._tenants_of: dict[str, set[str]] = {}  # by node
        self._reports: dict[str, int] = {}  # taken from each node
        self._lost_s: dict[str, float] = {}  # by node

    def reported(self, node: str, tenants: Mapping[str, TenantUse]) -> dict[str, int]:
        """Takes the use in a report. Returns the bytes of egress that each tenant may use on the node."""
        self._lost_s.pop(node, None)
        is_first = node not in self._reports
        reports = self._reports[node] = self._reports.get(node, 0) + 1
        for tenant in self._tenants_of.get(node, set()) | tenants.keys():
            use = tenants.get(tenant, TenantUse())
            here = self._on(tenant, node)
            if is_first:
                here.earlier = max(0, use.executions - len(here.calls))
            before = here.executions
            here.take(use.executions, reports)
            self._tenants[tenant].executions += here.executions - before
            self._set_sums(tenant, here, (int(use.cpu_time_s * _MICRO), use.output_bytes, use.egress_bytes))
            self._drop_unused(tenant, node)
        return {tenant: most for tenant in tenants if (most := self._egress_allowed(tenant, node)) is not None}

    def _egress_allowed(self, tenant: str, node: str) -> int | None:
        quota = self._quotas_of(tenant).egress_bytes_per_hour
        if quota is None:
            return None
        found = self._tenants.get(tenant, _Tenant())
        own = found.nodes.get(node, _OnNode()).sums[2]
        return own + max(0, quota - found.sums[2]) // max(1, len(found.nodes))

    def lost(self, node: str, now_s: float) -> None:
        """Keeps the hour's use of a node that is lost; nothing runs there any more."""
        self._lost_s[node] = now_s
        self._reports.pop(node, None)
        for tenant in list(self._tenants_of.get(node, ())):
            here = self._on(tenant, node)
            self._tenants[tenant].executions -= here.executions
            here.executions = here.earlier = 0
            here.calls.clear()
            self._drop_unused(tenant, node)

    def prune(self, now_s: float) -> None:
        """Forgets the use of nodes that were lost an hour ago."""
        for node in [node for node, lost_s in self._lost_s.items() if now_s - lost_s >= HOUR_S]:
            del self._lost_s[node]
            for tenant in list(self._tenants_of.get(node, ())):
                self._set_sums(tenant, self._on(tenant, node), (0, 0, 0))
                self._drop_unused(tenant, node)

    def tenants(self) -> list[str]:
        """Returns the tenants with any use."""
        return list(self._tenants)

    def use(self, tenant: str) -> TenantUse:
        """Returns the use of a tenant over all nodes, as far as it was reported."""
        found = self._tenants.get(tenant, _Tenant())
        cpu, output_bytes, egress_bytes = found.sums
        return TenantUse(found.executions, cpu / _MICRO, output_bytes, egress_bytes)

    # -- executions ------------------------------------------------------------------------------------------------

    @contextmanager
    def executing(self, tenant: str, node: str, execution: Execution) -> Iterator[_Call]:
        """Counts an execution that the block passes on to a node. Raises ResourceExhausted.

        The execution ends with the block. If the block raises without setting `is_over`, the execution may run on, and
        counts while the node reports it.
        """
        here = self._on(tenant, node)
        call = here.calls.get(execution)
        if call is not None:  # a repeated call joins its execution
            call.streams += 1
        else:
            try:
                self._check(tenant, here)
            except ResourceExhausted:
                self._drop_unused(tenant, node)
                raise
            call = here.calls[execution] = _Call(self._reports.get(node, 0))
        try:
            yield call
            call.is_over = True
        finally:
            call.streams -= 1
            call.reports = self._reports.get(node, 0)
            if call.is_over and here.calls.get(execution) is call:
                del here.calls[execution]
                self._drop_unused(tenant, node)

    def _check(self, tenant: str, here: _OnNode) -> None:
        quotas, found = self._quotas_of(tenant), self._tenants[tenant]
        count = sum(len(each.calls) for each in found.nodes.values())
        if not here.earlier:  # else the call may repeat one of those, which the node knows
            count += sum(each.earlier for each in found.nodes.values())
        check_number("executions", count, quotas.executions, EXECUTION_RETRY_S)
        self.check_use(tenant)

    def check_use(self, tenant: str) -> None:
        """Raises ResourceExhausted if the tenant has used its CPU time or its output of an hour on all nodes."""
        quotas, found = self._quotas_of(tenant), self._tenants.get(tenant, _Tenant())
        cpu_time_s = found.sums[0] / _MICRO
        for quota, used, most in (
            ("cpu_time_s_per_hour", cpu_time_s, quotas.cpu_time_s_per_hour),
            ("output_bytes_per_hour", found.sums[1], quotas.output_bytes_per_hour),
        ):
            if most is not None and used >= most:
                raise ResourceExhausted(
                    Reason.QUOTA_EXCEEDED,
                    f"quota {quota}: {most:g}, and {used:g} are used on all nodes; there is room again within the hour",
                    retry_after_s=SUM_RETRY_S,
                )

    # -- accounts --------------------------------------------------------------------------------------------------

    def _on(self, tenant: str, node: str) -> _OnNode:
        self._tenants_of.setdefault(node, set()).add(tenant)
        return self._tenants.setdefault(tenant, _Tenant()).nodes.setdefault(node, _OnNode())

    def _set_sums(self, tenant: str, here: _OnNode, sums: Sums) -> None:
        found = self._tenants[tenant]
        a, b, c = (total - before + now for total, before, now in zip(found.sums, here.sums, sums, strict=True))
        found.sums, here.sums = (a, b, c), sums

    def _drop_unused(self, tenant: str, node: str) -> None:
        found = self._tenants.get(tenant)
        if found is None or node not in found.nodes or not found.nodes[node].is_nothing:
            return
        del found.nodes[node]
        self._tenants_of[node].discard(tenant)
        if not self._tenants_of[node]:
            del self._tenants_of[node]
        if not found.nodes:
            del self._tenants[tenant]
