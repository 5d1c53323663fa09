"""Requests are repeated where that may help, a bounded number of times, with pauses."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from executor_server.backends.e2b import retry
from executor_server.backends.e2b.failures import CloudFailure, KeyRefused, Missing, TryLater
from executor_server.backends.e2b.retry import ATTEMPTS, pauses_s, retry_until_cancelled, with_retries


class Request:
    """Fails as the test asks, then answers."""

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
    """Records the pauses, which take no time."""
    waited: list[float] = []
    really = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)
        await really(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


async def test_a_temporary_failure_is_retried(waits: list[float]) -> None:
    asked = Request(*[CloudFailure("no")] * (ATTEMPTS - 1))
    assert await with_retries(asked) == "answer"
    assert len(waits) == ATTEMPTS - 1


async def test_the_failure_of_the_last_attempt_is_raised(waits: list[float]) -> None:
    asked = Request(*[CloudFailure(str(number)) for number in range(ATTEMPTS)])
    with pytest.raises(CloudFailure, match=str(ATTEMPTS - 1)):
        await with_retries(asked)
    assert asked.count == ATTEMPTS


@pytest.mark.parametrize("failure", [Missing("no"), KeyRefused("no")])
async def test_a_final_failure_is_not_retried(waits: list[float], failure: CloudFailure) -> None:
    asked = Request(failure)
    with pytest.raises(type(failure)):
        await with_retries(asked)
    assert (asked.count, waits) == (1, [])


async def test_the_pause_is_as_long_as_the_cloud_asks(waits: list[float]) -> None:
    assert await with_retries(Request(TryLater("busy", 3.0))) == "answer"
    assert waits == [3.0]


async def test_a_cloud_that_asks_for_a_long_pause_is_a_failure(waits: list[float]) -> None:
    with pytest.raises(TryLater):
        await with_retries(Request(TryLater("busy", 3600.0)))
    assert waits == []


async def test_a_request_that_a_session_depends_on_is_retried_until_cancelled(waits: list[float]) -> None:
    asked = Request(*[CloudFailure("no")] * 50, TryLater("busy", 3600.0), KeyRefused("just now"))
    assert await retry_until_cancelled(asked, unless=(Missing,)) == "answer"
    assert max(waits) <= retry._LONGEST_ASKED_S


async def test_a_named_failure_ends_the_retries(waits: list[float]) -> None:
    with pytest.raises(Missing):
        await retry_until_cancelled(Request(CloudFailure("no"), Missing("no such thing")), unless=(Missing,))
    assert len(waits) == 1


def test_pauses_grow_up_to_a_bound_and_differ() -> None:
    first, second = (list(itertools.islice(pauses_s(), 30)) for _ in range(2))
    assert first != second
    for pauses in (first, second):
        assert all(0 < pause_s <= retry._LONGEST_PAUSE_S for pause_s in pauses)
        assert min(pauses[10:]) >= retry._LONGEST_PAUSE_S / 2
