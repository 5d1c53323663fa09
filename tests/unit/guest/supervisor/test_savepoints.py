"""Copies that agent code has made up: they say nothing, and keep the supervisor no longer than a fork takes."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from executor_server.guest.supervisor import copies
from executor_server.guest.supervisor.savepoints import Savepoints
from executor_server.guest.wire.lean import dumps
from executor_server.guest.wire.link_messages import Answered, SavepointMade
from tests.support.clock import Clock
from tests.support.descriptors import none_left_open


def test_a_copy_that_says_nothing_is_waited_for_only_as_long_as_a_fork_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock()
    held: list[int] = []

    def ask(_message: object, fds: tuple[int, ...], on_answer: Any, _time_s: float) -> None:
        held.extend(fds)
        made = SavepointMade(files=0, file_bytes=0, left_out=[])
        on_answer(Answered(ok=True), dumps(made.head()))

    monkeypatch.setattr(copies, "time", clock)
    monkeypatch.setattr("executor_server.guest.supervisor.memory.sandbox_memory_bytes", lambda *_: 0)
    parts: Any = SimpleNamespace(ask=ask, memory_bytes=1024**3, interpreter=SimpleNamespace(pid=2))
    taken: list[int | None] = []
    with none_left_open():
        kept = Savepoints(parts, parts, parts, parts, parts, lambda _number: False)
        for _ in range(4):
            kept.take(8, 0, on_taken=lambda number, _why_not: taken.append(number))
        clock.now_s += 2.0
        before_s = time.monotonic()
        assert (taken, kept.pids) == ([1, 2, 3, 4], frozenset())
        assert time.monotonic() - before_s < 1.0
        for fd in held:
            os.close(fd)
