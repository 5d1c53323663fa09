"""What the supervisor does with messages of an interpreter that agent code speaks for."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

from executor_server.guest import link
from executor_server.guest.supervisor import Supervisor
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
