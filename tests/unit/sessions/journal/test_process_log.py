"""The log of a process: its numbers, what it grants its guest, and what it drops when no client reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from executor_server.core import (
    OutOfRange,
    ProcessEvent,
    ProcessEventKind,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    TerminalSize,
)
from executor_server.guest.wire.frames import FrameError
from executor_server.guest.wire.process_messages import OUTPUT_OVERHEAD_BYTES, TAIL_BYTES
from executor_server.sessions.journal.process_log import (
    PROCESS_JOURNAL_BYTES,
    UNREAD_TIME_S,
    ProcessLog,
    described,
    fingerprint_of,
)
from tests.support.clock import Clock

PIECE = 256 * 1024
ENDED = ProcessResult(ProcessOutcome.EXITED, 0)


class Granted:
    """The owner of a log, and what the log granted its guest."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.grants: list[int] = []
        self.log = ProcessLog(described(ProcessRequest("p", ("true",))), self, now_s=self.clock)
        self.log.publish(ProcessStarted(7))
        self.printed = 0

    def grant(self, process_id: str, granted_bytes: int) -> None:
        self.grants.append(granted_bytes)

    def print(self, data: bytes) -> None:
        """Takes output as the guest sends it, which it may not past its grant."""
        event = ProcessOutput("stdout", data)
        self.log.check(event)
        self.log.publish(event)
        self.printed += len(data)

    def fill(self) -> None:
        """Prints as much as is granted now."""
        granted_bytes = self.log.granted_bytes
        while self.log.received_bytes + PIECE + OUTPUT_OVERHEAD_BYTES <= granted_bytes:
            self.print(bytes(PIECE))


@pytest.fixture
def granted() -> Granted:
    return Granted()


def following(log: ProcessLog, after: int = 0) -> aclosing[AsyncGenerator[ProcessEvent]]:
    return aclosing(log.events_with_gap(after))


async def read(log: ProcessLog, after: int = 0) -> list[ProcessEvent]:
    return [event async for event in log.events_with_gap(after)]


async def test_events_are_numbered_from_one_and_read_from_any_number(granted: Granted) -> None:
    granted.print(b"a")
    granted.print(b"b")
    granted.log.publish(ENDED)
    assert [event.number for event in await read(granted.log)] == [1, 2, 3, 4]
    assert [event.kind for event in await read(granted.log, 2)] == [ProcessOutput("stdout", b"b"), ENDED]
    assert await read(granted.log, 4) == []
    with pytest.raises(OutOfRange):
        await read(granted.log, 5)


async def test_before_its_time_is_over_an_unread_process_waits_and_loses_nothing(granted: Granted) -> None:
    granted.fill()
    granted.clock.now_s += UNREAD_TIME_S - 0.1
    granted.log.trim()
    assert (granted.grants, granted.log.first_number) == ([], 1)


async def test_the_oldest_events_go_for_newer_ones_when_no_client_has_read_for_long(granted: Granted) -> None:
    granted.fill()
    granted.clock.now_s += UNREAD_TIME_S
    granted.log.trim()
    assert granted.grants, "the process may print on"
    for _ in range(20):
        granted.fill()
        assert granted.log.journal_size <= PROCESS_JOURNAL_BYTES
    granted.log.publish(ENDED)
    gap, *rest = await read(granted.log)
    assert isinstance(gap.kind, ProcessOutputCut)
    kept = sum(len(event.kind.data) for event in rest if isinstance(event.kind, ProcessOutput))
    assert gap.kind.omitted_bytes + kept == granted.printed
    assert [event.number for event in (gap, *rest)] == list(range(gap.number, granted.log.last_number + 1))
    assert rest[-1].kind == ENDED


