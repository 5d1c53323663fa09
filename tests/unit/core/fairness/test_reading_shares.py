"""A tenant whose guests send without end is read less while others want something, and loses nothing by it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_server.core.fairness.reading_shares import ACTIVE_S, WINDOW_BYTES, ReadingShares
from tests.support.polling import eventually_async


class Channel:
    def __init__(self) -> None:
        self.rests = False

    def rest(self) -> None:
        self.rests = True

    def go_on(self) -> None:
        self.rests = False


@pytest.fixture
def shares() -> Iterator[ReadingShares]:
    shares = ReadingShares()
    yield shares
    shares.close()


async def test_who_has_had_its_share_rests_until_the_next_window(shares: ReadingShares) -> None:
    greedy = Channel()
    shares.note("quiet", Channel(), 100, 0.0)
    shares.note("greedy", greedy, WINDOW_BYTES, 0.0)
    assert not greedy.rests
    shares.note("greedy", greedy, 1, 0.0)
    assert greedy.rests
    assert await eventually_async(lambda: not greedy.rests)


async def test_channels_of_one_tenant_have_one_share_together(shares: ReadingShares) -> None:
    channels = [Channel() for _ in range(4)]
    shares.note("quiet", Channel(), 100, 0.0)
    for channel in channels:
        shares.note("greedy", channel, WINDOW_BYTES // 3, 0.0)
    assert [channel.rests for channel in channels] == [False, False, False, True]


async def test_nobody_rests_for_a_tenant_that_has_not_been_heard_lately(shares: ReadingShares) -> None:
    greedy = Channel()
    shares.note("quiet", Channel(), 100, 0.0)
    shares.note("greedy", greedy, 2 * WINDOW_BYTES, ACTIVE_S + 0.1)
    assert not greedy.rests


async def test_a_tenant_that_is_alone_reads_as_fast_as_it_can(shares: ReadingShares) -> None:
    greedy = Channel()
    for _ in range(10):
        shares.note("greedy", greedy, WINDOW_BYTES, 0.0)
    assert not greedy.rests


async def test_little_reading_is_never_held_up_by_anothers(shares: ReadingShares) -> None:
    quiet = Channel()
    shares.note("greedy", Channel(), 10 * WINDOW_BYTES, 0.0)
    shares.note("quiet", quiet, 100, 0.0)
    assert not quiet.rests


async def test_in_the_end_nobody_rests(shares: ReadingShares) -> None:
    greedy = Channel()
    shares.note("quiet", Channel(), 100, 0.0)
    shares.note("greedy", greedy, 2 * WINDOW_BYTES, 0.0)
    shares.close()
    assert not greedy.rests


async def test_tenants_that_are_gone_are_forgotten(shares: ReadingShares) -> None:
    for number in range(100):
        shares.note(f"t{number}", Channel(), 1, 0.0)
    shares.note("greedy", Channel(), 2 * WINDOW_BYTES, 10.0)
    assert list(shares._heard_s) == ["greedy"]
