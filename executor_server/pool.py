"""Ready sandboxes, made ahead.

For each spec it is told of, the pool keeps a number of sandboxes whose guest has answered. Taking one starts a refill
in the background; when none is there, or a kept one has died meanwhile, the caller gets a new one, made on the spot.
A sandbox is handed out once and never comes back: a used sandbox is never reused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from executor_server.backends.base import Backend, Sandbox
from executor_server.errors import SandboxFailure
from executor_server.guest_channel import GuestChannel
from executor_server.model import SandboxSpec
from executor_server.policy import WarmSandboxes

# Starting a process holds up the event loop: whoever has just taken a sandbox gets the answer first.
_REFILL_PAUSE_S = 0.01

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PoolSettings:
    """How many sandboxes to make at a time, how long to wait after a failure.

    A guest that hears nothing for its orphan_time_s ends; those that are kept hear something every `ping_interval_s`.
    """

    concurrency: int = 1
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    ping_interval_s: float = 10.0


@dataclass(frozen=True)
class ReadySandbox:
    """A sandbox whose guest has answered, and the channel to it."""

    sandbox: Sandbox
    channel: GuestChannel
    warm: bool


async def make_ready(backend: Backend, spec: SandboxSpec, *, warm: bool) -> ReadySandbox:
    """Makes a sandbox and waits for its guest. Raises SandboxFailure; nothing is left behind then."""
    sandbox = await backend.create(spec)
    channel = GuestChannel(sandbox.endpoint)
    try:
        await channel.connect()
    except BaseException:
        channel.close()
        await asyncio.shield(sandbox.destroy())
        raise
    return ReadySandbox(sandbox, channel, warm)


class WarmPool:
    """Keeps sandboxes ready. Owns those that it has not handed out yet."""

    def __init__(self, backend: Backend, settings: PoolSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._ready: dict[SandboxSpec, deque[ReadySandbox]] = {}
        self._sizes: dict[SandboxSpec, int] = {}
        self._wanted = asyncio.Event()
        self._changed = asyncio.Condition()
        self._workers: list[asyncio.Task[None]] = []
        self._making: dict[SandboxSpec, int] = {}
        self._backoff_s = 0.0
        self._discards: set[asyncio.Task[None]] = set()

    async def start(self, kinds: Sequence[WarmSandboxes]) -> None:
        """Begins to keep these ready, in the background."""
        for kind in kinds:
            self._sizes[kind.spec] = kind.size
            self._ready[kind.spec] = deque()
            self._making[kind.spec] = 0
        if any(self._sizes.values()):
            self._workers = [asyncio.create_task(self._refill()) for _ in range(self._settings.concurrency)]
            self._workers.append(asyncio.create_task(self._ping_forever()))
            self._wanted.set()

    async def take(self, spec: SandboxSpec) -> ReadySandbox:
        """A ready sandbox of this spec: a kept one, else a new one. Raises SandboxFailure."""
        kept = self._ready.get(spec)
        if kept:
            self._wanted.set()
            return kept.popleft()
        return await make_ready(self._backend, spec, warm=False)

    async def full(self) -> None:
        """Waits until every spec has its sandboxes."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(len(kept) >= self._sizes[spec] for spec, kept in self._ready.items())
            )

    async def close(self) -> None:
        """Ends refilling and destroys what is kept."""
        for task in self._workers:
            task.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for kept in self._ready.values():
            while kept:
                self._discard(kept.popleft())
        await asyncio.gather(*self._discards, return_exceptions=True)

    def _keep(self, spec: SandboxSpec, ready: ReadySandbox) -> None:
        def on_lost(reason: str) -> None:
            """It died while nobody used it."""
            _log.warning("pooled_sandbox_lost", sandbox_id=ready.sandbox.sandbox_id, reason=reason)
            self._ready[spec].remove(ready)
            self._discard(ready)
            self._wanted.set()

        ready.channel.on_lost = on_lost
        self._ready[spec].append(ready)

    def _discard(self, ready: ReadySandbox) -> None:
        ready.channel.close()
        task = asyncio.create_task(self._destroy(ready.sandbox))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    async def _destroy(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.destroy()
        except SandboxFailure as failure:
            _log.error("sandbox_not_destroyed", sandbox_id=sandbox.sandbox_id, error=str(failure))

    async def _ping_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.ping_interval_s)
            for kept in self._ready.values():
                for ready in kept:
                    ready.channel.ping()

    def _next_missing(self) -> SandboxSpec | None:
        for spec, kept in self._ready.items():
            if len(kept) + self._making[spec] < self._sizes[spec]:
                return spec
        return None

    async def _refill(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(_REFILL_PAUSE_S)
            spec = self._next_missing()
            if spec is None:
                self._wanted.clear()
                continue
            self._making[spec] += 1
            try:
                self._keep(spec, await make_ready(self._backend, spec, warm=True))
                self._backoff_s = 0.0
            except SandboxFailure as failure:
                self._backoff_s = min(max(self._backoff_s * 2, self._settings.backoff_s), self._settings.max_backoff_s)
                _log.warning("pool_refill_failed", image=spec.image, error=str(failure), retry_after_s=self._backoff_s)
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end refilling for good
                self._backoff_s = self._settings.max_backoff_s
                _log.exception("pool_refill_broke", image=spec.image, retry_after_s=self._backoff_s)
            finally:
                self._making[spec] -= 1
            async with self._changed:
                self._changed.notify_all()
            if self._backoff_s:
                await asyncio.sleep(self._backoff_s)
