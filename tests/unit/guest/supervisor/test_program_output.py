"""Reading the pipes of a run: the first piece is sent at once, further ones together, in the order of writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_server.guest.processes.pipe import Pipe
from executor_server.guest.supervisor import output
from executor_server.guest.supervisor.output import LogRelay, ProgramOutput
from executor_server.guest.supervisor.run import Run
from executor_server.guest.wire.loop import Loop
from tests.support.clock import Clock
from tests.support.descriptors import none_left_open

JOIN_S = output._COALESCE_S


class Program:
    """A run whose program is the test; its frames are in `sent`, and the reads of its pipes are counted."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sent: list[tuple[str, bytes]] = []
        self.loop = Loop()
        self.flooded = False
        self.output = ProgramOutput(self.loop, lambda _run: setattr(self, "flooded", True))
        channel = SimpleNamespace(send=lambda message, body: self.sent.append((message.stream, body)))
        self.logs = LogRelay(cast(Any, channel), "e", 10**9)
        self.pipes = {stream: Pipe(stream) for stream in ("stdout", "stderr")}
        self.reads = 0
        for pipe in self.pipes.values():
            pipe.make_large()  # the test writes before it reads
            pipe.read = self._counted(pipe.read)  # type: ignore[method-assign]
        run = SimpleNamespace(pipes=list(self.pipes.values()), logs=self.logs, ended_by=None)
        self.run = cast(Run, run)
        self.output.watch(self.run)

    def _counted(self, read: Any) -> Any:
        def counted() -> bytes:
            self.reads += 1
            return cast(bytes, read())

        return counted

    def write(self, stream: str, data: bytes) -> None:
        """Writes, and lets the supervisor do what it would do then."""
        os.write(self.pipes[stream].write_fd, data)
        self.turn()

    def turn(self) -> None:
        while self.loop.turn(0.0):
            pass
        if self.logs.due is not None and self.logs.due <= self.clock.now_s:
            self.logs.flush()

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.turn()

    def close(self, stream: str) -> None:
        os.close(self.pipes[stream].write_fd)
        self.pipes[stream].write_fd = -1

    def end(self) -> None:
        self.output.forget(self.run)
        self.loop.close()
        for pipe in self.pipes.values():
            if pipe.write_fd >= 0:
                os.close(pipe.write_fd)
            pipe.close()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    clock = Clock()
    monkeypatch.setattr(output, "time", clock)
    with none_left_open():
        made = Program(clock)
        yield made
        made.end()


def test_the_first_line_is_sent_at_once_and_the_lines_after_it_together(program: Program) -> None:
    for number in range(100):
        program.write("stdout", b"%d\n" % number)
    assert program.sent == [("stdout", b"0\n")]
    program.later(JOIN_S)
    assert program.sent[1:] == [("stdout", b"".join(b"%d\n" % number for number in range(1, 100)))]


def test_a_line_after_a_time_without_one_is_sent_at_once(program: Program) -> None:
    program.write("stdout", b"a")
    program.later(JOIN_S)
    program.later(10 * JOIN_S)
    program.write("stdout", b"b")
    assert program.sent == [("stdout", b"a"), ("stdout", b"b")]


def test_streams_that_alternate_keep_their_order(program: Program) -> None:
    for number in range(10):
        program.write("stdout" if number % 2 else "stderr", b"%d" % number)
    program.later(JOIN_S)
    assert program.sent == [("stdout" if number % 2 else "stderr", b"%d" % number) for number in range(10)]


def test_before_an_event_all_that_was_printed_is_sent(program: Program) -> None:
    for stream, data in (("stdout", b"a"), ("stdout", b"b"), ("stderr", b"c")):
        os.write(program.pipes[stream].write_fd, data)
    program.output.drain(program.run)
    assert program.sent == [("stdout", b"ab"), ("stderr", b"c")]


def test_nothing_is_read_in_a_pause(program: Program) -> None:
    program.write("stdout", b"a")
    program.output.paused = True
    program.output.watch(program.run)
    program.write("stdout", b"b")
    program.later(10 * JOIN_S)
    assert program.reads == 1
    program.output.paused = False
    program.output.watch(program.run)
    program.turn()
    assert program.sent == [("stdout", b"a"), ("stdout", b"b")]
