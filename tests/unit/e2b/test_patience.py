"""Requests are repeated where that may help, a bounded number of times, and never in a hurry."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from executor_server.backends.e2b import patience
from executor_server.backends.e2b.failures import CloudFailure, Gone, KeyRefused, TryLater
from executor_server.backends.e2b.patience import ATTEMPTS, patiently, pauses_s, persistently


class Asked:
    """Fails as it is told to, then answers."""

    def __init__(self, *failures: CloudFailure) -> None:
        self.failures = list(failures)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self.failures:
            raise self.failures.pop(0)
        return "answer"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it has waited, without its having waited."""
    waited: list[float] = []
    really = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)
        await really(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


async def test_a_failure_that_may_pass_is_outlasted(waits: list[float]) -> None:
    asked = Asked(*[CloudFailure("no")] * (ATTEMPTS - 1))
    assert await patiently(asked) == "answer"
    assert len(waits) == ATTEMPTS - 1


async def test_the_last_attempt_has_the_last_word(waits: list[float]) -> None:
    asked = Asked(*[CloudFailure(str(number)) for number in range(ATTEMPTS)])
    with pytest.raises(CloudFailure, match=str(ATTEMPTS - 1)):
        await patiently(asked)
    assert asked.count == ATTEMPTS


@pytest.mark.parametrize("failure", [Gone("no"), KeyRefused("no")])
async def test_what_is_final_is_not_asked_again(waits: list[float], failure: CloudFailure) -> None:
    asked = Asked(failure)
    with pytest.raises(type(failure)):
        await patiently(asked)
    assert (asked.count, waits) == (1, [])


async def test_the_cloud_gets_the_time_that_it_asks_for(waits: list[float]) -> None:
    assert await patiently(Asked(TryLater("busy", 3.0))) == "answer"
    assert waits == [3.0]


async def test_it_does_not_wait_for_a_cloud_that_asks_for_long(waits: list[float]) -> None:
    with pytest.raises(TryLater):
        await patiently(Asked(TryLater("busy", 3600.0)))
    assert waits == []


async def test_where_all_would_be_lost_it_goes_on(waits: list[float]) -> None:
    asked = Asked(*[CloudFailure("no")] * 50, TryLater("busy", 3600.0), KeyRefused("just now"))
    assert await persistently(asked, unless=(Gone,)) == "answer"
    assert max(waits) <= patience._PATIENCE_S


async def test_what_was_named_ends_it_all_the_same(waits: list[float]) -> None:
    with pytest.raises(Gone):
        await persistently(Asked(CloudFailure("no"), Gone("no such thing")), unless=(Gone,))
    assert len(waits) == 1


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    first, second = (list(itertools.islice(pauses_s(), 30)) for _ in range(2))
    assert first != second
    for pauses in (first, second):
        assert all(0 < pause_s <= patience._LONGEST_PAUSE_S for pause_s in pauses)
        assert min(pauses[10:]) >= patience._LONGEST_PAUSE_S / 2
