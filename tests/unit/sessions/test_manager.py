"""All sessions together: made once for each request, never too many, ended when they should be, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.config.state_dir import StateDir
from executor_server.core.errors import (
    BackendFull,
    InvalidRequest,
    NotFound,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    SpecUnsupported,
    Unavailable,
)
from executor_server.core.model import Outcome, OutputMode, Principal
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.policy.decide import WarmSandboxes
from executor_server.sessions import Session, SessionManager, SessionRequest, SessionSettings
from executor_server.sessions.journal.registry import Registry
from executor_server.sessions.pool.pool import PoolSettings, WarmPool
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.fake_guest import FakeGuest
from tests.support.fake_session import execute, result_of
from tests.support.polling import eventually_async, is_full
from tests.support.specs import EXECUTION_LIMITS, LIMITS, session_spec

ALICE, BOB = Principal("alice", "a"), Principal("bob", "b")


class Bench:
    def __init__(self, backend: FakeBackend, pool: WarmPool, manager: SessionManager, registry: Registry) -> None:
        self.backend = backend
        self.pool = pool
        self.manager = manager
        self.registry = registry

    async def create(
        self, request_id: str = "r", owner: Principal = ALICE, prelude: str = "", **limits: float
    ) -> Session:
        spec = session_spec(SPEC, replace(LIMITS, **limits), (), prelude)  # type: ignore[arg-type]
        return await self.manager.create(owner, SessionRequest(request_id, spec))

    def task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Session]:
        return asyncio.create_task(self.create(*args, **kwargs))


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    benches: list[Bench] = []
    registries: list[Registry] = []

    async def make(pool_size: int = 0, **settings: Any) -> Bench:
        backend = FakeBackend(tmp_path)
        pool = WarmPool(backend, PoolSettings())
        registry = Registry(StateDir(tmp_path))
        manager = SessionManager(backend, pool, registry, SessionSettings(**{"sweep_interval_s": 0.005, **settings}))
        registries.append(registry)
        benches.append(Bench(backend, pool, manager, registry))
        pool.keep_ready([WarmSandboxes(SPEC, pool_size)])
        await manager.start()
        return benches[-1]

    yield make
    for bench in benches:
        bench.backend.admission.set()
        await bench.manager.close()
        await bench.pool.close()
        assert not bench.backend.living, "a sandbox outlived its manager"
    for registry in registries:
        assert registry.load() == [], "a session outlived its manager"
        registry.close()
    assert await eventually_async(lambda: len(asyncio.all_tasks()) == 1), "a task outlived the manager"


@pytest.fixture
async def bench(make: Any) -> Bench:
    bench: Bench = await make()
    return bench


# -- creation


async def test_a_caller_that_goes_away_leaves_the_creation_to_its_next_call(bench: Bench) -> None:
    bench.backend.admission.clear()
    first, second = bench.task(), bench.task()
    assert await eventually_async(lambda: bench.backend.asked)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    bench.backend.admission.set()
    assert await second is await bench.create()
    assert bench.backend.asked == 1


async def test_a_creation_that_failed_can_be_asked_for_again(bench: Bench) -> None:
    bench.backend.failures = 1
    failed = await asyncio.gather(*(bench.create() for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [Unavailable] * 3
    assert bench.backend.asked == 1
    session = await bench.create()
    assert bench.manager.list(ALICE) == [session]


async def test_a_failed_creation_says_nothing_of_the_host(bench: Bench) -> None:
    bench.backend.failures = 1
    with pytest.raises(Unavailable) as refused:
        await bench.create()
    assert refused.value.reason is Reason.BACKEND_UNAVAILABLE
    assert "no sandbox today" not in refused.value.message


async def test_a_full_backend_refuses_with_the_time_to_ask_again_and_none_of_its_own_words(bench: Bench) -> None:
    def refuse(_guest: FakeGuest) -> None:
        raise BackendFull("the account of host.example has its 20 sandboxes", retry_after_s=7.0)

    bench.backend.prepare = refuse
    with pytest.raises(ResourceExhausted) as refused:
        await bench.create()
    assert (refused.value.reason, refused.value.retry_after_s) == (Reason.BACKEND_FULL, 7.0)
    assert "example" not in refused.value.message


async def test_a_backend_that_makes_no_such_sandbox_says_so_to_the_client(bench: Bench) -> None:
    def refuse(_guest: FakeGuest) -> None:
        raise SpecUnsupported("Docker sandboxes can have no network here: runsc has a kernel of its own")

    bench.backend.prepare = refuse
    with pytest.raises(Unavailable, match="can have no network here") as refused:
        await bench.create()
    assert refused.value.reason is Reason.BACKEND_UNAVAILABLE


async def test_a_prelude_that_fails_is_the_request_s_fault_and_leaves_nothing(bench: Bench) -> None:
    bench.backend.prepare = lambda guest: guest.on.update(
        {Kind.CONFIGURE: lambda asked: guest.refuse(asked, "prelude_failed", "the prelude ended as exception")}
    )
    with pytest.raises(InvalidRequest, match="the prelude ended"):
        await bench.create(prelude="1/0")
    assert not bench.backend.living
    assert bench.manager.list(ALICE) == []


async def test_a_place_comes_free_with_a_failure_a_deletion_or_a_given_up_creation(make: Any) -> None:
    bench = await make(max_sessions=1)
    bench.backend.failures = 1
    with pytest.raises(Unavailable):
        await bench.create("r1")
    session = await bench.create("r2")
    with pytest.raises(ResourceExhausted):
        await bench.create("r3")
    await bench.manager.delete(ALICE, session.session_id)
    await bench.create("r4")


async def test_a_kept_sandbox_that_dies_when_it_is_taken_is_replaced(make: Any) -> None:
    bench = await make(pool_size=1)
    assert await is_full(bench.pool)
    victim = bench.backend.made[0]
    victim.guest.on[Kind.CONFIGURE] = lambda _: asyncio.ensure_future(victim.guest.die())
    session = await bench.create()
    assert session.state == "idle"
    assert victim.destroyed


async def test_a_new_sandbox_that_dies_at_once_is_our_failure(bench: Bench) -> None:
    bench.backend.prepare = lambda guest: guest.on.update(
        {Kind.CONFIGURE: lambda _: asyncio.ensure_future(guest.die())}
    )
    with pytest.raises(Unavailable) as refused:
        await bench.create()
    assert refused.value.reason is Reason.BACKEND_UNAVAILABLE
    assert not bench.backend.living


# -- owners


# -- the end


async def test_deleting_destroys_the_sandbox_and_frees_the_request(bench: Bench) -> None:
    session = await bench.create()
    execution = await execute(session)
    await bench.manager.delete(ALICE, session.session_id)
    assert not bench.backend.living
    assert (await result_of(execution)).outcome is Outcome.CANCELLED
    with pytest.raises(NotFound):
        bench.manager.get(ALICE, session.session_id)
    assert await bench.create() is not session


async def test_deletions_at_the_same_moment_succeed_or_find_nothing(bench: Bench) -> None:
    session = await bench.create()
    ended = await asyncio.gather(
        *(bench.manager.delete(ALICE, session.session_id) for _ in range(5)), return_exceptions=True
    )
    assert ended[0] is None
    assert {type(error) for error in ended[1:]} <= {NotFound, type(None)}
    assert not bench.backend.living


async def test_a_sandbox_that_cannot_be_destroyed_does_not_keep_its_session(bench: Bench) -> None:
    session = await bench.create()
    bench.backend.made[0].failure = SandboxFailure("still there")
    await bench.manager.delete(ALICE, session.session_id)
    assert bench.manager.list(ALICE) == []


async def swept(bench: Bench, times: int) -> bool:
    """Waits for one more sweep, by the end of a session that has expired."""
    for number in range(times):
        await bench.create(f"marker-{number}", owner=BOB, session_time_s=1e-3)
        if not await eventually_async(lambda: not bench.manager.list(BOB)):
            return False
    return True


async def test_a_lost_session_stays_to_be_asked_until_it_expires(bench: Bench) -> None:
    session = await bench.create()
    execution = await execute(session)
    await bench.backend.made[0].guest.die()
    assert (await result_of(execution)).outcome is Outcome.LOST
    assert await swept(bench, 1)
    assert bench.manager.get(ALICE, session.session_id).state == "lost"
    assert session.execution("e") is execution
    session.spec = replace(session.spec, limits=replace(LIMITS, session_time_s=1e-3))
    assert await eventually_async(lambda: not bench.manager.list(ALICE))


# -- stopping


async def test_draining_lets_what_runs_end_and_takes_nothing_new(bench: Bench) -> None:
    session = await bench.create()
    execution = await execute(session)
    draining = asyncio.create_task(bench.manager.drain(30.0))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await bench.create("late")
    with pytest.raises(Unavailable):
        await session.execute("late", "1", OutputMode.TRAILING_EXPRESSION, EXECUTION_LIMITS)
    assert await bench.create() is session, "a request that was already granted is still answered"
    assert not draining.done()
    bench.backend.made[0].guest.end("e")
    await draining
    assert (await result_of(execution)).outcome is Outcome.SUCCEEDED


async def test_a_session_that_was_being_created_when_draining_began_takes_nothing_new(bench: Bench) -> None:
    """Its executions prolonged the drain to the end of the grace, and were cancelled then."""
    running = await bench.create()
    execution = await execute(running)
    bench.backend.admission.clear()
    creation = bench.task("under way")
    assert await eventually_async(lambda: bench.backend.asked == 2)
    draining = asyncio.create_task(bench.manager.drain(30.0))
    await asyncio.sleep(0)
    bench.backend.admission.set()
    with pytest.raises(Unavailable) as refused:
        await (await creation).execute("late", "1", OutputMode.TRAILING_EXPRESSION, EXECUTION_LIMITS)
    assert refused.value.reason is Reason.DRAINING
    bench.backend.made[0].guest.end("e")
    await draining
    assert (await result_of(execution)).outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("where", ["backend", "greeting", "prelude"])
async def test_closing_during_a_creation_leaves_nothing(bench: Bench, where: str) -> None:
    if where == "backend":
        bench.backend.admission.clear()
    elif where == "greeting":
        bench.backend.prepare = lambda guest: setattr(guest, "ready", None)
    else:
        bench.backend.prepare = lambda guest: guest.on.update({Kind.CONFIGURE: lambda _: None})
    creation = bench.task()
    stuck_at = {
        "backend": lambda: bench.backend.asked,
        "greeting": lambda: bench.backend.made and bench.backend.made[0].guest.of_kind(Kind.HELLO),
        "prelude": lambda: bench.backend.made and bench.backend.made[0].guest.of_kind(Kind.CONFIGURE),
    }
    assert await eventually_async(stuck_at[where])
    await bench.manager.close()
    assert isinstance((await asyncio.gather(creation, return_exceptions=True))[0], asyncio.CancelledError)
    bench.backend.admission.set()
    assert not bench.backend.living


async def test_a_deletion_whose_caller_has_gone_is_waited_for_at_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await bench.create()
    sandbox, admission = bench.backend.made[-1], asyncio.Event()
    destroy = sandbox.destroy

    async def destroy_slowly() -> None:
        await admission.wait()
        await destroy()

    monkeypatch.setattr(sandbox, "destroy", destroy_slowly)
    deletion = asyncio.create_task(bench.manager.delete(ALICE, session.session_id))
    assert await eventually_async(lambda: bench.manager.list(ALICE) == [])
    deletion.cancel()
    await asyncio.gather(deletion, return_exceptions=True)
    end = asyncio.create_task(bench.manager.close())
    await asyncio.sleep(0)
    assert not end.done()
    admission.set()
    await end
    assert sandbox.destroyed


async def test_connections_made_before_the_session_is_written_down_are_counted(bench: Bench) -> None:
    """A later daemon would show the guest a used token, and be refused."""

    def hang_up_first(guest: FakeGuest) -> None:
        def answer(frame: Frame) -> None:
            guest.hang_up()
            guest.done(frame)

        guest.on[Kind.CONFIGURE] = answer

    bench.backend.prepare = hang_up_first
    await bench.create()
    (record,) = bench.registry.load()
    assert record.connections == 2
