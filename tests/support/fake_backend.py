"""A backend that hands out fake guests. It can be slow, fail, and lose what it made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.channel.endpoint import GuestEndpoint
from executor_server.backends.environments import Environment
from executor_server.core.errors import SandboxFailure
from executor_server.core.model import SandboxSpec
from tests.support.fake_guest import FakeGuest
from tests.support.polling import eventually_async

SPEC = SandboxSpec(image="base", memory_bytes=2**28, processes=16, disk_bytes=2**24, orphan_time_s=60.0)


class FakeSandbox:
    """One fake guest; counts how often it was paused, woken and destroyed.

    Pausing and waking wait for `may_pause` and `may_wake`, and answer or fail as a test says.
    """

    def __init__(self, sandbox_id: str, guest: FakeGuest) -> None:
        self.sandbox_id = sandbox_id
        self.guest = guest
        self.kills: int | None = 0
        self.cause: str | None = None
        self.destroyed = 0
        self.failure: SandboxFailure | None = None  # raised by `destroy`
        self.cpu_shares: list[float] = []
        self.pause_idle_s: float | None = None
        self.pauses = self.wakes = 0
        self.can_pause: bool | SandboxFailure = True
        self.can_wake: SandboxFailure | None = None
        self.may_pause, self.may_wake = asyncio.Event(), asyncio.Event()
        self.may_pause.set()
        self.may_wake.set()

    @property
    def endpoint(self) -> GuestEndpoint:
        return self.guest.network or self.guest.endpoint

    fingerprint = "fake"
    backend_name = "fake"

    async def pause(self) -> bool:
        self.pauses += 1
        closed = await eventually_async(lambda: not any(each.transport for each in self.guest.connections))
        assert closed, "its channel is open"
        await self.may_pause.wait()
        if isinstance(self.can_pause, SandboxFailure):
            raise self.can_pause
        if self.can_pause:
            self.guest.freeze()
        return self.can_pause

    async def wake(self) -> None:
        self.wakes += 1
        await self.may_wake.wait()
        if self.can_wake is not None:
            raise self.can_wake
        self.guest.thaw()

    async def oom_kills(self) -> int | None:
        return self.kills

    async def cause_of_death(self) -> str | None:
        return self.cause

    async def label(self, session_id: str) -> None:
        self.owner = session_id

    def set_cpu_share(self, share: float) -> None:
        self.cpu_shares.append(share)

    async def destroy(self) -> None:
        self.destroyed += 1
        await self.guest.die()
        if self.failure is not None:
            raise self.failure


class FakeBackend:
    """Owns its fakes. `prepare` shapes each guest before it listens; `gate`, when not set, holds creations up."""

    name = "fake"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.made: list[FakeSandbox] = []
        self.asked = 0
        self.failures = 0  # so many creations fail next
        self.prepare: Callable[[FakeGuest], object] = lambda guest: None
        self.environment: Environment | None = None
        self.admission = asyncio.Event()
        self.admission.set()

    @property
    def living(self) -> list[FakeSandbox]:
        return [sandbox for sandbox in self.made if not sandbox.destroyed]

    async def start(self) -> None:
        return

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, FakeSandbox]:
        names = {each.sandbox_id for each in known}
        for sandbox in self.living:
            if sandbox.sandbox_id not in names:
                await sandbox.destroy()
        return {sandbox.sandbox_id: sandbox for sandbox in self.living}

    async def sweep(self) -> int:
        return 0

    async def fingerprint(self, spec: SandboxSpec) -> str:
        return "fake"

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        self.asked += 1
        number = self.asked
        await self.admission.wait()
        if self.failures:
            self.failures -= 1
            raise SandboxFailure("no sandbox today")
        guest = FakeGuest(self._directory / f"guest-{number}")
        self.prepare(guest)
        try:
            await guest.start()
        except asyncio.CancelledError:  # a pool that is closed ends the creations that it began
            await guest.die()
            raise
        sandbox = FakeSandbox(f"fake-{number}", guest)
        self.made.append(sandbox)
        return sandbox

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        return self.environment

    async def check_host(self) -> Sequence[HostFinding]:
        return ()

    async def close(self) -> None:
        for sandbox in self.living:
            await sandbox.destroy()
