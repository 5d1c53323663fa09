"""A sandbox of the Docker backend: owns a container, its directory and its user, and releases them in order.

The object exists before the container does, and so does the container's name. A creation that fails or is cancelled
halfway ends by the same path as a session: first the container, then the directory, and last the user, which must not
be given to another sandbox while one of its processes may run. When the Engine does not answer, nothing of this is
released: the backend keeps the sandbox, and its next sweep tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import structlog

from executor_server.backends.base import PassiveSandbox
from executor_server.backends.channel import SocketEndpoint
from executor_server.backends.control_groups import count_oom_kills, set_cpu_share
from executor_server.backends.directory import remove_sandbox_directory
from executor_server.backends.docker.cgroup import ContainerGroup, cpu_group, memory_group
from executor_server.backends.docker.engine import ContainerState, Engine, EngineFailure
from executor_server.backends.teardown import Teardown
from executor_server.guest.wire.exit_codes import END_REASONS

KILLED = 128 + 9
"""Exit code of a container whose first process got SIGKILL."""

_NAME = "executor-{}"
_CAUSE_TIMEOUT_S = 2.0
_CAUSE_POLL_S = 0.05
# Removal kills a container first, so one that has just been killed may be about to disappear.
_REMOVAL_FOLLOWS_S = 0.5

_log = structlog.get_logger(__name__)


@dataclass(eq=False)
class DockerSandbox(PassiveSandbox):
    """Implements `executor_server.backends.base.Sandbox`."""

    sandbox_id: str
    directory: Path
    endpoint: SocketEndpoint
    fingerprint: str
    user: int
    engine: Engine
    container: str  # its name, and once it is known its id, which no renaming changes
    forget: Callable[[DockerSandbox], None]  # called when nothing of it is left
    _memory_group: ContainerGroup | None = field(default=None, init=False)
    teardown: Teardown = field(init=False)

    backend_name: ClassVar[str] = "docker"

    def __post_init__(self) -> None:
        self.teardown = Teardown(self.sandbox_id, self._destroy)

    async def oom_kills(self) -> int | None:
        if self._memory_group is None:
            try:
                state = await self.engine.state(self.container)
            except EngineFailure as failure:
                _log.debug("oom_kills_unknown", sandbox_id=self.sandbox_id, reason=str(failure))
                return None
            if state is not None and state.running:
                self._memory_group = memory_group(state.pid, self.container)
        return None if self._memory_group is None else count_oom_kills(*self._memory_group)

    async def cause_of_death(self) -> str | None:
        try:
            async with asyncio.timeout(_CAUSE_TIMEOUT_S):
                return await self._cause_of_death()
        except EngineFailure:
            return "its guest is gone, and the Engine does not answer"
        except TimeoutError:
            return None

    async def _cause_of_death(self) -> str:
        """Waits until the Engine knows of the end, which the daemon may see first."""
        state = await self.engine.state(self.container)
        while state is not None and state.running:
            await asyncio.sleep(_CAUSE_POLL_S)
            state = await self.engine.state(self.container)
        if state is not None and state.exit_code == KILLED and not state.out_of_memory:
            await asyncio.sleep(_REMOVAL_FOLLOWS_S)
            state = await self.engine.state(self.container)
        return _cause(state)

    async def label(self, session_id: str) -> None:
        """Renames the container: its labels are fixed when it is made, and a warm one gets its session only later."""
        try:
            await self.engine.rename(self.container, _NAME.format(session_id))
        except EngineFailure as failure:
            _log.debug("sandbox_not_labelled", sandbox_id=self.sandbox_id, reason=str(failure))

    def set_cpu_share(self, share: float) -> None:
        if self._cpu_group is not None:
            set_cpu_share(*self._cpu_group, share)

    @cached_property
    def _cpu_group(self) -> ContainerGroup | None:
        return cpu_group(self.container)

    async def destroy(self) -> None:
        await self.teardown.run()

    async def _destroy(self) -> None:
        self.set_cpu_share(1.0)  # its processes need the processor to end
        await self.engine.remove(self.container)
        await asyncio.to_thread(remove_sandbox_directory, self.directory)
        self.forget(self)


def _cause(state: ContainerState | None) -> str:
    if state is None:
        return "its container was removed"
    if state.out_of_memory:
        return "the kernel killed it for its memory"
    if state.exit_code == KILLED:
        return f"its container was killed (exit code {state.exit_code})"
    return END_REASONS.get(state.exit_code, f"its container ended (exit code {state.exit_code})")
