"""The journal of an execution: numbered, bounded, followed by any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest

from executor_server.core.errors import ExecutorError, NotFound, OutOfRange, PreconditionFailed, Reason
from executor_server.core.model import (
    BlobChunk,
    Event,
    EventKind,
    Image,
    Log,
    Outcome,
    Result,
    ToolCall,
    VariablesState,
)
from executor_server.guest.wire.messages import Cancel, ToolResult
from executor_server.guest.wire.schema import Message
from executor_server.sessions.journal.execution import Execution, ToolFailure

END = Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1)


class Asked:
    """The owner of an execution, and what the execution asked of it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Message, bytes]] = []
        self.held: list[bool] = []

    def execution(self, journal_bytes: int = 10**6) -> Execution:
        return Execution("e", b"", "policy", journal_bytes, self)

    def send(self, message: Message, body: bytes) -> None:
        self.sent.append((message, body))

    def on_end(self, execution_id: str, result: Result) -> None:
        raise AssertionError("the journal reports ends")

    def hold(self, holder: object, held: bool) -> None:
        self.held.append(held)


def log(text: str = "x") -> Log:
    return Log("stdout", text)


async def read(execution: Execution, after: int = 0) -> list[Event]:
    return [event async for event in execution.events(after)]


def following(execution: Execution) -> aclosing[AsyncGenerator[Event]]:
    return aclosing(execution.events())


async def numbers(events: AsyncIterator[Event], count: int) -> list[int]:
    return [(await anext(events)).number for _ in range(count)]


async def test_events_are_numbered_from_1_and_end_with_the_result() -> None:
    execution = Asked().execution()
    kinds: list[EventKind] = [log("a"), log("b"), END]
    for kind in kinds:
        execution.publish(kind)
    assert await read(execution) == [Event(1, kinds[0]), Event(2, kinds[1]), Event(3, END)]


async def test_what_comes_after_the_result_is_dropped() -> None:
    execution = Asked().execution()
    execution.publish(END)
    execution.publish(log())
    execution.publish(Result(Outcome.LOST, VariablesState.LOST, 1))
    assert await read(execution) == [Event(1, END)]


async def test_readers_at_any_point_and_in_any_number_get_the_same_events() -> None:
    execution = Asked().execution()
    execution.publish(log("1"))
    early = asyncio.create_task(read(execution))
    waiting = asyncio.create_task(read(execution, after=1))
    await asyncio.sleep(0)
    execution.publish(log("2"))
    middle = asyncio.create_task(read(execution))
    await asyncio.sleep(0)
    execution.publish(END)
    everything = await read(execution)
    assert [event.number for event in everything] == [1, 2, 3]
    assert await early == await middle == everything
    assert await waiting == everything[1:]
    assert await read(execution, after=3) == []


@pytest.mark.parametrize("done", [False, True])
async def test_a_position_past_the_end_is_out_of_range(done: bool) -> None:
    execution = Asked().execution()
    execution.publish(log())
    if done:
        execution.publish(END)
    with pytest.raises(OutOfRange) as refused:
        await read(execution, after=3)
    assert refused.value.reason is Reason.EVENT_OUT_OF_RANGE


async def test_a_full_journal_holds_the_guest_until_a_reader_has_taken_something() -> None:
    asked = Asked()
    execution = asked.execution(journal_bytes=3000)
    for _ in range(3):
        execution.publish(log("x" * 1000))
    assert asked.held == [True]
    async with following(execution) as events:
        assert await numbers(events, 1) == [1]
        assert asked.held == [True], "what was only handed out has not arrived anywhere yet"
        assert await numbers(events, 1) == [2]
        assert asked.held == [True, False]
        with pytest.raises(OutOfRange, match="holds events 2 to 3"):
            await read(execution)
        execution.publish(log("x" * 1000))
        assert asked.held == [True, False, True]
        execution.publish(END)
        assert asked.held == [True, False, True, False], "a guest that has ended is not held"
        assert await numbers(events, 3) == [3, 4, 5]


