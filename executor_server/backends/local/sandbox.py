"""A sandbox of the local backend: all that it holds on the host, and how it is given back.

The object exists before the sandbox does. Each step of `LocalBackend.create` adds what it acquired; `destroy` gives
back whatever is there, in the opposite order, so a creation that fails or is cancelled halfway ends by the same path as
a session: first the processes, then their control group, then the directory whose record would lead another daemon to
them, and last the host user, which must not be given to anybody while a process of it runs.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from executor_server.backends.base import GuestEndpoint
from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.process import BwrapProcess
from executor_server.errors import SandboxFailure

DESTROY_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class LocalSandbox:
    """Implements `executor_server.backends.base.Sandbox`."""

    sandbox_id: str
    directory: Path
    endpoint: GuestEndpoint
    fingerprint: str
    forget: Callable[[LocalSandbox], None]  # tells the backend that nothing of it is left
    host_uid: int | None = None
    cgroup: Cgroup | None = None
    process: BwrapProcess | None = None
    _destroying: asyncio.Task[None] | None = field(default=None, init=False)

    async def oom_kills(self) -> int | None:
        return self.cgroup.oom_kills() if self.cgroup else None

    async def cause_of_death(self) -> str | None:
        return None

    async def label(self, session_id: str) -> None:
        return

    async def destroy(self) -> None:
        """Runs to its end even if the caller is cancelled; a failed attempt can be repeated."""
        if self._destroying is None or (self._destroying.done() and self._failed(self._destroying)):
            self._destroying = asyncio.create_task(self._destroy(), name=f"destroy {self.sandbox_id}")
        await asyncio.shield(self._destroying)

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

    @staticmethod
    def _failed(task: asyncio.Task[None]) -> bool:
        return task.cancelled() or task.exception() is not None
