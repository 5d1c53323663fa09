"""Copies that agent code has made up: they say nothing, and keep the supervisor no longer than a fork takes."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from executor_server.guest.supervisor import copies
from executor_server.guest.supervisor.child import Child
from executor_server.guest.supervisor.copies import KeptCopies
from executor_server.guest.supervisor.savepoints import Savepoints
from executor_server.guest.wire.lean import dumps
from executor_server.guest.wire.link import receive, send
from executor_server.guest.wire.link_messages import (
    Answered,
    CopyWaits,
    MakeSuccessor,
    Resume,
    Resumed,
    SavepointMade,
    message_of,
)
from executor_server.guest.wire.savepoint_messages import TakeSavepoint
from tests.support.clock import Clock
from tests.support.descriptors import none_left_open

TAKE = TakeSavepoint(op=1, kept=8, file_bytes=0)


def test_a_copy_that_says_nothing_is_waited_for_only_as_long_as_a_fork_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = Clock()
    held: list[int] = []

    def ask(_message: object, fds: tuple[int, ...], on_answer: Any, _time_s: float) -> None:
        held.extend(fds)
        made = SavepointMade(files=0, file_bytes=0, left_out=[])
        on_answer(Answered(ok=True), dumps(made.head()))

    monkeypatch.setattr(copies, "time", clock)
    monkeypatch.setattr("executor_server.guest.supervisor.memory.MemoryWatch.exceeds", lambda *_: False)
    parts: Any = SimpleNamespace(
        ask=ask, closed=frozenset(), memory_bytes=1024**3, interpreter=SimpleNamespace(pid=2), generation=1
    )
    parts.done = lambda *_: None
    with none_left_open():
        copies_kept = KeptCopies(parts, parts)
        kept = Savepoints(parts, parts, parts, parts, copies_kept)
        for _ in range(4):
            kept.take(TAKE)
        clock.now_s += 2.0
        before_s = time.monotonic()
        assert [entry.number for entry in copies_kept.taken] == [1, 2, 3, 4]
        assert copies_kept.pids(2) == frozenset()
        assert time.monotonic() - before_s < 1.0
        for fd in held:
            os.close(fd)


def test_a_copy_that_says_nothing_yet_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor is made once it has said that it is there, in a later turn of the supervisor's loop."""
    held: list[socket.socket] = []

    def ask(_message: object, fds: tuple[int, ...], on_answer: Any, _time_s: float) -> None:
        held.append(socket.socket(fileno=fds[0]))
        on_answer(Answered(ok=True), dumps(SavepointMade(files=0, file_bytes=0, left_out=[]).head()))

    monkeypatch.setattr(copies, "_may_be_copy", lambda pid: True)
    monkeypatch.setattr("executor_server.guest.supervisor.memory.MemoryWatch.exceeds", lambda *_: False)
    parts: Any = SimpleNamespace(
        ask=ask, closed=frozenset(), memory_bytes=1024**3, interpreter=SimpleNamespace(pid=2), generation=1
    )
    parts.done = lambda *_: None
    with none_left_open():
        copies_kept = KeptCopies(parts, parts)
        kept = Savepoints(parts, parts, parts, parts, copies_kept)
        kept.take(TAKE)
        before_s, first_due = time.monotonic(), kept.successor_due
        kept.on_successor_due()
        assert time.monotonic() - before_s < copies.FORK_TIME_S / 2
        assert first_due < kept.successor_due < float("inf")
        send(held[0], CopyWaits(pid=77))
        kept.on_successor_due()
        assert kept.successor_due == float("inf")
        packet = receive(held[0], 0)
        assert isinstance(message_of(packet), MakeSuccessor)
        packet.close()
        held[0].close()
        for each in copies_kept.copies:
            each.sock.close()


def test_where_no_process_is_left_the_one_of_the_savepoint_goes_on_and_the_savepoint_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def copy(link: socket.socket) -> None:
        """Serves as a copy does that can't fork."""
        with link:
            send(link, CopyWaits(pid=77))
            while True:
                packet = receive(link, 0)
                packet.close()
                message = message_of(packet)
                asked.append(type(message).__name__)
                if isinstance(message, Resume):
                    send(link, Resumed(left_out=["a file"]))
                    return

    def ask(_message: object, fds: tuple[int, ...], on_answer: Any, _time_s: float) -> None:
        threads.append(threading.Thread(target=copy, args=(socket.socket(fileno=fds[0]),)))
        threads[-1].start()
        on_answer(Answered(ok=True), dumps(SavepointMade(files=0, file_bytes=0, left_out=[]).head()))

    monkeypatch.setattr(copies, "_may_be_copy", lambda pid: True)
    monkeypatch.setattr("executor_server.guest.supervisor.memory.MemoryWatch.exceeds", lambda *_: False)
    threads: list[threading.Thread] = []
    adopted: list[Child] = []
    answers: list[bytes] = []
    interpreter = SimpleNamespace(pid=2)
    parts: Any = SimpleNamespace(
        ask=ask, closed=frozenset(), memory_bytes=1024**3, interpreter=interpreter, adopt=adopted.append
    )
    parts.await_end, parts.generation = lambda: None, 2
    parts.done = lambda _op, body: answers.append(body)
    with none_left_open():
        copies_kept = KeptCopies(parts, parts)
        kept = Savepoints(parts, parts, parts, parts, copies_kept)
        kept.take(TAKE)
        assert kept.resume(1)
        threads[0].join()
        adopted[0].close()
        kept.answer(1)
    assert asked == [MakeSuccessor.__name__, Resume.__name__]
    assert [child.pid for child in adopted] == [77]
    assert answers[1:] == [b'{"savepoints":[],"dropped":1,"generation":2,"left_out":["a file"]}']
