"""The memory that all journals share: bounded, fair among tenants, and never in the way of who is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from executor_server.executions import Execution, ExecutionControl
from executor_server.journal_room import JournalRoom
from executor_server.model import Event, Log, Outcome, Result, VariablesState

KiB = 1024
TOTAL = 1024 * KiB
FLOOR = 64 * KiB
END = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1)


class Bench:
    """Executions that share room."""

    def __init__(self) -> None:
        self.room = JournalRoom(TOTAL, max_sessions=1000)
        assert self.room.floor_bytes == FLOOR
        self.held: set[str] = set()

    def execution(self, tenant: str, name: str) -> Execution:
        def hold(held: bool) -> None:
            (self.held.add if held else self.held.discard)(name)

        control = ExecutionControl(lambda _: None, lambda *_: None, hold, self.room.of(tenant))
        return Execution(name, b"", "policy", 100 * TOTAL, control)

    def fill(self, execution: Execution, most_bytes: int = 10 * TOTAL) -> None:
        """Says as much as it may, and no more than that."""
        while execution.execution_id not in self.held and execution.journal_size < most_bytes:
            execution.publish(Log("stdout", "x" * 8 * KiB))


async def follow(execution: Execution) -> list[int]:
    """A reader that takes whatever comes, to the end."""
    events = cast("AsyncGenerator[Event]", execution.events())
    return [event.number async for event in events]


async def test_all_together_hold_no_more_than_the_total_and_a_floor_each() -> None:
    bench = Bench()
    executions = [bench.execution("tenant", f"e{number}") for number in range(64)]
    for execution in executions:
        bench.fill(execution)
    assert len(bench.held) == 64
    assert bench.room.held_bytes < TOTAL + 64 * (FLOOR + 16 * KiB)


async def test_one_that_is_read_goes_on_whatever_others_hold() -> None:
    bench = Bench()
    for number in range(4):
        bench.fill(bench.execution("tenant", f"unread{number}"))
    read = bench.execution("tenant", "read")
    reader = asyncio.create_task(follow(read))
    for _ in range(100):
        bench.fill(read, read.journal_size + 32 * KiB)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert read.last_number > 200, "it stood still"
    read.publish(END)
    assert len(await reader) == read.last_number


async def test_who_holds_less_than_an_even_part_is_not_held() -> None:
    """A tenant that fills the room is in nobody's way but its own."""
    bench = Bench()
    greedy = bench.execution("greedy", "greedy")
    bench.fill(greedy)
    assert greedy.journal_size > TOTAL
    modest = bench.execution("modest", "modest")
    bench.fill(modest, TOTAL // 2 - 16 * KiB)
    assert bench.held == {"greedy"}
    bench.fill(modest)
    assert bench.held == {"greedy", "modest"}
    assert bench.room.held_bytes < 2 * TOTAL


async def test_those_who_wait_go_on_when_there_is_room() -> None:
    bench = Bench()
    first, second = bench.execution("tenant", "first"), bench.execution("tenant", "second")
    bench.fill(first)
    bench.fill(second)
    assert bench.held == {"first", "second"}
    first.leave()
    assert bench.held == {"second"}
    await asyncio.sleep(0)
    assert bench.held == set()
    second.leave()
    assert bench.room.held_bytes == 0
    assert not bench.room.waiting


async def test_what_was_read_to_its_end_is_let_go_before_anybody_waits_but_for_its_result() -> None:
    bench = Bench()
    ended = bench.execution("tenant", "ended")
    bench.fill(ended, TOTAL // 2)
    ended.publish(END)
    count = ended.last_number
    assert len(await follow(ended)) == count
    unread = bench.execution("tenant", "unread")
    bench.fill(unread, TOTAL // 4)
    unread.publish(END)
    bench.fill(bench.execution("tenant", "next"), TOTAL // 2)
    assert not bench.held
    assert [event.kind async for event in ended.events(count - 1)] == [END]
    assert len(await follow(unread)) == unread.last_number, "what nobody has had is kept"
