"""A sandbox of the local backend: owns all that it has on the host, and releases it in order.

The object exists before the sandbox does. Each step of `LocalBackend.create` adds the resource that it acquired, and
`destroy` releases the acquired ones in the opposite order. So a creation that fails or is cancelled halfway ends by
the same path as a session: first the processes, then their control group, then the directory whose record would lead
another daemon to them, and last the host user, which must not be given to another sandbox while one of its processes
runs.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import structlog

from executor_server.backends.base import PassiveSandbox
from executor_server.backends.channel import SocketEndpoint
from executor_server.backends.directory import remove_sandbox_directory
from executor_server.backends.local.bwrap_process import SandboxProcess
from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.teardown import Teardown
from executor_server.guest.wire.exit_codes import END_REASONS

DESTROY_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 0.5
_KILLED = 128 + signal.SIGKILL

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class LocalSandbox(PassiveSandbox):
    """Implements `executor_server.backends.base.Sandbox`."""

    sandbox_id: str
    directory: Path
    endpoint: SocketEndpoint
    fingerprint: str
    forget: Callable[[LocalSandbox], None]  # called when nothing of it is left
    host_uid: int | None = None
    cgroup: Cgroup | None = None
    process: SandboxProcess | None = None
    # Kills for memory that the sandbox is known to have survived: the kernel chose an interpreter.
    _reported_oom_kills: int = field(default=0, init=False)
    teardown: Teardown = field(init=False)

    backend_name: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        self.teardown = Teardown(self.sandbox_id, self._destroy)
        self._reported_oom_kills = self._oom_kills() or 0  # an adopted sandbox may have survived some

    async def oom_kills(self) -> int | None:
        kills = self._oom_kills()
        self._reported_oom_kills = kills or 0
        return kills

    def _oom_kills(self) -> int | None:
        return self.cgroup.oom_kills() if self.cgroup else None

    async def cause_of_death(self) -> str | None:
        """Waits a moment for the end: the caller may know only that the guest is silent.

        It knows more about a sandbox that was made here, since only a parent learns how a process ended.
        """
        if self.process is None:
            return None
        code = await self.process.exit_code(asyncio.get_running_loop().time() + _END_TIMEOUT_S)
        if not self.process.has_ended():
            return None
        kills = self._oom_kills()
        if code in (None, _KILLED) and kills is not None and kills > self._reported_oom_kills:
            return "the kernel killed it for its memory"
        if code == _KILLED:
            return "its first process was killed"
        if code is None:
            return "its first process ended"
        return END_REASONS.get(code, f"its first process ended with exit code {code}")

    def set_cpu_share(self, share: float) -> None:
        if self.cgroup is not None:
            self.cgroup.set_cpu_share(share)

    async def destroy(self) -> None:
        await self.teardown.run()

    async def _destroy(self) -> None:
        deadline = asyncio.get_running_loop().time() + DESTROY_TIMEOUT_S
        # Processes need the processor to end. With an idle sandbox's part of a share, among 300 of them on a busy host,
        # they waited seconds for it.
        self.set_cpu_share(1.0)
        if self.process is not None:
            if words := self.process.last_words():
                _log.debug("sandbox_last_words", sandbox_id=self.sandbox_id, text=words)
            await self.process.kill_and_reap(deadline)
        if self.cgroup is not None:
            await self.cgroup.remove(deadline)
        await asyncio.to_thread(remove_sandbox_directory, self.directory)  # takes milliseconds
        self.forget(self)
        _log.debug("sandbox_destroyed", sandbox_id=self.sandbox_id)
