"""The loop of the guest: whose events are handled first when several came together."""

from __future__ import annotations

import os

import pytest

from executor_server.guest.wire.loop import READ, Loop


@pytest.mark.parametrize("first", range(3))
def test_events_of_the_first_descriptor_are_handled_before_those_of_others(first: int) -> None:
    loop, handled = Loop(), []
    pipes = [os.pipe() for _ in range(3)]
    for read, write in pipes:
        loop.watch(read, READ, lambda _events, read=read: handled.append(read))  # type: ignore[misc]
        os.write(write, b"x")
    loop.first = pipes[first][0]
    assert loop.turn(0.0)
    assert handled[0] == pipes[first][0]
    assert sorted(handled) == sorted(read for read, _ in pipes)
    loop.close()
    for pipe in pipes:
        for end in pipe:
            os.close(end)
