"""The memory that all journals share: bounded, fair among tenants, and no obstacle to an execution that is read."""

from __future__ import annotations

import asyncio

from executor_server.core.model import Log, Outcome, Result, VariablesState
from executor_server.guest.wire.schema import Message
from executor_server.sessions.journal.execution import Execution
from executor_server.sessions.journal.memory import JournalMemory

KiB = 1024
TOTAL = 1024 * KiB
FLOOR = 64 * KiB
END = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1)


class Bench:
    """Executions that share memory, and their owner."""

    def __init__(self) -> None:
        self.memory = JournalMemory(TOTAL, max_sessions=1000)
        assert self.memory.floor_bytes == FLOOR
        self.held: set[str] = set()

    def execution(self, tenant: str, name: str) -> Execution:
        return Execution(name, b"", "policy", 100 * TOTAL, self, self.memory.of(tenant))

    def send(self, message: Message, body: bytes) -> None:
        raise AssertionError("nothing is sent here")

    def on_end(self, execution_id: str, result: Result) -> None:
        raise AssertionError("the journal reports ends")

    def hold(self, holder: object, held: bool) -> None:
        (self.held.add if held else self.held.discard)(str(holder))

    def fill(self, execution: Execution, most_bytes: int = 10 * TOTAL) -> None:
        """Publishes until the execution is held back."""
        while execution.execution_id not in self.held and execution.journal_size < most_bytes:
            execution.publish(Log("stdout", "x" * 8 * KiB))


async def follow(execution: Execution) -> list[int]:
    """Reads all events, to the end."""
    return [event.number async for event in execution.events()]


async def test_all_together_hold_no_more_than_the_total_and_a_floor_each() -> None:
    bench = Bench()
    executions = [bench.execution("tenant", f"e{number}") for number in range(64)]
    for execution in executions:
        bench.fill(execution)
    assert len(bench.held) == 64
    assert bench.memory.held_bytes < TOTAL + 64 * (FLOOR + 16 * KiB)


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
    """A tenant that fills the memory holds back its own executions only."""
    bench = Bench()
    greedy = bench.execution("greedy", "greedy")
    bench.fill(greedy)
    assert greedy.journal_size > TOTAL
    modest = bench.execution("modest", "modest")
    bench.fill(modest, TOTAL // 2 - 16 * KiB)
    assert bench.held == {"greedy"}
    bench.fill(modest)
    assert bench.held == {"greedy", "modest"}
    assert bench.memory.held_bytes < 2 * TOTAL


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
    assert bench.memory.held_bytes == 0
    assert not bench.memory.waiting


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


async def test_code_that_is_kept_for_viewers_counts_and_is_the_first_to_go() -> None:
    bench = Bench()
    kept = bench.execution("tenant", "kept")
    kept.keep_code(b"x" * TOTAL)
    assert bench.memory.held_bytes == len(kept.code) == 64 * KiB
    kept.publish(END)
    await follow(kept)
    bench.fill(bench.execution("tenant", "unread"))
    assert kept.code == b""
    other = bench.execution("tenant", "other")
    before = bench.memory.held_bytes
    other.keep_code(b"1+1")
    other.leave()
    assert bench.memory.held_bytes == before
