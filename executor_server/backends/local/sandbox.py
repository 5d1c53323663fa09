"""A sandbox of the local backend: all that it holds on the host, and how it is given back.

The object exists before the sandbox does. Each step of `LocalBackend.create` adds what it acquired; `destroy` gives
back whatever is there, in the opposite order, so a creation that fails or is cancelled halfway ends by the same path as
a session: first the processes, then their control group, then the directory whose record would lead another daemon to
them, and last the host user, which must not be given to anybody while a process of it runs.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import structlog

from executor_server.backends.base import SocketEndpoint
from executor_server.backends.endings import Ending
from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.process import SandboxProcess
from executor_server.errors import SandboxFailure

DESTROY_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 0.5
_KILLED = 128 + signal.SIGKILL

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class LocalSandbox:
    """Implements `executor_server.backends.base.Sandbox`."""

    sandbox_id: str
    directory: Path
    endpoint: SocketEndpoint
    fingerprint: str
    forget: Callable[[LocalSandbox], None]  # tells the backend that nothing of it is left
    host_uid: int | None = None
    cgroup: Cgroup | None = None
    process: SandboxProcess | None = None
    _told_oom_kills: int = field(default=0, init=False)  # of its interpreters, most likely: the sandbox lived on
    ending: Ending = field(init=False)

    backend_name: ClassVar[str] = "local"
    pause_idle_s: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.ending = Ending(self.sandbox_id, self._destroy)
        # One that is taken over may have outlived some.
        self._told_oom_kills = (self.cgroup.oom_kills() if self.cgroup else None) or 0

    async def oom_kills(self) -> int | None:
        kills = self.cgroup.oom_kills() if self.cgroup else None
        self._told_oom_kills = kills or 0
        return kills

    async def cause_of_death(self) -> str | None:
        """Waits a moment for the end: whoever asks may have noticed only that the guest is silent.

        Says more of a sandbox that was made here, since only a parent learns how a process ended.
        """
        if self.process is None:
            return None
        code = await self.process.exit_code(asyncio.get_running_loop().time() + _END_TIMEOUT_S)
        if not self.process.has_ended():
            return None
        kills = self.cgroup.oom_kills() if self.cgroup else None
        if code in (None, _KILLED) and kills is not None and kills > self._told_oom_kills:
            return "the kernel killed it for its memory"
        if code == _KILLED:
            return "its first process was killed"
        return "its first process ended" if code is None else f"its first process ended with exit code {code}"

    async def pause(self) -> bool:
        return False

    async def wake(self) -> None:
        return

    async def label(self, session_id: str) -> None:
        return

    def set_cpu_share(self, share: float) -> None:
        if self.cgroup is not None:
            self.cgroup.set_cpu_share(share)

    async def destroy(self) -> None:
        await self.ending.run()

    async def _destroy(self) -> None:
        deadline = asyncio.get_running_loop().time() + DESTROY_TIMEOUT_S
        if self.process is not None:
            if words := self.process.last_words():
                _log.debug("sandbox_last_words", sandbox_id=self.sandbox_id, text=words)
            await self.process.kill_and_reap(deadline)
        if self.cgroup is not None:
            await self.cgroup.remove(deadline)
        try:
            shutil.rmtree(self.directory)
        except FileNotFoundError:  # its creation failed before there was one
            pass
        except OSError as error:
            raise SandboxFailure(f"the directory of a sandbox can't be removed: {error}") from error
        self.forget(self)
        _log.debug("sandbox_destroyed", sandbox_id=self.sandbox_id)
