"""The time at which a session ends does not depend on changes of the host's clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor_server.sessions.lifetime import SessionLife
from tests.support.specs import LIMITS as ALL_LIMITS

LIMITS = replace(ALL_LIMITS, idle_time_s=100.0, session_time_s=1000.0)
HOURS_S = 6 * 3600.0


class Clocks:
    """Two clocks: one only goes forward, the other can be set."""

    def __init__(self) -> None:
        self.steady_s = 50.0
        self.unix_s = 1_700_000_000.0

    def pass_by(self, time_s: float) -> None:
        self.steady_s += time_s
        self.unix_s += time_s

    def life(self, created_s_ago: float = 0.0, used_s_ago: float = 0.0) -> SessionLife:
        return SessionLife(
            self.unix_s - created_s_ago,
            self.unix_s - used_s_ago,
            steady=lambda: self.steady_s,
            unix=lambda: self.unix_s,
        )


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.mark.parametrize("set_by_s", [HOURS_S, -HOURS_S])
def test_setting_the_clock_neither_ends_nor_keeps_it(clocks: Clocks, set_by_s: float) -> None:
    life = clocks.life()
    clocks.pass_by(10.0)
    clocks.unix_s += set_by_s
    assert life.left_s(LIMITS) == 90.0
    assert life.expire_time_s(LIMITS) == clocks.unix_s + 90.0
    assert life.last_used_s == clocks.unix_s - 10.0


def test_what_an_earlier_daemon_wrote_counts(clocks: Clocks) -> None:
    assert clocks.life(created_s_ago=950.0, used_s_ago=20.0).left_s(LIMITS) == 50.0
    assert clocks.life(created_s_ago=500.0, used_s_ago=20.0).left_s(LIMITS) == 80.0


def test_times_that_lie_ahead_count_as_now(clocks: Clocks) -> None:
    assert clocks.life(created_s_ago=-HOURS_S, used_s_ago=-HOURS_S).left_s(LIMITS) == 100.0


def test_a_session_at_rest_is_looked_at_when_the_first_thing_is_due_and_after_each_use(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    life = clocks.life(used_s_ago=95.0)
    life.rest(LIMITS, 11.0, float("inf"))
    assert life.look_at_s == 11.0
    life.rest(LIMITS, 3600.0, float("inf"))
    assert life.look_at_s == 7.0 + 5.0
    life.touch()
    assert life.look_at_s == 0.0
