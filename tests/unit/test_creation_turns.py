"""Who waits to have the same made shares its failure, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from executor_server.creation_turns import CreationTurns
from executor_server.errors import BackendFull, ImageNotReady, SandboxFailure
from executor_server.fair_queue import FairQueue
from executor_server.gate import Gate
from executor_server.model import SandboxSpec
from tests.support.fake_backend import SPEC

OTHER = replace(SPEC, memory_bytes=SPEC.memory_bytes * 2)


class OneAtATime(Gate):
    def __init__(self) -> None:
        self._queue = FairQueue(1)

    @asynccontextmanager
    async def creation_turn(self, tenant: str) -> AsyncIterator[None]:
        async with self._queue.turn(tenant):
            yield


class Maker:
    """Makes nothing, and remembers what it was asked to make; the first fails when it is told to."""

    def __init__(self) -> None:
        self.turns = CreationTurns(OneAtATime())
        self.asked: list[SandboxSpec] = []
        self.fail = asyncio.Event()

    async def make(self, spec: SandboxSpec, failure: Exception | None = None) -> None:
        async with self.turns.turn("tenant", spec):
            self.asked.append(spec)
            if failure is not None:
                await self.fail.wait()
                raise failure


async def outcomes(maker: Maker, failure: Exception, *specs: SandboxSpec) -> list[BaseException | None]:
    async with asyncio.timeout(5):
        tasks = [asyncio.create_task(maker.make(SPEC, failure)), *(asyncio.create_task(maker.make(s)) for s in specs)]
        await asyncio.sleep(0)
        maker.fail.set()
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_those_who_wait_for_the_same_share_its_failure_without_trying() -> None:
    maker = Maker()
    found = await outcomes(maker, SandboxFailure("it hangs"), SPEC, OTHER, SPEC)
    assert [str(each) for each in found] == ["it hangs", "it hangs", "None", "it hangs"]
    assert maker.asked == [SPEC, OTHER]


async def test_who_comes_after_a_failure_tries() -> None:
    maker = Maker()
    await outcomes(maker, SandboxFailure("it hangs"))
    await maker.make(SPEC)
    assert maker.asked == [SPEC, SPEC]


@pytest.mark.parametrize(
    "failure", [ImageNotReady("it is being fetched"), BackendFull("no place", 1.0), ValueError("a bug")]
)
async def test_what_is_known_at_once_is_not_shared(failure: Exception) -> None:
    maker = Maker()
    found = await outcomes(maker, failure, SPEC)
    assert (found[0], found[1]) == (failure, None)
