"""A node's end of the shares of quotas, as executor_server/policy/quotas has it, without its use and its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executor_server.fleet.membership import Allowance, TenantUse
from executor_server.fleet.membership.shares import first_allowance
from executor_server.policy import QuotasTable


class NodeShares:
    """A node's end: what it may use for each tenant. `quotas_of` are those of the policy that it has in force."""

    def __init__(self, quotas_of: Callable[[str], QuotasTable]) -> None:
        self._quotas_of = quotas_of
        self._allowances: dict[str, Allowance] = {}

    def renewed(self, allowances: Mapping[str, Allowance]) -> None:
        """Takes the allowances of a renewal that has extended the lease."""
        self._allowances.update(allowances)

    def reporting(self, tenants: Mapping[str, TenantUse]) -> None:
        """Drops the allowances of tenants that the next report does not have. Call it when that is put together."""
        self._allowances = {tenant: each for tenant, each in self._allowances.items() if tenant in tenants}

    def allowance(self, tenant: str) -> Allowance:
        """Returns the most that the node may use for a tenant, its use so far included."""
        found = self._allowances.get(tenant)
        return found if found is not None else first_allowance(self._quotas_of(tenant))
