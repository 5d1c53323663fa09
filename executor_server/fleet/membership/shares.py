"""Shares of quotas: how much of a tenant's quota each of its nodes may use until its next renewal.

Each report has a tenant's use on its node, as sums: executions now; CPU time, output and egress bytes within the last
hour. The answer has allowances, which are sums too, so nothing is counted twice when a message is lost or repeated.

A node gets what it has used and an equal part of what is left of the quota. That alone would not do: the other nodes
may be using what they were granted, which has not been reported yet. So the front keeps for each node the most that it
may use by now (`outstanding`): the largest allowance since the last one that the node has confirmed (`renewed` in its
reports), or its reported use if that is larger. No allowance lets the sum over the nodes exceed the quota.

There is one exception: a node may always have one execution more, while fewer run than the quota says. Otherwise a
quota of 2 on three nodes would refuse one of them what no other one uses.

The bound, for a tenant on n nodes:

- executions: at most quota + n - 1 at one time, whatever messages are lost or late;
- sums of an hour: the quota, beside what the single daemon lets pass, too: executions that run when it is reached.

Where a node has no allowance for a tenant yet, it uses `first_allowance`: one execution, and a sixteenth of each sum.
The front counts these parts as granted from the moment at which it places a session there; on more than sixteen such
nodes at one time they can exceed a sum's quota.

When a front starts again, the allowances of the earlier start hold for up to lease_s beside the new ones: until then
the bound is twice as high. The use of a node that is lost counts for an hour more, or until the node reports again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from executor_server.fleet.membership.messages import MAX_NODE_TENANTS, Allowance, TenantUse
from executor_server.policy import QuotasTable

HOUR_S = 3600.0
FIRST_PART = 16
# Reports without a tenant after which its account on the node is dropped: a creation is over by then.
_MAX_IDLE_REPORTS = 240
_MICRO = 1_000_000

Amounts = tuple[int, int, int, int]
"""Executions, microseconds of CPU time, bytes of output, bytes of egress. Integers: sums of them don't drift."""
Limits = tuple[int | None, int | None, int | None, int | None]
_NOTHING: Amounts = (0, 0, 0, 0)


def first_allowance(quotas: QuotasTable) -> Allowance:
    """Returns what a node may use for a tenant before the front has sent it an allowance."""
    return _as_allowance(_first(_limits_of(quotas)))


@dataclass(slots=True)
class _Account:
    """A tenant on one node. `most`: the most that the node may have used by now."""

    confirmed: Limits
    use: Amounts = _NOTHING
    most: Amounts = _NOTHING
    unconfirmed: OrderedDict[int, Limits] = field(default_factory=OrderedDict)  # by sequence
    idle_reports: int = 0

    def confirm(self, sequence: int) -> None:
        while self.unconfirmed and next(iter(self.unconfirmed)) <= sequence:
            _, self.confirmed = self.unconfirmed.popitem(last=False)

    def count(self) -> None:
        self.most = self.use
        for limits in (self.confirmed, *self.unconfirmed.values()):
            self.most = _larger(self.most, limits)


@dataclass(slots=True)
class _Tenant:
    """The accounts of a tenant by node, and their sums."""

    accounts: dict[str, _Account] = field(default_factory=dict)
    active: int = 0
    use: Amounts = _NOTHING
    most: Amounts = _NOTHING

    def take_out(self, account: _Account) -> None:
        self.use, self.most = _minus(self.use, account.use), _minus(self.most, account.most)
        self.active -= not account.idle_reports

    def put_in(self, account: _Account) -> None:
        account.count()
        self.use, self.most = _plus(self.use, account.use), _plus(self.most, account.most)
        self.active += not account.idle_reports


