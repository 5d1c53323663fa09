"""The daemon's egress service: its process runs when the policy in force grants a network, or a session has one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from executor_server.backends import HostFinding
from executor_server.core import SandboxFailure
from executor_server.core.config import Config, ConfigError, StateDir
from executor_server.network.egress import EgressError, EgressService, EgressSettings, try_connection
from executor_server.policy import Policy

_log = structlog.get_logger(__name__)


class EgressOwner:
    """Owns the service. If the policy grants no network, only this object exists."""

    def __init__(self, config: Config, own_state: StateDir) -> None:
        self.service = EgressService(_settings(config), own_state.egress_path)
        self._preparing: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Checks the files of secrets. Raises ConfigError."""
        try:
            await self.service.start()
        except EgressError as error:
            raise ConfigError([f"egress: {error}"]) from error

    async def close(self) -> None:
        for task in (self._preparing, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.service.close()

    def bundle(self) -> Path:
        """Returns the CA bundle that a backend puts into its sandboxes. Raises SandboxFailure."""
        try:
            return self.service.ca_bundle
        except EgressError as error:
            raise SandboxFailure(f"there is no file of certificate authorities for it: {error}") from error

    def follow(self, policy: Policy) -> None:
        """Starts the process for a policy that grants a network, so that its first session need not wait for it.

        It starts in the background: sessions of an earlier daemon that wait for it lose nothing, sessions without a
        network don't need it, and if it can't be started, each session that needs it reports that.
        """
        if policy.grants_network and (self._preparing is None or self._preparing.done()):
            self._preparing = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        try:
            await self.service.prepare()
        except EgressError as error:
            _log.error("egress_proxy_not_ready", error=str(error))

    async def reload(self) -> None:
        """Reads the secrets again. Raises ConfigError; then the earlier ones stay in use."""
        try:
            await self.service.reload_secrets()
        except EgressError as error:
            raise ConfigError([f"egress: {error}"]) from error

    def reload_soon(self) -> None:
        """Reads the secrets again, in the background; a problem is logged."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._reload_logged())

    async def _reload_logged(self) -> None:
        try:
            await self.reload()
        except ConfigError as error:
            _log.error("egress_secrets_not_read", problems=error.problems)


async def network_finding(config: Config) -> HostFinding:
    """Reports whether programs in sandboxes of this host can connect through the proxy."""
    try:
        address = await try_connection(_settings(config))
    except EgressError as error:
        remedy = "Sessions with a network reach nothing until this is fixed; see the lines above and [egress]."
        return HostFinding("network", False, f"No connection through the egress proxy: {error}", remedy, required=False)
    tried = "a connection was made through it" if address else "not tried, since this host has only loopback addresses"
    return HostFinding("network", True, f"The egress proxy runs: {tried}.")


def _settings(config: Config) -> EgressSettings:
    section = config.egress
    return EgressSettings(
        internal=section.internal,
        resolver=section.resolver,
        upstream_proxy=section.upstream_proxy,
        upstream_resolves=section.upstream_resolves,
        ca_file=section.ca_file,
        secrets=section.secrets,
    )
