"""A sandbox of the Docker backend: a container, its directory, its user; and how they are given back.

The object exists before the container does, and so does the container's name. A creation that fails or is cancelled
halfway ends by the same path as a session: first the container, then the directory, and last the user, which must not
be given to anybody while a process of it may run. When the Engine does not answer, nothing of this is given up: the
backend keeps the sandbox and comes back to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import structlog

from executor_server.backends.base import SocketEndpoint
from executor_server.backends.docker.cgroup import CpuGroup, OomCounter, cpu_group, oom_counter
from executor_server.backends.docker.engine import ContainerState, Engine, EngineFailure
from executor_server.backends.endings import Ending
from executor_server.errors import SandboxFailure

_NAME = "executor-{}"
_CAUSE_TIMEOUT_S = 2.0
_CAUSE_POLL_S = 0.05
# Whoever removes a container kills it first: one that was killed a moment ago may be gone in the next.
_REMOVAL_FOLLOWS_S = 0.5
_KILLED = 128 + 9

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class DockerSandbox:
    """Implements `executor_server.backends.base.Sandbox`."""

    sandbox_id: str
    directory: Path
    endpoint: SocketEndpoint
    fingerprint: str
    user: int
    engine: Engine
    container: str  # its name, and once it is known its id, which no renaming changes
    forget: Callable[[DockerSandbox], None]  # tells the backend that nothing of it is left
    _oom_counter: OomCounter | None = field(default=None, init=False)
    ending: Ending = field(init=False)

    backend_name: ClassVar[str] = "docker"
    pause_idle_s: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.ending = Ending(self.sandbox_id, self._destroy)

    async def pause(self) -> bool:
        return False

    async def wake(self) -> None:
        return

    async def oom_kills(self) -> int | None:
        if self._oom_counter is None:
            try:
                state = await self.engine.state(self.container)
            except EngineFailure as failure:
                _log.debug("oom_kills_unknown", sandbox_id=self.sandbox_id, reason=str(failure))
                return None
            if state is not None and state.running:
                self._oom_counter = oom_counter(state.pid, self.container)
        return None if self._oom_counter is None else self._oom_counter.read()

    async def cause_of_death(self) -> str | None:
        try:
            async with asyncio.timeout(_CAUSE_TIMEOUT_S):
                return await self._cause_of_death()
        except EngineFailure:
            return "its guest is gone, and the Engine does not answer"
        except TimeoutError:
            return None

    async def _cause_of_death(self) -> str:
        """Waits until the Engine knows of the end that the daemon has seen already."""
        state = await self.engine.state(self.container)
        while state is not None and state.running:
            await asyncio.sleep(_CAUSE_POLL_S)
            state = await self.engine.state(self.container)
        if state is not None and state.exit_code == _KILLED and not state.out_of_memory:
            await asyncio.sleep(_REMOVAL_FOLLOWS_S)
            state = await self.engine.state(self.container)
        return _cause(state)

    async def label(self, session_id: str) -> None:
        """By the container's name: labels are fixed when it is made, and for whom it is may be known only later."""
        try:
            await self.engine.rename(self.container, _NAME.format(session_id))
        except EngineFailure as failure:
            _log.debug("sandbox_not_labelled", sandbox_id=self.sandbox_id, reason=str(failure))

    def set_cpu_share(self, share: float) -> None:
        if self._cpu_group is not None:
            self._cpu_group.set_share(share)

    @cached_property
    def _cpu_group(self) -> CpuGroup | None:
        return cpu_group(self.container)

    async def destroy(self) -> None:
        await self.ending.run()

    async def _destroy(self) -> None:
        await self.engine.remove(self.container)
        try:
            with contextlib.suppress(FileNotFoundError):  # its creation failed before there was one
                shutil.rmtree(self.directory)
        except OSError as error:
            raise SandboxFailure(f"the directory of a sandbox can't be removed: {error}") from error
        self.forget(self)


def _cause(state: ContainerState | None) -> str:
    if state is None:
        return "its container was removed"
    if state.out_of_memory:
        return "the kernel killed it for its memory"
    if state.exit_code == _KILLED:
        return f"its container was killed (exit code {state.exit_code})"
    return f"its container ended (exit code {state.exit_code})"
