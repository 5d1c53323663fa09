"""The times at which a daemon that has died is started again."""

from __future__ import annotations

from executor_server.fleet.ray.watcher import GOOD_AFTER_S, MAX_RESTART_WAIT_S, WATCH_S, RestartDelay


def test_a_daemon_that_dies_after_a_good_start_is_started_again_at_once() -> None:
    delay = RestartDelay()
    delay.started(0.0)
    delay.runs(GOOD_AFTER_S)
    assert delay.is_due(GOOD_AFTER_S)


def test_a_daemon_that_ends_at_once_is_started_more_and_more_rarely() -> None:
    delay, now_s, waits = RestartDelay(), 0.0, []
    for _ in range(12):
        delay.started(now_s)
        waits.append(delay.next_s - now_s)
        assert not delay.is_due(now_s)
        now_s = delay.next_s
    assert waits[0] == WATCH_S
    assert waits == sorted(waits)
    assert waits[-1] == MAX_RESTART_WAIT_S


def test_a_good_start_makes_the_waits_short_again() -> None:
    delay = RestartDelay()
    for now_s in range(10):
        delay.started(float(now_s))
    delay.runs(9 + GOOD_AFTER_S)
    delay.started(100.0)
    assert delay.next_s == 100.0 + WATCH_S
