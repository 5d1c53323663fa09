"""Creations that wait for the same sandbox share its failure, and no others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from executor_server.core.errors import BackendFull, EnvironmentFailed, ImageNotReady, SandboxFailure, SpecUnsupported
from executor_server.core.fairness.fair_semaphore import FairSemaphore
from executor_server.core.lifecycle.admission import AdmissionController
from executor_server.core.model import SandboxSpec
from executor_server.sessions.pool.creation_queue import CreationQueue
from tests.support.fake_backend import SPEC

OTHER = replace(SPEC, memory_bytes=SPEC.memory_bytes * 2)


class OneAtATime(AdmissionController):
    def __init__(self) -> None:
        self._queue = FairSemaphore(1)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        async with self._queue.hold(tenant):
            yield


class FakeFactory:
    """Makes nothing, and notes what it was asked to make; the first fails when the test says so."""

    def __init__(self) -> None:
        self.turns = CreationQueue(OneAtATime())
        self.asked: list[SandboxSpec] = []
        self.fail = asyncio.Event()

    async def make(self, spec: SandboxSpec, failure: Exception | None = None) -> None:
        async with self.turns.turn("tenant", spec):
            self.asked.append(spec)
            if failure is not None:
                await self.fail.wait()
                raise failure


async def outcomes(factory: FakeFactory, failure: Exception, *specs: SandboxSpec) -> list[BaseException | None]:
    async with asyncio.timeout(5):
        tasks = [
            asyncio.create_task(factory.make(SPEC, failure)),
            *(asyncio.create_task(factory.make(s)) for s in specs),
        ]
        await asyncio.sleep(0)
        factory.fail.set()
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_those_who_wait_for_the_same_share_its_failure_without_trying() -> None:
    factory = FakeFactory()
    found = await outcomes(factory, SandboxFailure("it hangs"), SPEC, OTHER, SPEC)
    assert [str(each) for each in found] == ["it hangs", "it hangs", "None", "it hangs"]
    assert factory.asked == [SPEC, OTHER]


async def test_who_comes_after_a_failure_tries() -> None:
    factory = FakeFactory()
    await outcomes(factory, SandboxFailure("it hangs"))
    await factory.make(SPEC)
    assert factory.asked == [SPEC, SPEC]


@pytest.mark.parametrize(
    "failure",
    [
        ImageNotReady("it is being fetched"),
        EnvironmentFailed("a and b contradict each other"),
        BackendFull("no place", 1.0),
        SpecUnsupported("it has no network"),
        ValueError("a bug"),
    ],
)
async def test_what_is_known_at_once_is_not_shared(failure: Exception) -> None:
    factory = FakeFactory()
    found = await outcomes(factory, failure, SPEC)
    assert (found[0], found[1]) == (failure, None)
