"""What the supervisor does with messages of an interpreter that agent code speaks for."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

from executor_server.guest import link
from executor_server.guest.supervisor import _FROZEN_TIME_S, Supervisor
from tests.support.descriptors import none_left_open


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    """Else a program could use up all that the supervisor may have open."""
    ours, theirs = link.make_pair()
    state = cast(Any, SimpleNamespace(_operation=None))
    with open(os.devnull) as file, none_left_open():  # noqa: PTH123 - its descriptor
        link.send(theirs, {"t": "booted"}, b"", (file.fileno(),) * 3)
        Supervisor._on_message(state, link.receive(ours, 1000))
    assert state._booted
    ours.close()
    theirs.close()


def thaw(heard_s_ago: float, due_s_ago: float, thawed_s_ago: float = 1e6) -> float:
    """How long ago the daemon counts as heard, after a turn of the loop that was to end so long ago."""
    now = time.monotonic()
    channel = SimpleNamespace(last_heard=now - heard_s_ago)
    state = cast(Any, SimpleNamespace(_channel=channel, _thawed_at=now - thawed_s_ago))
    Supervisor._note_thaw(state, now - due_s_ago)
    return time.monotonic() - float(channel.last_heard)


def test_a_sandbox_that_stood_still_gives_its_daemon_time_anew() -> None:
    """Its clock may have gone on meanwhile, so that nobody seems to have been the daemon for hours."""
    assert thaw(heard_s_ago=7200, due_s_ago=7140) < 60


def test_turns_that_are_a_little_late_do_not_count_as_standing_still() -> None:
    assert thaw(heard_s_ago=100, due_s_ago=_FROZEN_TIME_S / 2) >= 100
    assert thaw(heard_s_ago=100, due_s_ago=-30) >= 100


def test_standing_still_again_and_again_puts_the_end_off_once() -> None:
    """Else a program that starves the supervisor would keep a sandbox whose daemon is gone."""
    assert thaw(heard_s_ago=100, due_s_ago=90, thawed_s_ago=100) >= 100
