"""Policies of single tests behind a front: each is that of a tenant of its own, in the file that the front distributes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from executor_server.policy.identity import TokenFile
from tests.contract.policies import policy_text
from tests.support.fleet_daemon import NODES
from tests.support.machines import Fleet
from tests.support.polling import eventually_async


class WirePolicies:
    """Owns the policy file of a front, and makes its tenants."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count(1)
        self._profiles: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        self._write()

    async def tenant_under(self, fleet: Fleet, profile: str) -> tuple[str, str]:
        """Returns a tenant with this profile and its token. Tests share it until one changes its profile."""
        found = next((tenant for tenant, text in self._profiles.items() if text == profile), None)
        if found is None:
            found = f"t{next(self._numbers)}"
            self._tokens[found] = TokenFile(fleet.front.state_dir / "tokens.json").new(found, "test")[1]
            await self.change(fleet, found, profile)
        return found, self._tokens[found]

    async def change(self, fleet: Fleet, tenant: str, profile: str) -> None:
        """Gives a tenant another profile; returns when it is in force on all nodes."""
        self._profiles[tenant] = profile
        self._write()
        fleet.reload()
        serving = dict.fromkeys(NODES, "SERVING")
        assert await eventually_async(lambda: fleet.states() == serving), f"{fleet.states()}\n{fleet.logs()}"

    def _write(self) -> None:
        """The file is replaced: its beginning can be a valid policy."""
        beside = self.path.with_suffix(".new")
        beside.write_text(policy_text(self._profiles))
        os.replace(beside, self.path)  # noqa: PTH105 - as the policy's readers see it
