"""Bounds on the time of a program's own code."""

from __future__ import annotations

import contextlib
import signal

from executor_server.guest.checks.time_limit import TimeUp, within


def test_a_time_that_is_over_at_once_leaves_no_timer_and_no_handler() -> None:
    """A timer that went on would raise TimeUp in whatever the interpreter does next, again and again."""
    before = signal.getsignal(signal.SIGALRM)
    for _ in range(200):
        with contextlib.suppress(TimeUp):
            within(1e-6, int)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before
