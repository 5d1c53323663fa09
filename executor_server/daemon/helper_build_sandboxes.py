"""Build sandboxes on this host for backends without any: environments for machines of E2B are built here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from executor_server.backends import BuildMounts, HostFinding, Sandbox
from executor_server.backends.local import LocalBackend
from executor_server.core import SandboxSpec
from executor_server.core.config import Config


async def packages_finding(config: Config) -> HostFinding:
    """Reports if a daemon without the local backend can make environments for machines in a cloud on this host."""
    findings = await LocalBackend(config.server.state_dir, bwrap=config.local.bwrap).check_host()
    missing = [finding.subject for finding in findings if finding.required and not finding.ok]
    if not missing:
        detail = "This host can make the environments of sessions with packages, in sandboxes of its own."
        return HostFinding("packages", ok=True, detail=detail, required=False)
    return HostFinding(
        "packages",
        ok=False,
        detail="No session can have packages: their environments are made on this host, in sandboxes of the local "
        f"backend, which can't be made here ({', '.join(missing)}).",
        remedy="Run `executor-server check-host --backend local` to find the remedy, or put packages into templates.",
        required=False,
    )


class HelperBuildSandboxes:
    """Implements `BuildSandboxes` by a local backend of its own, started with the first build sandbox."""

    image = "base"  # the daemon's own Python

    def __init__(self, config: Config, egress_bundle: Callable[[], Path]) -> None:
        self._backend = LocalBackend(config.server.state_dir, bwrap=config.local.bwrap, egress_bundle=egress_bundle)
        self._starting = asyncio.Lock()
        self._has_started = False

    async def create_build_sandbox(self, spec: SandboxSpec, mounts: BuildMounts) -> Sandbox:
        async with self._starting:
            if not self._has_started:
                await self._backend.start()
                self._has_started = True
                await self._backend.adopt(())
        return await self._backend.create_build_sandbox(spec, mounts)

    async def close(self) -> None:
        if self._has_started:
            await self._backend.close()
