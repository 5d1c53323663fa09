"""The supervisor's handling of messages that agent code may have sent, and the time of a sandbox without a daemon."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_server.guest.supervisor.orphan_time import FROZEN_TIME_S, OrphanTime
from executor_server.guest.supervisor.supervisor import Supervisor
from executor_server.guest.wire import link
from executor_server.guest.wire.link_messages import Booted
from tests.support.descriptors import none_left_open


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    """Otherwise a program could use up all descriptors that the supervisor may have open."""
    ours, theirs = link.make_pair()
    booted: list[bool] = []
    state = cast(Any, SimpleNamespace(_replacement=SimpleNamespace(note_booted=lambda: booted.append(True))))
    with open(os.devnull) as file, none_left_open():  # noqa: PTH123 - its descriptor
        link.send(theirs, Booted(), b"", (file.fileno(),) * 3)
        Supervisor.on_message(state, link.receive(ours, 1000))
    assert booted
    ours.close()
    theirs.close()


def heard_s_ago_after_turn(heard_s_ago: float, due_s_ago: float, thawed_s_ago: float = 1e6) -> float:
    """Returns for how long the daemon counts as silent, after a turn of the loop that was due so long ago."""
    now = time.monotonic()
    channel = cast(Any, SimpleNamespace(last_heard=now - heard_s_ago))
    orphan_time = OrphanTime(channel, cast(Any, None), 120.0)
    orphan_time._thawed_at = now - thawed_s_ago
    orphan_time.note_turn(now - due_s_ago, now)
    return time.monotonic() - float(channel.last_heard)


def test_a_sandbox_that_stood_still_gives_its_daemon_time_anew() -> None:
    """The clock may have gone on during a freeze, so that the daemon seems to have been silent for hours."""
    assert heard_s_ago_after_turn(heard_s_ago=7200, due_s_ago=7140) < 60


def test_turns_that_are_a_little_late_do_not_count_as_standing_still() -> None:
    assert heard_s_ago_after_turn(heard_s_ago=100, due_s_ago=FROZEN_TIME_S / 2) >= 100
    assert heard_s_ago_after_turn(heard_s_ago=100, due_s_ago=-30) >= 100


def test_standing_still_again_and_again_puts_the_end_off_once() -> None:
    """Otherwise a program that starves the supervisor could keep a sandbox that no daemon knows."""
    assert heard_s_ago_after_turn(heard_s_ago=100, due_s_ago=90, thawed_s_ago=100) >= 100


@pytest.mark.parametrize("waits_unread", [True, False])
def test_the_daemons_word_that_waits_unread_puts_the_end_off(waits_unread: bool) -> None:
    """The supervisor of a loaded machine may be late by seconds, too few for it to have been frozen."""
    now = time.monotonic()
    channel = cast(Any, SimpleNamespace(last_heard=now - 11.0))

    def read(timeout_s: float) -> None:
        assert timeout_s == 0
        channel.last_heard = now if waits_unread else channel.last_heard

    orphan_time = OrphanTime(channel, cast(Any, SimpleNamespace(turn=read)), 10.0)
    assert orphan_time.is_over(now) is not waits_unread
    channel.last_heard = now - 9.0
    assert not orphan_time.is_over(now)
