"""The pool of a kind that several backends may make: kept ones come from the first that works, and none is wasted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.core.errors import BackendFull, SandboxFailure
from executor_server.core.model import SandboxSpec
from executor_server.policy.decide import WarmSandboxes
from executor_server.sessions.pool.fail_over import BackendSet, FailOverSettings
from executor_server.sessions.pool.health import HealthSettings
from executor_server.sessions.pool.pool import PoolSettings, WarmPool, make_ready
from tests.support.fake_backend import SPEC, FakeBackend, FakeSandbox
from tests.support.polling import eventually_async, is_full

BOTH = replace(SPEC, backends=("docker", "e2b"))
HEALTH = HealthSettings(backoff_s=1.0, max_backoff_s=8.0, jitter=0.0)
SETTINGS = PoolSettings(backoff_s=0.001, max_backoff_s=0.002, check_interval_s=0.01)


class SandboxFactory(FakeBackend):
    """A backend of any name, which fails while the test says so."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory)
        directory.mkdir()
        self.name = name
        self.image = "first"
        self.trouble: SandboxFailure | None = None
        self.places = 100  # sandboxes that it can hold

    async def fingerprint(self, spec: SandboxSpec) -> str:
        if self.trouble is not None and not isinstance(self.trouble, BackendFull):
            raise self.trouble
        return f"{self.name} {self.image}"

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if self.trouble is not None:
            self.asked += 1
            raise self.trouble
        if len(self.living) >= self.places:
            self.asked += 1
            raise BackendFull("full", 0.001)
        fingerprint = f"{self.name} {self.image}"
        sandbox = await super().create(spec)
        sandbox.fingerprint, sandbox.backend_name = fingerprint, self.name
        return sandbox


class Bench:
    def __init__(self, directory: Path) -> None:
        self.docker, self.e2b = SandboxFactory(directory / "d", "docker"), SandboxFactory(directory / "e", "e2b")
        settings = FailOverSettings(HealthSettings(backoff_s=0.001, max_backoff_s=0.01))
        self.both = BackendSet([self.docker, self.e2b], settings)
        self.pool = WarmPool(self.both, SETTINGS)

    async def begin(self, size: int = 2) -> None:
        await self.both.start()
        await self.both.adopt(())
        self.pool.keep_ready([WarmSandboxes(BOTH, size)])

    def living(self) -> tuple[int, int]:
        return len(self.docker.living), len(self.e2b.living)

    async def become(self, docker: int, e2b: int) -> bool:
        return await eventually_async(lambda: self.living() == (docker, e2b) and self.pool.stats()[BOTH].making == 0)

    async def some_checks(self) -> None:
        """Waits until the pool has checked a few times what it keeps."""
        asked = self.docker.asked
        assert await eventually_async(lambda: self.docker.asked >= asked + 3)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert await is_full(bench.pool)  # a fake that is cut off in its start would leave its socket
    await bench.pool.close()
    await bench.both.close()
    assert bench.living() == (0, 0)
    assert len(asyncio.all_tasks()) == 1, "a task outlived the pool"


async def test_it_keeps_those_of_the_first_backend(bench: Bench) -> None:
    await bench.begin()
    assert await bench.become(docker=2, e2b=0)
    assert bench.e2b.asked == 0


@pytest.mark.parametrize("trouble", [SandboxFailure("down"), BackendFull("full", 0.001)])
async def test_those_of_the_next_are_replaced_when_the_first_makes_them_again_and_not_before(
    bench: Bench, trouble: SandboxFailure
) -> None:
    bench.docker.trouble = trouble
    await bench.begin()
    assert await bench.become(docker=0, e2b=2)
    await bench.some_checks()
    assert len(bench.e2b.made) == 2, "it tries the first again without making others on the next"
    bench.docker.trouble = None
    assert await bench.become(docker=2, e2b=0)
    ready = await bench.pool.take(BOTH)
    assert ready.sandbox.backend_name == "docker"
    ready.channel.close()
    stats = bench.pool.stats()[BOTH]
    assert stats.made == stats.depth + stats.hits + stats.outdated
    assert stats.outdated == 2


async def test_those_of_the_first_are_kept_while_it_is_down(bench: Bench) -> None:
    await bench.begin()
    assert await bench.become(docker=2, e2b=0)
    bench.docker.trouble = SandboxFailure("down")
    first = await bench.pool.take(BOTH)
    assert await bench.become(docker=2, e2b=1), "the one that was taken counts, too"
    await bench.some_checks()
    assert bench.living() == (2, 1)
    second = await bench.pool.take(BOTH)
    assert [first.sandbox.backend_name, second.sandbox.backend_name] == ["docker", "docker"]
    first.channel.close()
    second.channel.close()