async def test_output_that_comes_while_the_gap_is_sent_takes_no_event_from_its_reader(granted: Granted) -> None:
    """The reader counted only after the gap: a server that printed meanwhile ended each attachment with OutOfRange."""
    granted.clock.now_s += UNREAD_TIME_S
    for _ in range(2):
        granted.fill()
    async with following(granted.log) as events:
        gap = await anext(events)
        assert isinstance(gap.kind, ProcessOutputCut)
        granted.clock.now_s += UNREAD_TIME_S
        granted.fill()
        assert (await anext(events)).number == gap.number + 1


async def test_a_client_that_comes_back_in_time_keeps_what_it_lacks(granted: Granted) -> None:
    async with following(granted.log) as events:
        await anext(events)
    granted.clock.now_s += UNREAD_TIME_S - 1
    granted.fill()
    first = granted.log.first_number
    async with following(granted.log, 1) as events:
        await anext(events)
        granted.clock.now_s += 10 * UNREAD_TIME_S
        granted.log.trim()
        assert granted.log.first_number == first, "nothing is dropped in front of a reader"


async def test_a_reader_that_takes_events_lets_the_process_go_on(granted: Granted) -> None:
    granted.fill()
    async with following(granted.log) as events:
        async for event in events:
            if event.number == granted.log.last_number:
                break
        granted.log.trim()
        assert granted.grants
        assert granted.grants == sorted(set(granted.grants)), "a grant never falls"


async def test_a_reader_that_stops_holds_the_process_back_for_good(granted: Granted) -> None:
    async with following(granted.log) as events:
        await anext(events)
        granted.fill()
        granted.clock.now_s += 100 * UNREAD_TIME_S
        granted.log.trim()
        granted.fill()
        assert granted.log.journal_size <= PROCESS_JOURNAL_BYTES + PIECE


def test_more_output_than_was_granted_breaks_the_protocol(granted: Granted) -> None:
    granted.fill()
    tail = TAIL_BYTES + granted.log.granted_bytes - granted.log.received_bytes - OUTPUT_OVERHEAD_BYTES
    granted.log.check(ProcessOutput("stdout", bytes(tail)))
    with pytest.raises(FrameError):
        granted.log.check(ProcessOutput("stdout", bytes(tail + 1)))


@pytest.mark.parametrize("event", [ProcessStarted(8), ProcessOutput("stdout", b"x"), ENDED])
def test_an_event_after_the_end_breaks_the_protocol(granted: Granted, event: ProcessEventKind) -> None:
    granted.log.publish(ENDED)
    with pytest.raises(FrameError):
        granted.log.check(event)


def test_a_process_starts_once_and_before_it_prints(granted: Granted) -> None:
    with pytest.raises(FrameError):
        granted.log.check(ProcessStarted(8))
    unstarted = ProcessLog(described(ProcessRequest("q", ("true",))), granted)
    with pytest.raises(FrameError):
        unstarted.check(ProcessOutput("stdout", b"x"))


def test_the_fingerprint_tells_requests_apart_and_not_sizes_of_terminals() -> None:
    base = ProcessRequest("p", ("a", "b"), pty=TerminalSize(80, 24), env={"A": "1", "B": "2"})
    others = [
        ProcessRequest("p", ("a b",), pty=TerminalSize(80, 24), env={"A": "1", "B": "2"}),
        ProcessRequest("p", ("a", "b"), pty=TerminalSize(80, 24), env={"A": "1", "B": "3"}),
        ProcessRequest("p", ("a", "b"), pty=TerminalSize(80, 24), env={"A": "1", "B": "2"}, cwd="c"),
        ProcessRequest("p", ("a", "b"), env={"A": "1", "B": "2"}),
        ProcessRequest("p", ("a", "b"), pty=TerminalSize(80, 24), env={"A": "1", "B": "2"}, timeout_s=1.0),
    ]
    assert len({fingerprint_of(each) for each in (base, *others)}) == len(others) + 1
    resized = ProcessRequest("p", ("a", "b"), pty=TerminalSize(100, 30), env={"B": "2", "A": "1"})
    assert fingerprint_of(base) == fingerprint_of(resized)
