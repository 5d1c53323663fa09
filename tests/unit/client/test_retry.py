"""A call is repeated: by a clock and a chance that the tests hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_client._core.limits import BUILD_RETRY_MIN_S, BUSY_SPREAD, IMAGE_RETRY_MAX_S
from executor_client._core.retry import Backoff, Retries
from executor_client.errors import ExecutorClientError, NotFoundError, ResourceExhaustedError, UnavailableError
from executor_client.waits import Progress
from executor_server.backends.docker import pulls


@pytest.fixture
def chance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets chance: 0 for the least that it gives, 1 for the most."""

    def set_to(part: float) -> None:
        monkeypatch.setattr(random, "uniform", lambda least, most: least + part * (most - least))

    return set_to


def refusal(retry_after_s: float | None) -> ResourceExhaustedError:
    return ResourceExhaustedError("full", reason="QUOTA_EXCEEDED", retry_after_s=retry_after_s)


def test_backoff_grows_and_ends_at_its_deadline() -> None:
    backoff = Backoff(10.0)
    now_s, delays = 1000.0, []
    while (delay_s := backoff.delay_s(now_s)) is not None:
        delays.append(delay_s)
        now_s += delay_s
    assert now_s < 1010.0 and 5 < len(delays) < 30
    assert delays[0] <= 0.02 and max(delays) <= 2.0


@pytest.mark.parametrize(("part", "expected_s"), [(0.0, 4.0), (1.0, 4.0 * (1 + BUSY_SPREAD))])
def test_told_delay_is_kept_and_spread(chance: Callable[[float], None], part: float, expected_s: float) -> None:
    chance(part)
    assert Retries(away_timeout_s=0, busy_timeout_s=30).delay_s(refusal(4.0), 7.0) == expected_s


@given(st.floats(0, 60), st.floats(0, 60))
def test_nobody_comes_back_earlier_than_told_nor_after_the_time_is_over(retry_after_s: float, timeout_s: float) -> None:
    retries = Retries(away_timeout_s=0, busy_timeout_s=timeout_s)
    now_s = 0.0
    for _ in range(10):
        delay_s = retries.delay_s(refusal(retry_after_s), now_s)
        if delay_s is None:
            return
        assert delay_s >= retry_after_s and now_s + delay_s <= timeout_s + 1e-9
        now_s += delay_s


def test_delay_beyond_the_whole_time_is_not_waited_for(chance: Callable[[float], None]) -> None:
    chance(0.0)
    assert Retries(away_timeout_s=0, busy_timeout_s=30).delay_s(refusal(30.0), 0.0) is None
    retries = Retries(away_timeout_s=0, busy_timeout_s=30)
    assert retries.delay_s(refusal(20.0), 0.0) == 20.0
    assert retries.delay_s(refusal(20.0), 20.0) is None


def test_daemon_that_always_says_now_is_asked_less_and_less() -> None:
    retries = Retries(away_timeout_s=0, busy_timeout_s=10)
    now_s, attempts = 0.0, 0
    while (delay_s := retries.delay_s(refusal(0.0), now_s)) is not None:
        now_s += delay_s
        attempts += 1
    assert attempts < 30


@pytest.mark.parametrize(
    "error",
    [
        refusal(None),
        NotFoundError("no", reason="SESSION_NOT_FOUND"),
        UnavailableError("fetching", reason="IMAGE_NOT_READY", retry_after_s=1.0),
        UnavailableError("no disk", reason="AUDIT_UNAVAILABLE"),
    ],
)
def test_refusal_that_no_second_try_mends_is_final(error: ExecutorClientError) -> None:
    assert Retries(away_timeout_s=60, busy_timeout_s=60).delay_s(error, 0.0) is None


def test_absence_and_refusal_have_a_time_each_and_it_begins_anew_when_the_daemon_is_heard() -> None:
    retries = Retries(away_timeout_s=1, busy_timeout_s=10)
    assert retries.delay_s(UnavailableError("away"), 0.0) is not None
    assert retries.delay_s(UnavailableError("away"), 1.0) is None
    assert retries.delay_s(refusal(1.0), 5.0) is not None
    assert retries.delay_s(refusal(1.0), 14.5) is None
    retries.answered()
    assert retries.delay_s(UnavailableError("away"), 20.0) is not None
    assert retries.delay_s(refusal(1.0), 20.0) is not None


def fetching(retry_after_s: float | None) -> UnavailableError:
    return UnavailableError("image 'x' ...", reason="IMAGE_NOT_READY", retry_after_s=retry_after_s)


def test_image_is_waited_for_while_it_is_fetched_and_not_after_that_failed() -> None:
    retries = Retries(away_timeout_s=0, busy_timeout_s=0, image_timeout_s=600)
    delay_s = retries.delay_s(fetching(pulls._RETRY_S), 0.0)
    assert delay_s is not None and delay_s >= pulls._RETRY_S
    assert retries.delay_s(fetching(pulls._FAILURE_KEPT_S), 10.0) is None
    assert retries.delay_s(fetching(None), 10.0) is None
    assert pulls._RETRY_S <= IMAGE_RETRY_MAX_S < pulls._FAILURE_KEPT_S


def test_environment_is_asked_for_as_often_as_the_daemon_says_however_long_it_takes(
    chance: Callable[[float], None],
) -> None:
    chance(1.0)
    retries = Retries(away_timeout_s=0, busy_timeout_s=0, image_timeout_s=600)
    building = UnavailableError(
        "it is being made", reason="IMAGE_NOT_READY", retry_after_s=0.5, progress=Progress("resolving")
    )
    assert {retries.delay_s(building, float(now_s)) for now_s in range(100)} == {0.5 * (1 + BUSY_SPREAD)}
    building.retry_after_s = 0.0
    assert retries.delay_s(building, 100.0) == BUILD_RETRY_MIN_S


def test_image_is_not_waited_for_longer_than_its_time() -> None:
    retries = Retries(away_timeout_s=0, busy_timeout_s=0, image_timeout_s=20)
    now_s = 0.0
    while (delay_s := retries.delay_s(fetching(5.0), now_s)) is not None:
        now_s += delay_s
    assert 10 <= now_s <= 20


def test_a_front_whose_node_is_away_is_asked_at_one_rate_until_it_knows_the_end() -> None:
    """The loss is to be known to a client as soon as to the front: within five seconds of the node's end."""
    retries = Retries(away_timeout_s=60.0, busy_timeout_s=30.0)
    fenced = UnavailableError("away", reason="NODE_FENCED", retry_after_s=1.0)
    assert [retries.delay_s(fenced, 100.0 + second) for second in range(12)] == [BUILD_RETRY_MIN_S] * 12
