"""The E2B backend: a virtual machine in E2B's cloud for each sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from executor_server.backends.base import HostFinding, KnownSandbox, Sandbox
from executor_server.config import E2BSection
from executor_server.errors import SandboxFailure
from executor_server.model import SandboxSpec


class E2BBackend:
    """Implements `executor_server.backends.base.Backend`. It can't be started yet."""

    def __init__(self, state_dir: Path, section: E2BSection) -> None:
        self._state_dir = state_dir.absolute()
        self._section = section

    @property
    def name(self) -> str:
        return "e2b"

    async def start(self) -> None:
        raise SandboxFailure("this version of the daemon has no E2B sandboxes yet")

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        raise SandboxFailure("the E2B backend is not started")

    async def sweep(self) -> int:
        raise SandboxFailure("the E2B backend is not started")

    async def fingerprint(self, spec: SandboxSpec) -> str:
        raise SandboxFailure("the E2B backend is not started")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxFailure("the E2B backend is not started")

    async def check_host(self) -> Sequence[HostFinding]:
        return [HostFinding("E2B", ok=False, detail="This version of the daemon has no E2B sandboxes yet.")]

    async def close(self) -> None:
        return
