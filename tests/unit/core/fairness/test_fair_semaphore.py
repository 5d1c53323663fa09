"""Turns are fair among tenants, bounded, and never lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.core.errors import Reason, ResourceExhausted
from executor_server.core.fairness.fair_semaphore import FairSemaphore
from tests.support.rounds import rounds


class Takers:
    """Tasks that take a turn, say so, and hold it until they are released."""

    def __init__(self, queue: FairSemaphore) -> None:
        self.queue = queue
        self.granted: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._let_go: dict[str, asyncio.Event] = {}

    async def ask(self, *names: str) -> None:
        """`a1`, `a2`: of tenant a."""
        for name in names:
            self._let_go[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._take(name))
        await settled()

    async def let_go(self, *names: str) -> None:
        for name in names:
            self._let_go[name].set()
        await settled()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])
        await settled()

    async def _take(self, name: str) -> None:
        async with self.queue.hold(name[0]):
            self.granted.append(name)
            await self._let_go[name].wait()

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settled(handovers: int = 0) -> None:
    """Runs the loop until all is done that can be; each permit that is handed on at once takes a round of its own."""
    for _ in range(4 + handovers):
        await asyncio.sleep(0)


async def test_no_more_turns_are_granted_than_there_are() -> None:
    takers = Takers(FairSemaphore(2))
    await takers.ask("a1", "a2", "b1")
    assert takers.granted == ["a1", "a2"]
    await takers.end()


async def test_a_tenant_without_a_turn_goes_before_all_that_wait_for_one_that_has_some() -> None:
    takers = Takers(FairSemaphore(2))
    await takers.ask("a1", "a2", "a3", "a4", "a5", "b1")
    await takers.let_go("a1")
    assert takers.granted[2:] == ["b1"]
    await takers.end()


async def test_tenants_that_wait_take_turns() -> None:
    takers = Takers(FairSemaphore(1))
    await takers.ask("a0", "a1", "a2", "b1", "b2", "c1")
    for name in ("a0", "b1", "c1", "a1", "b2"):
        await takers.let_go(name)
    assert takers.granted == ["a0", "b1", "c1", "a1", "b2", "a2"]
    await takers.end()


async def test_who_leaves_the_queue_is_passed_over() -> None:
    takers = Takers(FairSemaphore(1))
    await takers.ask("a1", "b1", "c1")
    await takers.cancel("b1")
    await takers.let_go("a1")
    assert takers.granted == ["a1", "c1"]
    await takers.end()


async def test_a_turn_that_was_granted_to_somebody_who_just_left_goes_on_to_the_next() -> None:
    takers = Takers(FairSemaphore(1))
    await takers.ask("a1", "b1", "c1")
    takers._let_go["a1"].set()
    await asyncio.sleep(0)  # a1 gives back, and the turn is b1's, which has not run since
    await takers.cancel("b1")
    assert takers.granted == ["a1", "c1"]
    await takers.end()


async def test_a_turn_comes_back_from_who_fails() -> None:
    queue = FairSemaphore(1)
    with pytest.raises(ZeroDivisionError):
        async with queue.hold("a"):
            _ = 1 / 0
    async with queue.hold("b"):
        pass


async def test_one_tenant_can_have_only_so_many_waiting() -> None:
    takers = Takers(FairSemaphore(1, max_waiting=2))
    await takers.ask("a1", "a2", "a3", "b1")
    with pytest.raises(ResourceExhausted) as refusal:
        async with takers.queue.hold("a"):
            pass
    assert (refusal.value.reason, refusal.value.retry_after_s) == (Reason.QUEUE_FULL, 2.0)
    assert takers.queue.waiting("b") == 1
    await takers.end()


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["ask", "let_go", "cancel"]), st.sampled_from("abc"), st.integers(0, 3))),
)
@settings(max_examples=rounds(150, 50), deadline=None)
def test_whatever_happens_turns_are_neither_lost_nor_multiplied(
    capacity: int, steps: list[tuple[str, str, int]]
) -> None:
    async def run() -> None:
        takers = Takers(FairSemaphore(capacity))
        for number, (step, tenant, which) in enumerate(steps):
            mine = [name for name, task in takers.tasks.items() if name[0] == tenant and not task.done()]
            if step == "ask":
                await takers.ask(f"{tenant}{number}")
            elif mine and step == "let_go":
                takers._let_go[mine[which % len(mine)]].set()
            elif mine:
                takers.tasks[mine[which % len(mine)]].cancel()
            if which:  # else the next step comes before this one has settled
                await settled(handovers=len(takers.tasks))
                open_ = [name for name, task in takers.tasks.items() if not task.done()]
                held = [name for name in takers.granted if name in open_]
                assert len(held) == min(capacity, len(open_))
        await takers.end()
        await takers.ask(*(f"x{number}" for number in range(capacity + 1)))
        assert len([name for name in takers.granted if name[0] == "x"]) == capacity
        await takers.end()

    asyncio.run(run())
