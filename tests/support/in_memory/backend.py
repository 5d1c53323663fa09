"""The in-memory backend: places on a `MemoryHost`, each with a guest that this event loop runs."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from executor_server.backends.base import HostFinding, KnownSandbox
from executor_server.backends.directory import new_sandbox_id
from executor_server.backends.environments import Environment, refuse_packages
from executor_server.core.errors import BackendFull, ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
from executor_server.guest.wire.tokens import CHAIN_LENGTH
from tests.support.in_memory.guest import MemoryGuest
from tests.support.in_memory.host import MemoryHost, Place
from tests.support.in_memory.transport import connect

_TOKEN_BYTES = 32
# From the interrupt of a program to the last look whether its thread has ended.
_JOIN_S = 60.0
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class MemoryEndpoint:
    """Implements `GuestEndpoint`."""

    place: Place
    token: bytes
    reconnect_s: ClassVar[float] = 2.0
    breaks_by_itself: ClassVar[bool] = False
    socket_path: ClassVar[None] = None
    connections_max: ClassVar[int] = CHAIN_LENGTH
    reconnects_max: ClassVar[int] = 8

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        guest = self.place.guest
        if guest is None or guest.ended:
            raise ConnectionRefusedError(111, "nobody listens")
        connect(make_protocol, guest.channel.new_connection())


class MemorySandbox:
    """Implements `executor_server.backends.base.Sandbox`."""

    backend_name = "fake"

    def __init__(
        self,
        sandbox_id: str,
        place: Place,
        token: bytes,
        host: MemoryHost,
        forget: Callable[[str], None],
        pause_idle_s: float | None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.endpoint = MemoryEndpoint(place, token)
        self.fingerprint = place.fingerprint
        self.pause_idle_s = pause_idle_s
        self.labels: list[str] = []
        self.cpu_shares: list[float] = []
        self._place = place
        self._host = host
        self._forget = forget

    async def oom_kills(self) -> int | None:
        return None

    async def cause_of_death(self) -> str | None:
        return self._place.cause_of_death

    async def label(self, session_id: str) -> None:
        self.labels.append(session_id)

    def set_cpu_share(self, share: float) -> None:
        self.cpu_shares.append(share)

    async def pause(self) -> bool:
        guest = self._running()
        if guest.busy:
            return False  # a thread can't be stopped where it is
        self._place.paused = True
        guest.channel.freeze(True)
        return True

    async def wake(self) -> None:
        guest = self._running()
        self._place.paused = False
        guest.channel.freeze(False)

    def _running(self) -> MemoryGuest:
        guest = self._place.guest
        if guest is None or guest.ended or self._host.down:
            raise SandboxFailure(f"sandbox {self.sandbox_id} does not answer")
        return guest

    async def destroy(self) -> None:
        await demolish(self._host, self.sandbox_id)
        self._forget(self.sandbox_id)


class MemoryBackend:
    """Implements `executor_server.backends.base.Backend`."""

    name = "fake"

    def __init__(
        self,
        host: MemoryHost,
        state_dir: Path,
        *,
        images: tuple[str, ...] = ("base",),
        sandboxes_max: int | None = None,
        pause_idle_s: float | None = None,
    ) -> None:
        self._host = host
        self._state_dir = state_dir
        self._images = images
        self._sandboxes_max = sandboxes_max
        self._pause_idle_s = pause_idle_s
        self._started = False
        self._live: dict[str, MemorySandbox] = {}

    async def start(self) -> None:
        if self._host.down:
            raise SandboxFailure("the host is down: set `down` to False")
        if self._state_dir in self._host.daemons:
            raise SandboxFailure(f"another daemon uses the state directory {self._state_dir}")
        self._host.daemons.add(self._state_dir)
        self._started = True

    def abandon(self) -> None:
        """As if the daemon were killed: what it made lives on, and belongs to its state directory."""
        self._started = False
        self._host.daemons.discard(self._state_dir)

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, MemorySandbox]:
        self._require_up()
        found = self._host.of(self._state_dir)
        for one in known:
            place = found.get(one.sandbox_id)
            if place is not None and place.guest is not None and not place.guest.ended:
                self._live[one.sandbox_id] = self._sandbox(one.sandbox_id, place, one.token)
        await self.sweep()
        return dict(self._live)

    async def sweep(self) -> int:
        self._require_up()
        strays = [sandbox_id for sandbox_id in self._host.of(self._state_dir) if sandbox_id not in self._live]
        for sandbox_id in strays:
            await demolish(self._host, sandbox_id)
        return len(strays)

    async def fingerprint(self, spec: SandboxSpec) -> str:
        self._require_up()
        return self._fingerprint(spec)

    def _fingerprint(self, spec: SandboxSpec) -> str:
        refuse_packages(spec, self.name)
        if spec.image not in self._images:
            raise SandboxFailure(f"no image {spec.image!r} is configured")
        if spec.image not in self._host.images:
            raise ImageNotReady(f"image {spec.image!r} is not there")
        made_of = f"{spec.fingerprint} {spec.image} {self._host.images[spec.image]}"
        return hashlib.sha256(made_of.encode()).hexdigest()[:16]

    async def create(self, spec: SandboxSpec) -> MemorySandbox:
        self._require_up()
        fingerprint = self._fingerprint(spec)
        places = (self._sandboxes_max, len(self._live)), (self._host.places_max, len(self._host.places))
        if any(most is not None and count >= most for most, count in places):
            raise BackendFull("all places are taken", _RETRY_AFTER_S)
        sandbox_id, token = new_sandbox_id(), secrets.token_bytes(_TOKEN_BYTES)
        place = Place(self._state_dir, spec, fingerprint, self._host.directory / sandbox_id)
        self._host.places[sandbox_id] = place
        sandbox = self._live[sandbox_id] = self._sandbox(sandbox_id, place, token)
        try:
            await asyncio.sleep(0)  # as others, it can be cancelled while it makes one
            place.directory.mkdir(mode=0o700)
            place.guest = MemoryGuest(token, place.directory.resolve(), spec.orphan_time_s, place.died)
        except BaseException:
            await sandbox.destroy()
            raise
        return sandbox

    def _sandbox(self, sandbox_id: str, place: Place, token: bytes) -> MemorySandbox:
        return MemorySandbox(sandbox_id, place, token, self._host, self._forget, self._pause_idle_s)

    def _forget(self, sandbox_id: str) -> None:
        self._live.pop(sandbox_id, None)

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        refuse_packages(spec, self.name)
        return None

    async def check_host(self) -> Sequence[HostFinding]:
        return [HostFinding("memory", ok=not self._host.down, detail="It keeps everything in this process.")]

    async def close(self) -> None:
        if self._started:
            await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._live.values())))
            self.abandon()

    def _require_up(self) -> None:
        if not self._started:
            raise SandboxFailure("the in-memory backend is not started")
        if self._host.down:
            raise SandboxFailure("the host does not answer")


async def demolish(host: MemoryHost, sandbox_id: str) -> None:
    """Ends a sandbox and removes what it left. Raises SandboxFailure when its program can't be ended."""
    place = host.places.get(sandbox_id)
    if place is None:
        return
    if place.guest is not None:
        place.guest.end("it was destroyed")
        if not await place.guest.joined(_JOIN_S):
            raise SandboxFailure(f"a program of sandbox {sandbox_id} goes on in its thread")
    shutil.rmtree(place.directory, ignore_errors=True)
    host.places.pop(sandbox_id, None)
