"""The warm pool: filled in the background, never an error to the one who takes, nothing left when it closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.errors import SandboxFailure
from executor_server.guest.frames import Kind
from executor_server.policy import WarmSandboxes
from executor_server.pool import PoolSettings, WarmPool, make_ready
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.polling import eventually_async

SOON = {"backoff_s": 0.001, "max_backoff_s": 0.002}
OTHER_SPEC = replace(SPEC, memory_bytes=SPEC.memory_bytes * 2)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[FakeBackend]:
    backend = FakeBackend(tmp_path)
    yield backend
    await backend.close()


@pytest.fixture
async def make_pool(backend: FakeBackend) -> AsyncIterator[Any]:
    pools: list[WarmPool] = []

    async def make(*specs: Any, size: int = 2, **settings: Any) -> WarmPool:
        pool = WarmPool(backend, PoolSettings(**{**SOON, **settings}))
        pools.append(pool)
        await pool.start([WarmSandboxes(spec, size) for spec in specs or (SPEC,)])
        return pool

    yield make
    for pool in pools:
        await pool.close()
    assert len(asyncio.all_tasks()) == 1, "a task outlived the pool"


async def full(pool: WarmPool) -> None:
    await asyncio.wait_for(pool.full(), 10.0)


async def test_it_fills_itself_for_each_spec_and_hands_out_each_sandbox_once(
    backend: FakeBackend, make_pool: Any
) -> None:
    pool = await make_pool(SPEC, OTHER_SPEC, concurrency=2)
    await full(pool)
    assert len(backend.made) == 4
    taken = [await pool.take(SPEC), await pool.take(SPEC), await pool.take(OTHER_SPEC)]
    assert all(ready.warm and ready.channel.connected for ready in taken)
    assert len({ready.sandbox.sandbox_id for ready in taken}) == 3
    await full(pool)
    assert len(backend.made) == 7
    for ready in taken:
        ready.channel.close()


async def test_an_empty_pool_and_an_unknown_spec_give_a_new_sandbox(backend: FakeBackend, make_pool: Any) -> None:
    pool = await make_pool(size=0)
    ready = await pool.take(OTHER_SPEC)
    assert not ready.warm
    assert len(backend.made) == 1
    ready.channel.close()


async def test_a_pool_whose_refills_fail_gives_new_sandboxes_and_recovers(backend: FakeBackend, make_pool: Any) -> None:
    backend.failures = 5
    pool = await make_pool()
    await full(pool)
    assert backend.asked == 7
    assert len(backend.living) == 2


async def test_the_wait_after_a_failure_grows_to_its_limit_and_is_forgotten_after_a_success(
    backend: FakeBackend, make_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(delay: float) -> None:
        slept.append(delay)
        await sleep(0)

    monkeypatch.setattr("executor_server.pool.asyncio.sleep", note)
    backend.failures = 5
    pool = await make_pool(size=1, backoff_s=1.0, max_backoff_s=4.0)
    await full(pool)
    backend.failures = 1
    (await pool.take(SPEC)).channel.close()
    await full(pool)
    assert [delay for delay in slept if 1.0 <= delay <= 4.0] == [1.0, 2.0, 4.0, 4.0, 4.0, 1.0]


async def test_a_failure_on_the_spot_is_the_caller_s(backend: FakeBackend, make_pool: Any) -> None:
    pool = await make_pool(size=0)
    backend.failures = 1
    with pytest.raises(SandboxFailure):
        await pool.take(SPEC)


async def test_a_kept_sandbox_that_dies_is_destroyed_and_replaced(backend: FakeBackend, make_pool: Any) -> None:
    pool = await make_pool()
    await full(pool)
    dead = backend.made[0]
    await dead.guest.die()
    assert await eventually_async(lambda: dead.destroyed and len(backend.living) == 2)
    await full(pool)
    taken = await pool.take(SPEC)
    assert taken.sandbox is not dead
    taken.channel.close()


async def test_a_kept_sandbox_that_says_something_unasked_is_destroyed(backend: FakeBackend, make_pool: Any) -> None:
    pool = await make_pool(size=1)
    await full(pool)
    liar = backend.made[0]
    liar.guest.say(Kind.LOG, {"id": "", "stream": "stdout"}, b"x")
    assert await eventually_async(lambda: liar.destroyed and len(backend.living) == 1)


def ready_of(head: dict[str, Any]) -> Any:
    return lambda guest: setattr(guest, "ready", head)


BAD_GUESTS: dict[str, Any] = {
    "another version": ready_of({"protocol": 99, "python": "3.11.0", "generation": 1}),
    "no version": ready_of({}),
    "a long python": ready_of({"protocol": 1, "python": "3" * 65, "generation": 1}),
    "generation 0": ready_of({"protocol": 1, "python": "3.11.0", "generation": 0}),
    "it hangs up": lambda guest: guest.on.update({Kind.HELLO: lambda _: guest.hang_up()}),
    "it speaks something else": lambda guest: guest.on.update({Kind.HELLO: lambda _: guest.write_raw(b"HTTP/1.1 400")}),
    "it speaks before it greets": lambda guest: guest.on.update(
        {Kind.HELLO: lambda _: guest.say(Kind.LOG, {"id": "e"})}
    ),
}


@pytest.mark.parametrize("what", BAD_GUESTS)
async def test_a_sandbox_whose_guest_does_not_greet_properly_is_not_left_behind(
    backend: FakeBackend, what: str
) -> None:
    backend.prepare = BAD_GUESTS[what]
    with pytest.raises(SandboxFailure):
        await make_ready(backend, SPEC, warm=False)
    assert not backend.living


async def test_a_guest_that_never_greets_is_given_up_after_its_time(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.prepare = ready_of(None)  # type: ignore[arg-type]
    monkeypatch.setattr("executor_server.guest_channel.GuestChannel.connect.__defaults__", (0.05,))
    with pytest.raises(SandboxFailure, match="not ready"):
        await make_ready(backend, SPEC, warm=False)
    assert not backend.living


async def test_closing_during_a_creation_leaves_nothing(backend: FakeBackend, make_pool: Any) -> None:
    backend.gate.clear()
    pool = await make_pool(concurrency=2)
    assert await eventually_async(lambda: backend.asked == 2)
    await pool.close()
    backend.gate.set()
    assert not backend.living


async def test_closing_while_a_guest_has_not_greeted_leaves_nothing(backend: FakeBackend, make_pool: Any) -> None:
    backend.prepare = ready_of(None)  # type: ignore[arg-type]
    pool = await make_pool(size=1)
    assert await eventually_async(lambda: backend.made and backend.made[0].guest.received)
    await pool.close()
    assert not backend.living


async def test_closing_destroys_what_is_kept_once_even_if_that_fails(backend: FakeBackend, make_pool: Any) -> None:
    pool = await make_pool()
    await full(pool)
    backend.made[0].failure = SandboxFailure("still there")
    await pool.close()
    assert [sandbox.destroyed for sandbox in backend.made] == [1, 1]


async def test_a_taken_sandbox_is_not_the_pool_s_any_more(backend: FakeBackend, make_pool: Any) -> None:
    pool = await make_pool(size=1)
    await full(pool)
    taken = await pool.take(SPEC)
    await pool.close()
    assert [sandbox.sandbox_id for sandbox in backend.living] == [taken.sandbox.sandbox_id]
    taken.channel.close()


async def test_kept_guests_hear_that_there_is_a_daemon(backend: FakeBackend, make_pool: Any) -> None:
    """A guest that hears nothing for its orphan_time_s ends; the pool was renewed each time for that reason."""
    pool = await make_pool(size=2, ping_interval_s=0.001)
    await full(pool)
    for sandbox in backend.living:
        await sandbox.guest.got(Kind.PING, 2)
