"""The warm pool: filled in the background, never an error for the caller, nothing left when it closes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from executor_server.core.errors import BackendFull, EnvironmentFailed, ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
from executor_server.core.packages import PackagesSpec, Progress
from executor_server.guest.wire.frames import Kind
from executor_server.policy.decide import WarmSandboxes
from executor_server.sessions.pool.asked_kinds import AskedSettings
from executor_server.sessions.pool.kind import PoolStats
from executor_server.sessions.pool.pool import PoolSettings, WarmPool, make_ready
from tests.support.fake_backend import SPEC, FakeBackend, FakeSandbox
from tests.support.polling import eventually_async, is_full

SOON = {"backoff_s": 0.001, "max_backoff_s": 0.002}
OTHER_SPEC = replace(SPEC, memory_bytes=SPEC.memory_bytes * 2)


class Backend(FakeBackend):
    """Its image can be replaced, be missing, and be unknown."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.image = "first"
        self.unknown = False
        self.missing: dict[SandboxSpec, SandboxFailure] = {}

    async def fingerprint(self, spec: SandboxSpec) -> str:
        if self.unknown:
            raise SandboxFailure("the Engine does not answer")
        return self.image

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if spec in self.missing:
            self.asked += 1
            raise self.missing[spec]
        image = self.image
        sandbox = await super().create(spec)
        sandbox.fingerprint = image
        return sandbox


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    backend = Backend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def make_pool(backend: Backend) -> AsyncIterator[Any]:
    pools: list[WarmPool] = []

    async def make(*specs: Any, size: int = 2, **settings: Any) -> WarmPool:
        pool = WarmPool(backend, PoolSettings(**{**SOON, **settings}))
        pools.append(pool)
        pool.keep_ready([WarmSandboxes(spec, size) for spec in specs or (SPEC,)])
        return pool

    yield make
    for pool in pools:
        await pool.close()
    assert len(asyncio.all_tasks()) == 1, "a task outlived the pool"


async def full(pool: WarmPool) -> None:
    assert await is_full(pool)