async def test_a_first_backend_that_comes_and_goes_costs_no_more_than_one_each_time(bench: Bench) -> None:
    await bench.begin()
    assert await bench.become(docker=2, e2b=0)
    for turn in range(5):
        bench.docker.trouble = SandboxFailure("down")
        (await bench.pool.take(BOTH)).channel.close()
        assert await eventually_async(lambda turn=turn: len(bench.e2b.made) == turn + 1)  # type: ignore[misc]
        bench.docker.trouble = None
        assert await eventually_async(lambda: not bench.e2b.living)
        assert await eventually_async(lambda: bench.pool.stats()[BOTH].depth == 2)
    assert len(bench.e2b.made) == 5


async def test_one_place_at_a_first_backend_that_is_full_replaces_one_and_leaves_the_others(bench: Bench) -> None:
    """Each session that ends frees a place there; the pool is not remade for it."""
    bench.docker.places = 0
    await bench.begin(size=4)
    assert await bench.become(docker=0, e2b=4)
    for places in (1, 2, 3):
        bench.docker.places = places
        assert await bench.become(docker=places, e2b=4 - places)
        await bench.some_checks()
    assert (len(bench.docker.made), len(bench.e2b.made)) == (3, 4), "nothing was made that nobody needed"


async def test_those_of_the_first_backend_are_handed_out_first_and_of_them_the_oldest(bench: Bench) -> None:
    bench.docker.places = 0
    await bench.begin(size=3)
    assert await bench.become(docker=0, e2b=3)
    bench.docker.places = 2
    assert await bench.become(docker=2, e2b=1)
    taken = [await bench.pool.take(BOTH) for _ in range(3)]
    assert [ready.sandbox for ready in taken] == [*bench.docker.made[:2], bench.e2b.made[0]]
    for ready in taken:
        ready.channel.close()


async def test_a_pool_that_is_to_keep_fewer_gives_up_those_of_the_last_backend(bench: Bench) -> None:
    bench.docker.places = 0
    await bench.begin(size=3)
    assert await bench.become(docker=0, e2b=3)
    bench.docker.places = 1
    assert await bench.become(docker=1, e2b=2)
    bench.pool.keep_ready([WarmSandboxes(BOTH, 1)])
    assert await bench.become(docker=1, e2b=0)


async def test_each_is_up_to_date_by_its_own_backend(bench: Bench) -> None:
    bench.docker.trouble = SandboxFailure("down")
    await bench.begin()
    assert await bench.become(docker=0, e2b=2)
    bench.e2b.image = "second"
    assert await eventually_async(lambda: [s.fingerprint for s in bench.e2b.living] == ["e2b second"] * 2)


async def test_a_client_that_names_a_backend_is_not_served_with_what_another_made(bench: Bench) -> None:
    await bench.begin()
    assert await bench.become(docker=2, e2b=0)
    ready = await bench.pool.take(replace(SPEC, backends=("e2b",)))
    assert (ready.sandbox.backend_name, ready.warm) == ("e2b", False)
    ready.channel.close()


@pytest.mark.parametrize("ready", [None, {}], ids=["it never greets", "it greets badly"])
async def test_a_backend_whose_guests_do_not_answer_is_passed_over_as_one_that_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: dict[str, object] | None
) -> None:
    """A sandbox of it costs the caller all the time that a guest has to answer."""
    monkeypatch.setattr("executor_server.sessions.pool.pool.READY_TIME_S", 0.25)
    docker, e2b = SandboxFactory(tmp_path / "d", "docker"), SandboxFactory(tmp_path / "e", "e2b")
    docker.prepare = lambda guest: setattr(guest, "ready", ready)
    time_s = 0.0
    both = BackendSet([docker, e2b], FailOverSettings(HEALTH), now_s=lambda: time_s)
    await both.start()
    await both.adopt(())
    asked_at_s: list[float] = []
    while len(asked_at_s) < 5:
        asked = docker.asked
        made = await make_ready(both, BOTH, warm=False)
        made.channel.close()
        assert made.sandbox.backend_name == "e2b"
        if docker.asked > asked:
            asked_at_s.append(time_s)
        time_s += 0.5
    assert asked_at_s == [0.0, 1.0, 3.0, 7.0, 15.0], "that a sandbox was made is no success"
    assert both.states()["docker"] == "down"
    assert docker.living == []
    await both.close()