async def test_only_what_every_reader_has_is_let_go() -> None:
    asked = Asked()
    execution = asked.execution(journal_bytes=1500)
    async with following(execution) as fast, following(execution) as slow:
        execution.publish(log("x" * 1000))
        assert await numbers(fast, 1) == await numbers(slow, 1) == [1]
        execution.publish(log("x" * 1000))
        execution.publish(log("x" * 1000))
        assert await numbers(fast, 2) == [2, 3]
        assert execution.journal_size > 1500
        assert await numbers(slow, 2) == [2, 3]
        execution.publish(END)
        assert await numbers(fast, 1) == await numbers(slow, 1) == [4]
    assert execution.journal_size <= 1500


async def test_a_reader_that_goes_away_no_longer_counts() -> None:
    asked = Asked()
    execution = asked.execution(journal_bytes=1500)
    async with following(execution) as stays:
        async with following(execution) as leaves:
            execution.publish(log("x" * 1000))
            await numbers(leaves, 1)
            await numbers(stays, 1)
            execution.publish(log("x" * 1000))
            await numbers(stays, 1)
            execution.publish(log("x" * 1000))
        assert asked.held[-1] is True
        assert await numbers(stays, 1) == [3]
        assert asked.held[-1] is False


async def test_a_cancelled_reader_leaves_the_execution_alone() -> None:
    execution = Asked().execution()
    reader = asyncio.create_task(read(execution))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    execution.publish(END)
    assert len(await read(execution)) == 1


@pytest.mark.parametrize(
    "kind",
    [
        log("x" * 9000),
        BlobChunk("b", bytes(9000)),
        Image(bytes(9000), "image/png", "figure"),
        ToolCall("c", "f", bytes(9000)),
    ],
)
def test_every_kind_of_payload_counts_in_the_journal(kind: EventKind) -> None:
    execution = Asked().execution()
    execution.publish(kind)
    assert execution.journal_size >= 9000


async def test_wait_returns_with_the_result() -> None:
    execution = Asked().execution()
    waiter = asyncio.create_task(execution.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    execution.publish(END)
    await waiter
    assert execution.done


def test_cancel_is_passed_on_until_the_end() -> None:
    asked = Asked()
    execution = asked.execution()
    execution.cancel()
    execution.publish(END)
    execution.cancel()
    assert asked.sent == [(Cancel(id="e"), b"")]


def test_a_cancelled_execution_holds_nobody() -> None:
    """It never ended: its end came behind events that no client read, and reading had stopped."""
    asked = Asked()
    execution = asked.execution(journal_bytes=3000)
    for _ in range(3):
        execution.publish(log("x" * 1000))
    assert asked.held == [True]
    execution.cancel()
    assert asked.held == [True, False]
    assert not execution.has_room
    execution.publish(END)
    assert asked.held == [True, False]


async def test_a_tool_call_is_answered_exactly_once() -> None:
    asked = Asked()
    execution = asked.execution()
    execution.publish(ToolCall("c1", "f", b""))
    execution.publish(ToolCall("c2", "f", b""))
    execution.submit_tool_result("c2", b"two")
    execution.submit_tool_result("c1", ToolFailure("ValueError", "no"))
    for call_id in ("c1", "c2"):
        assert await refusal(execution, call_id) == (PreconditionFailed, Reason.TOOL_CALL_ANSWERED)
    assert asked.sent == [
        (ToolResult(id="e", call="c2", ok=True), b"two"),
        (ToolResult(id="e", call="c1", ok=False, type="ValueError"), b"no"),
    ]


async def test_an_answer_to_nothing_or_too_late_is_refused_by_its_reason() -> None:
    asked = Asked()
    execution = asked.execution()
    execution.publish(ToolCall("open", "f", b""))
    execution.publish(ToolCall("answered", "f", b""))
    execution.submit_tool_result("answered", b"")
    execution.publish(END)
    assert await refusal(execution, "never") == (NotFound, Reason.TOOL_CALL_NOT_FOUND)
    assert await refusal(execution, "open") == (PreconditionFailed, Reason.EXECUTION_ENDED)
    assert await refusal(execution, "answered") == (PreconditionFailed, Reason.TOOL_CALL_ANSWERED)
    assert len(asked.sent) == 1


async def refusal(execution: Execution, call_id: str) -> tuple[type[ExecutorError], Reason]:
    with pytest.raises(ExecutorError) as refused:
        execution.submit_tool_result(call_id, b"late")
    return type(refused.value), refused.value.reason