async def test_it_fills_itself_for_each_spec_and_hands_out_each_sandbox_once(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(SPEC, OTHER_SPEC)
    await full(pool)
    assert len(backend.made) == 4
    taken = [await pool.take(SPEC), await pool.take(SPEC), await pool.take(OTHER_SPEC)]
    assert all(ready.warm and ready.channel.connected for ready in taken)
    assert len({ready.sandbox.sandbox_id for ready in taken}) == 3
    await full(pool)
    assert len(backend.made) == 7
    for ready in taken:
        ready.channel.close()


async def test_the_wait_after_a_failure_grows_to_its_limit_and_is_forgotten_after_a_success(
    backend: Backend, make_pool: Any
) -> None:
    backend.failures = 5
    with capture_logs() as logs:
        pool = await make_pool(size=1, backoff_s=0.001, max_backoff_s=0.004)
        await full(pool)
        backend.failures = 1
        (await pool.take(SPEC)).channel.close()
        await full(pool)
    waits = [entry["retry_after_s"] for entry in logs if entry["event"] == "pool_refill_failed"]
    assert waits == [0.001, 0.002, 0.004, 0.004, 0.004, 0.001]


@pytest.mark.parametrize("kind", [ImageNotReady, BackendFull])
async def test_what_says_when_it_may_be_ready_is_asked_for_then(
    backend: Backend, make_pool: Any, kind: type[ImageNotReady] | type[BackendFull]
) -> None:
    backend.missing[SPEC] = kind("not yet", retry_after_s=0.02)
    with capture_logs() as logs:
        pool = await make_pool(size=1, backoff_s=0.001, max_backoff_s=9.0)
        assert await eventually_async(lambda: backend.asked == 3)
        del backend.missing[SPEC]
        await full(pool)
    waits = [entry["retry_after_s"] for entry in logs if entry["event"] == "pool_refill_failed"]
    assert waits == [0.02] * 3


async def test_an_environment_that_is_being_made_is_waited_for_and_no_failure(backend: Backend, make_pool: Any) -> None:
    progress = Progress("installing", 1, 2, "packages")
    backend.missing[SPEC] = ImageNotReady("being made", retry_after_s=0.01, progress=progress)
    with capture_logs() as logs:
        pool = await make_pool(size=1, backoff_s=0.001)
        assert await eventually_async(lambda: backend.asked == 3)
        del backend.missing[SPEC]
        await full(pool)
    waits = [entry["progress"] for entry in logs if entry["event"] == "pool_waits"]
    assert waits == ["installing, 1 of 2 packages"] * 3
    assert (pool.stats()[SPEC].failed, pool.stats()[SPEC].made) == (0, 1)


async def test_one_kind_that_fails_does_not_hold_up_another(backend: Backend, make_pool: Any) -> None:
    backend.missing[SPEC] = ImageNotReady("nobody built it")
    pool = await make_pool(SPEC, OTHER_SPEC, backoff_s=600.0, max_backoff_s=600.0)
    assert await eventually_async(lambda: pool.stats()[OTHER_SPEC].depth == 2)
    (await pool.take(OTHER_SPEC)).channel.close()
    assert await eventually_async(lambda: pool.stats()[OTHER_SPEC].depth == 2)
    assert (pool.stats()[SPEC].failed, pool.stats()[SPEC].made) == (1, 0)


async def test_one_is_made_at_a_time_over_all_kinds(backend: Backend, make_pool: Any) -> None:
    backend.admission.clear()
    pool = await make_pool(SPEC, OTHER_SPEC, size=3)
    assert await eventually_async(lambda: sum(stats.making for stats in pool.stats().values()) == 1)
    assert backend.asked == 1
    backend.admission.set()
    await full(pool)


async def test_an_outdated_sandbox_is_not_handed_out_before_its_replacement(backend: Backend, make_pool: Any) -> None:
    """The first refill finds the new image; the second take must not get a sandbox of the old one."""
    pool = await make_pool(check_interval_s=600.0)
    await full(pool)
    (await pool.take(SPEC)).channel.close()
    backend.image = "second"
    assert await eventually_async(lambda: pool.stats()[SPEC].outdated == 1)
    ready = await pool.take(SPEC)
    assert ready.sandbox.fingerprint == "second"
    ready.channel.close()


async def test_an_image_replaced_during_a_creation_leaves_the_sandbox_unserved(
    backend: Backend, make_pool: Any
) -> None:
    pool = await make_pool(size=1, check_interval_s=0.001)
    await full(pool)
    backend.admission.clear()
    (await pool.take(SPEC)).channel.close()
    assert await eventually_async(lambda: pool.stats()[SPEC].making == 1)
    backend.image = "second"
    backend.admission.set()
    assert await eventually_async(lambda: pool.stats()[SPEC].outdated == 1 and pool.stats()[SPEC].depth == 1)
    assert [sandbox.fingerprint for sandbox in backend.living][-1] == "second"


async def test_a_backend_that_can_t_say_what_is_up_to_date_does_not_empty_the_pool(
    backend: Backend, make_pool: Any
) -> None:
    with capture_logs() as logs:
        pool = await make_pool(check_interval_s=0.001)
        await full(pool)
        backend.unknown = True
        assert await eventually_async(lambda: any(entry["event"] == "pool_check_failed" for entry in logs))
        assert pool.stats()[SPEC].depth == 2
        backend.unknown, backend.image = False, "second"
        assert await eventually_async(lambda: pool.stats()[SPEC].outdated == 2)
    assert len([entry for entry in logs if entry["event"] == "pool_check_failed"]) == 1


async def test_the_counts_hold_whatever_happens_at_the_same_time(backend: Backend, make_pool: Any) -> None:
    """Takers, deaths, failures and replaced images in random order, over refills that never catch up."""
    chance = random.Random(7)
    pool = await make_pool(SPEC, OTHER_SPEC, size=3, check_interval_s=0.001)
    taken: list[tuple[SandboxSpec, bool]] = []

    async def take(spec: SandboxSpec) -> None:
        try:
            ready = await pool.take(spec)
        except SandboxFailure:
            taken.append((spec, False))
            return
        taken.append((spec, ready.warm))
        ready.channel.close()
        await ready.sandbox.destroy()

    takers = []
    for step in range(150):
        act = chance.randrange(6)
        if act < 3:
            takers.append(asyncio.create_task(take(chance.choice((SPEC, OTHER_SPEC)))))
        elif act == 3 and (greeted := [sandbox for sandbox in backend.living if sandbox.guest.received]):
            await chance.choice(greeted).guest.die()
        elif act == 4:
            backend.failures += 1
        else:
            backend.image = f"image {step}"
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.002)))
    await asyncio.gather(*takers)
    backend.failures = 0
    await full(pool)
    await pool.close()
    for spec, stats in pool.stats().items():
        assert stats.made == stats.hits + stats.lost + stats.outdated + stats.closed
        assert (stats.depth, stats.making) == (0, 0)
        assert stats.hits == taken.count((spec, True))
        assert stats.misses == taken.count((spec, False))
    assert not backend.living


