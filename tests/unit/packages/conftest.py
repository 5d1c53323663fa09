"""A service of environments with a builder that needs no network, in real directories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from executor_server.backends.environments import Environment, Target
from executor_server.core import EnvironmentFailed, ImageNotReady, PackagesSpec
from executor_server.packages import (
    BuildEnd,
    EnvironmentObserver,
    EnvironmentService,
    EnvironmentSettings,
    EnvironmentUse,
    Lock,
    Outcome,
    Places,
)
from tests.unit.packages.fake_builder import IMAGE, FakeBuilder


class RecordingObserver(EnvironmentObserver):
    def __init__(self) -> None:
        self.hits: list[str] = []
        self.misses: list[EnvironmentUse] = []
        self.started: list[EnvironmentUse] = []
        self.ended: list[tuple[EnvironmentUse, Outcome, str]] = []
        self.locks: list[Lock | None] = []
        self.evicted: list[tuple[str, str]] = []
        self._has_ended = asyncio.Event()

    def environment_hit(self, use: EnvironmentUse, environment_id: str) -> None:
        self.hits.append(environment_id)

    def environment_missed(self, use: EnvironmentUse) -> None:
        self.misses.append(use)

    def build_started(self, use: EnvironmentUse) -> None:
        self.started.append(use)

    def build_ended(self, end: BuildEnd) -> None:
        assert end.took_s >= 0 and end.size_bytes >= 0
        self.ended.append((end.use, end.outcome, end.error))
        self.locks.append(end.lock)
        self._has_ended.set()

    async def builds_ended(self, count: int) -> None:
        """Waits until so many have."""
        while len(self.ended) < count:
            self._has_ended.clear()
            await self._has_ended.wait()

    def environment_evicted(self, environment_id: str, freed_bytes: int, reason: str) -> None:
        self.evicted.append((environment_id, reason))

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, outcome, _ in self.ended]


class Bench:
    """Makes services of one directory, one after the other as daemons would be."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self.places = Places(root)
        self.builder = FakeBuilder(self.places)
        self.observer = RecordingObserver()
        self.now_s = 1_800_000_000.0
        self._stack = stack

    async def close(self) -> None:
        """Ends the services so far, as daemons that stop."""
        await self._stack.aclose()

    async def service(self, settings: EnvironmentSettings | None = None) -> EnvironmentService:
        service = EnvironmentService(self.places.root, settings or EnvironmentSettings(), now=lambda: self.now_s)
        service.notify(self.observer)
        service.build_with(self.builder)
        self._stack.push_async_callback(service.close)
        await service.start()
        return service


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(tmp_path / "environments", stack)


async def made(service: EnvironmentService, packages: PackagesSpec, target: Target = IMAGE) -> Environment:
    """Asks until the environment is there, as a client does. Raises what is no "wait"."""
    for _ in range(200):
        try:
            return await service.ready(packages, target)
        except EnvironmentFailed:
            raise
        except ImageNotReady as waiting:
            if waiting.progress is None:
                raise
    raise AssertionError("it is never ready")