class Shares:
    """The allowances that one front has given. `quotas_of` is called for each answer: a new policy holds at once."""

    def __init__(self, quotas_of: Callable[[str], QuotasTable]) -> None:
        self._quotas_of = quotas_of
        self._tenants: dict[str, _Tenant] = {}
        self._tenants_of: dict[str, set[str]] = {}  # by node
        self._lost_s: dict[str, float] = {}  # by node

    def placed(self, tenant: str, node: str) -> None:
        """Notes that a session of the tenant is about to be on a node, which may use its first allowance then."""
        if node not in self._tenants.get(tenant, _Tenant()).accounts:
            self._open(tenant, node)

    def reported(
        self, node: str, tenants: Mapping[str, TenantUse], sequence: int, renewed: int
    ) -> dict[str, Allowance]:
        """Takes the use that a report has; returns the allowances for the renewal that answers it."""
        self._lost_s.pop(node, None)
        for tenant in self._tenants_of.get(node, set()) - tenants.keys():
            self._note_idle(tenant, node, renewed)
        allowances = {}
        for tenant, use in tenants.items():
            counted, account = self._taken_out(tenant, node)
            account.use = (use.executions, int(use.cpu_time_s * _MICRO), use.output_bytes, use.egress_bytes)
            account.idle_reports = 0
            account.confirm(renewed)
            counted.put_in(account)
            limits = _limits_of(self._quotas_of(tenant))
            if limits != (None, None, None, None):
                allowances[tenant] = _as_allowance(self._allow(counted, account, limits, sequence))
        return allowances

    def linked(self, node: str) -> None:
        """Notes that a link begins. Any allowance of the link before may hold until one of this link is confirmed."""
        for tenant in self._tenants_of.get(node, ()):
            account = self._tenants[tenant].accounts[node]
            for limits in account.unconfirmed.values():
                account.confirmed = _either(account.confirmed, limits)
            account.unconfirmed.clear()

    def lost(self, node: str, now_s: float) -> None:
        """Keeps the hour's use of a node that is lost; nothing runs there, and it may use nothing more."""
        self._lost_s[node] = now_s
        for tenant in list(self._tenants_of.get(node, ())):
            counted, account = self._taken_out(tenant, node)
            account.unconfirmed.clear()
            account.confirmed = _NOTHING
            account.use = (0, *account.use[1:])
            account.idle_reports = 1
            counted.put_in(account)
            if account.use == _NOTHING:
                self._drop(tenant, node)

    def prune(self, now_s: float) -> None:
        """Forgets the use of nodes that were lost an hour ago."""
        for node in [node for node, lost_s in self._lost_s.items() if now_s - lost_s >= HOUR_S]:
            del self._lost_s[node]
            for tenant in list(self._tenants_of.get(node, ())):
                self._drop(tenant, node)

    def tenants(self) -> list[str]:
        """Returns the tenants with any use."""
        return list(self._tenants)

    def use(self, tenant: str) -> TenantUse:
        """Returns the use of a tenant over all nodes, as far as it was reported."""
        executions, cpu, output_bytes, egress_bytes = self._tenants.get(tenant, _Tenant()).use
        return TenantUse(executions, cpu / _MICRO, output_bytes, egress_bytes)

    def _allow(self, counted: _Tenant, account: _Account, limits: Limits, sequence: int) -> Limits:
        parts: list[int | None] = []
        for index, limit in enumerate(limits):
            if limit is None:
                parts.append(None)
                continue
            own = account.use[index]
            others = counted.most[index] - account.most[index]
            left = limit - counted.use[index]
            part = max(own, min(own + max(0, left) // counted.active, limit - others))
            is_least = index == 0 and left >= 1 and others + own + 1 <= limit + len(counted.accounts) - 1
            parts.append(max(part, own + 1) if is_least else part)
        granted: Limits = (parts[0], parts[1], parts[2], parts[3])
        counted.take_out(account)
        account.unconfirmed[sequence] = granted
        counted.put_in(account)
        return granted

    def _note_idle(self, tenant: str, node: str, renewed: int) -> None:
        """The node has dropped its allowance for a tenant that it does not report, and has its first one again."""
        counted, account = self._taken_out(tenant, node)
        account.use = _NOTHING
        account.confirm(renewed)
        account.confirmed = _first(_limits_of(self._quotas_of(tenant)))
        account.idle_reports += 1
        counted.put_in(account)
        if account.idle_reports > _MAX_IDLE_REPORTS or len(self._tenants_of[node]) > MAX_NODE_TENANTS:
            self._drop(tenant, node)

    def _taken_out(self, tenant: str, node: str) -> tuple[_Tenant, _Account]:
        """Returns the account, out of the sums: `put_in` it when it is changed."""
        counted = self._tenants.get(tenant)
        account = counted.accounts.get(node) if counted is not None else None
        if counted is None or account is None:
            counted, account = self._open(tenant, node)
        counted.take_out(account)
        return counted, account

    def _open(self, tenant: str, node: str) -> tuple[_Tenant, _Account]:
        counted = self._tenants.setdefault(tenant, _Tenant())
        account = _Account(_first(_limits_of(self._quotas_of(tenant))))
        counted.accounts[node] = account
        counted.put_in(account)
        self._tenants_of.setdefault(node, set()).add(tenant)
        return counted, account

    def _drop(self, tenant: str, node: str) -> None:
        counted = self._tenants[tenant]
        counted.take_out(counted.accounts.pop(node))
        if not counted.accounts:
            del self._tenants[tenant]
        self._tenants_of[node].discard(tenant)
        if not self._tenants_of[node]:
            del self._tenants_of[node]


def _limits_of(quotas: QuotasTable) -> Limits:
    cpu_time_s = quotas.cpu_time_s_per_hour
    return (
        quotas.executions,
        None if cpu_time_s is None else int(cpu_time_s * _MICRO),
        quotas.output_bytes_per_hour,
        quotas.egress_bytes_per_hour,
    )


def _first(limits: Limits) -> Limits:
    executions, *sums = (None if limit is None else limit // FIRST_PART for limit in limits)
    return (None if executions is None else 1, sums[0], sums[1], sums[2])


def _as_allowance(limits: Limits) -> Allowance:
    executions, cpu, output_bytes, egress_bytes = limits
    return Allowance(executions, None if cpu is None else cpu / _MICRO, output_bytes, egress_bytes)


def _either(left: Limits, right: Limits) -> Limits:
    """The larger of each; None, which is no limit, is the largest."""
    a, b, c, d = (None if x is None or y is None else max(x, y) for x, y in zip(left, right, strict=True))
    return a, b, c, d


def _larger(amounts: Amounts, limits: Limits) -> Amounts:
    a, b, c, d = (x if y is None else max(x, y) for x, y in zip(amounts, limits, strict=True))
    return a, b, c, d


def _plus(left: Amounts, right: Amounts) -> Amounts:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2], left[3] + right[3]


def _minus(left: Amounts, right: Amounts) -> Amounts:
    return left[0] - right[0], left[1] - right[1], left[2] - right[2], left[3] - right[3]