async def test_what_happened_is_counted(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(size=1)
    await full(pool)
    first = await pool.take(SPEC)
    second = await pool.take(SPEC)
    await full(pool)
    await pool.close()
    stats = pool.stats()[SPEC]
    assert (first.warm, second.warm) == (True, False)
    expected = PoolStats(size=1, hits=1, misses=1, made=2, closed=1, ready_count=3)
    assert replace(stats, ready_time_sum_s=0.0, ready_time_last_s=0.0) == expected
    assert 0 < stats.ready_time_last_s < stats.ready_time_sum_s
    assert backend.living == [first.sandbox, second.sandbox], "those that were taken are not the pool's"
    first.channel.close()
    second.channel.close()


async def test_a_kept_sandbox_that_dies_is_destroyed_and_replaced(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool()
    await full(pool)
    dead = backend.made[0]
    await dead.guest.die()
    assert await eventually_async(lambda: dead.destroyed and len(backend.living) == 2)
    await full(pool)
    taken = await pool.take(SPEC)
    assert taken.sandbox is not dead
    taken.channel.close()


async def test_a_kept_sandbox_that_says_something_unasked_is_destroyed(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(size=1)
    await full(pool)
    liar = backend.made[0]
    liar.guest.say(Kind.LOG, {"id": "", "stream": "stdout"}, b"x")
    assert await eventually_async(lambda: liar.destroyed and len(backend.living) == 1)


def ready_of(head: dict[str, Any]) -> Any:
    return lambda guest: setattr(guest, "ready", head)


BAD_GUESTS: dict[str, Any] = {
    "another version": ready_of({"protocol": 99, "python": "3.11.0", "generation": 1}),
    "it hangs up": lambda guest: guest.on.update({Kind.HELLO: lambda _: guest.hang_up()}),
    "it speaks something else": lambda guest: guest.on.update({Kind.HELLO: lambda _: guest.write_raw(b"HTTP/1.1 400")}),
}


@pytest.mark.parametrize("what", BAD_GUESTS)
async def test_a_sandbox_whose_guest_does_not_greet_properly_is_not_left_behind(backend: Backend, what: str) -> None:
    backend.prepare = BAD_GUESTS[what]
    with pytest.raises(SandboxFailure):
        await make_ready(backend, SPEC, warm=False)
    assert not backend.living


async def test_a_guest_that_never_greets_is_given_up_after_its_time(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.prepare = ready_of(None)  # type: ignore[arg-type]
    monkeypatch.setattr("executor_server.sessions.pool.pool.READY_TIME_S", 0.05)
    with pytest.raises(SandboxFailure, match="not ready"):
        await make_ready(backend, SPEC, warm=False)
    assert not backend.living


async def test_closing_during_a_creation_leaves_nothing(backend: Backend, make_pool: Any) -> None:
    backend.admission.clear()
    pool = await make_pool()
    assert await eventually_async(lambda: backend.asked == 1)
    await pool.close()
    backend.admission.set()
    assert not backend.living


async def test_closing_while_a_guest_has_not_greeted_leaves_nothing(backend: Backend, make_pool: Any) -> None:
    backend.prepare = ready_of(None)  # type: ignore[arg-type]
    pool = await make_pool(size=1)
    assert await eventually_async(lambda: backend.made and backend.made[0].guest.received)
    await pool.close()
    assert not backend.living


async def test_closing_destroys_what_is_kept_once_even_if_that_fails(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool()
    await full(pool)
    backend.made[0].failure = SandboxFailure("still there")
    await pool.close()
    assert [sandbox.destroyed for sandbox in backend.made] == [1, 1]


# -- other kinds


async def test_nothing_that_an_earlier_policy_approved_is_served_or_kept(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(SPEC)
    await full(pool)
    kept, newer = list(backend.living), replace(SPEC, policy="newer")
    pool.keep_ready([WarmSandboxes(newer, 2)])
    await full(pool)
    assert await eventually_async(lambda: all(sandbox.destroyed for sandbox in kept))
    assert set(pool.stats()) == {newer}
    for spec, warm in ((SPEC, False), (newer, True)):
        ready = await pool.take(spec)
        assert (ready.warm, ready.sandbox in kept) == (warm, False)
        ready.channel.close()


async def test_what_is_being_made_for_an_earlier_policy_is_discarded(backend: Backend, make_pool: Any) -> None:
    backend.admission.clear()
    pool = await make_pool(SPEC, size=1)
    assert await eventually_async(lambda: backend.asked)
    newer = replace(SPEC, policy="newer")
    pool.keep_ready([WarmSandboxes(newer, 1)])
    backend.admission.set()
    await full(pool)
    assert await eventually_async(lambda: backend.made[0].destroyed)
    assert len(backend.living) == 1


async def test_a_taker_that_waits_while_the_kinds_change_gets_what_was_approved_for_it(
    backend: Backend, make_pool: Any
) -> None:
    pool = await make_pool(SPEC, size=0)
    backend.admission.clear()
    taking = asyncio.create_task(pool.take(SPEC))
    assert await eventually_async(lambda: backend.asked)
    pool.keep_ready([])
    backend.admission.set()
    ready = await taking
    assert not backend.made[0].destroyed
    ready.channel.close()


async def test_kinds_that_stay_keep_their_sandboxes_and_take_another_size(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(SPEC, size=1)
    await full(pool)
    (before,) = backend.living
    pool.keep_ready([WarmSandboxes(SPEC, 2)])
    await full(pool)
    assert not before.destroyed
    assert len(backend.living) == 2
    pool.keep_ready([WarmSandboxes(SPEC, 1)])
    assert await eventually_async(lambda: len(backend.living) == 1)


async def test_a_pool_that_kept_nothing_can_come_to_keep_some_but_not_when_it_is_closed(
    backend: Backend, make_pool: Any
) -> None:
    pool = await make_pool(SPEC, size=0)
    pool.keep_ready([WarmSandboxes(SPEC, 1)])
    await full(pool)
    await pool.close()
    pool.keep_ready([WarmSandboxes(SPEC, 2)])
    assert not backend.living
    assert len(asyncio.all_tasks()) == 1


async def test_kept_guests_hear_that_there_is_a_daemon(backend: Backend, make_pool: Any) -> None:
    """A guest that hears nothing for its orphan_time_s ends itself, so the pool was remade each time."""
    pool = await make_pool(size=2, ping_interval_s=0.001)
    await full(pool)
    for sandbox in backend.living:
        await sandbox.guest.got(Kind.PING, 2)


async def test_a_check_that_breaks_does_not_end_refilling(backend: Backend, make_pool: Any, monkeypatch: Any) -> None:
    """An exception of a bug, ours or the SDK's, would leave the pool empty for good."""

    async def broken(spec: SandboxSpec) -> str:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(backend, "fingerprint", broken)
    pool = await make_pool(size=2)
    await full(pool)
    await pool.take(SPEC)
    await full(pool)


# -- kinds that are asked for often

POLARS, NUMPY = (replace(SPEC, packages=PackagesSpec((name,))) for name in ("polars", "numpy"))
TWICE = AskedSettings(max_kinds=1, requests=2, within_s=600.0, kept_s=600.0)


async def take(pool: WarmPool, spec: SandboxSpec) -> bool:
    """Takes a sandbox and drops it; True if it was ready."""
    ready = await pool.take(spec)
    ready.channel.close()
    await ready.sandbox.destroy()
    return ready.warm


async def test_kinds_that_are_asked_for_often_have_a_sandbox_ready(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(size=0, asked=TWICE)
    assert [await take(pool, POLARS), await take(pool, POLARS)] == [False, False]
    await full(pool)
    assert pool.stats()[POLARS].depth == 1
    assert await take(pool, POLARS)
    await full(pool)
    assert [await take(pool, NUMPY), await take(pool, NUMPY)] == [False, False]
    await full(pool)
    assert pool.stats().keys() == {SPEC, NUMPY}, "there is room for one"
    assert await eventually_async(lambda: len(backend.living) == 1)


async def test_another_policy_forgets_what_was_asked_for(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(size=0, asked=TWICE)
    await take(pool, POLARS)
    await take(pool, POLARS)
    await full(pool)
    pool.keep_ready([])
    assert pool.stats() == {}
    assert await eventually_async(lambda: not backend.living)
    assert not await take(pool, POLARS)
    assert pool.stats() == {}


async def test_packages_that_can_not_be_had_any_more_are_not_tried_again(backend: Backend, make_pool: Any) -> None:
    pool = await make_pool(size=0, asked=TWICE)
    await take(pool, POLARS)
    backend.admission.clear()
    taking = asyncio.create_task(take(pool, POLARS))
    assert await eventually_async(lambda: backend.asked == 2)
    backend.missing[POLARS] = EnvironmentFailed("it was yanked")
    backend.admission.set()
    assert not await taking
    assert await eventually_async(lambda: backend.asked == 3 and POLARS not in pool.stats())
    with pytest.raises(EnvironmentFailed):
        await pool.take(POLARS)


async def test_kept_kinds_that_were_only_asked_for_make_room_when_a_sandbox_can_not_be_made(
    backend: Backend, make_pool: Any
) -> None:
    pool = await make_pool(size=0, asked=TWICE)
    await take(pool, POLARS)
    await take(pool, POLARS)
    await full(pool)
    backend.missing[NUMPY] = SandboxFailure("no user is left")
    with pytest.raises(SandboxFailure, match="no user"):
        await pool.take(NUMPY)
    assert POLARS not in pool.stats()
    assert await eventually_async(lambda: not backend.living)


async def test_a_backend_that_can_t_prepare_yet_is_asked_again(backend: Backend) -> None:
    """It may start later than the daemon, and the kinds of the pool may never change."""
    asked: list[list[SandboxSpec]] = []

    async def prepare(specs: Sequence[SandboxSpec]) -> Sequence[SandboxSpec]:
        asked.append(list(specs))
        if len(asked) == 1:
            raise SandboxFailure("the backend is not started")
        return []

    pool = WarmPool(backend, PoolSettings(prepare_after_s=0.0, max_backoff_s=0.0), prepare)
    pool.keep_ready([WarmSandboxes(SPEC, 1)])
    try:
        assert await eventually_async(lambda: asked == [[SPEC], [SPEC]])
    finally:
        await pool.close()


async def test_sandboxes_are_made_again_when_the_backend_makes_their_kind_better(backend: Backend) -> None:
    better = asyncio.Event()
    asked: list[list[SandboxSpec]] = []

    async def prepare(specs: Sequence[SandboxSpec]) -> Sequence[SandboxSpec]:
        asked.append(list(specs))
        await better.wait()
        return [SPEC]

    settings = PoolSettings(prepare_after_s=0.0)
    pool = WarmPool(backend, settings, prepare)
    pool.keep_ready([WarmSandboxes(SPEC, 1), WarmSandboxes(POLARS, 0)])
    try:
        await full(pool)
        assert await eventually_async(lambda: asked == [[SPEC]])
        better.set()
        assert await eventually_async(lambda: pool.stats()[SPEC].outdated == 1)
        await full(pool)
        assert pool.stats()[SPEC].depth == 1
    finally:
        await pool.close()
