"""Over some three hundred faults of E2B's cloud: no wrong success, no hang past its bound, no orphan, nothing run twice.

A life is one session's, with one fault in it: see e2b_faults.py for what befalls which request, and e2b_lives.py for
what is checked of each. A fault after which a session can go on must cost nothing but time. One after which it can't may
have it refused or lost: with the reason, never in silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import pytest

from executor_server.backends.e2b import access, guests, templates
from tests.chaos.e2b_faults import REQUEST_TIMEOUT_S, matrix
from tests.chaos.e2b_lives import lead
from tests.support.backends import require
from tests.support.e2b import WHY_NOT
from tests.support.polling import eventually_async
from tests.support.rounds import one_of_each, usual

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

MATRIX = matrix()
WANTED = 200
SHORT_S = REQUEST_TIMEOUT_S


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits that are no settings: as long as one request's, so that a stalled stream costs seconds, not minutes."""
    require("e2b")
    monkeypatch.setattr(access, "E2B_REQUEST_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(guests, "_START_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(templates, "_PROBE_TIMEOUT_S", SHORT_S)


def test_the_matrix_is_large_enough() -> None:
    cases = [str(case) for group in MATRIX.values() for case in group]
    assert len(cases) >= WANTED
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("group", usual(MATRIX, but=MATRIX.keys() - {"stdin", "end"}))
async def test_no_fault_is_hidden_or_left_behind(group: str, record_property: Callable[[str, object], None]) -> None:
    tasks, sockets = asyncio.all_tasks(), _sockets()
    cases = one_of_each(MATRIX[group], lambda case: (case.place, case.kind))
    tally = await lead(cases)
    print(f"{group}: {tally}")  # noqa: T201
    record_property("faults", tally.injected)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.injected >= len(cases)
    assert asyncio.all_tasks() == tasks
    # The SDK closes a connection whose stream was cut in a turn of the loop of its own.
    assert await eventually_async(lambda: _sockets() <= sockets), (_sockets(), sockets)


def _sockets() -> int:
    """Open ones of this process, in which the daemon's code runs."""
    found = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the directory itself
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")  # noqa: PTH115 - it is no path
    return found
