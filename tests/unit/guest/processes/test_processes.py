"""The processes of a sandbox, as hostile programs would have them: they end, once, and cost no other anything."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from executor_server.guest.processes import outflow
from executor_server.guest.processes.start import Command, NotStarted, Streams, start_command
from executor_server.guest.processes.table import Processes
from executor_server.guest.wire.frames import FrameError
from executor_server.guest.wire.loop import Loop
from executor_server.guest.wire.process_messages import (
    ForgetProcess,
    GrantOutput,
    ProcessEnded,
    ProcessOutput,
    SignalProcess,
    StartProcess,
    WriteProcess,
)
from tests.support.descriptors import none_left_open

WAIT_S = 20.0
PLENTY = 2**40
PIPE_BYTES = 2**20


class Sandbox:
    """The table with a real loop, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bytes]] = []
        self.done_ops: dict[int, Any] = {}
        self.failed: dict[int, str] = {}
        self.left: list[Any] = []
        self.loop = Loop()
        self.table = Processes(
            cast(Any, self), self.loop, self.left.extend, lambda own: {**os.environ, **own}, lambda: None
        )
        self._ops = 0

    def send(self, message: Any, body: bytes = b"") -> None:
        self.sent.append((message, body))

    def done(self, op: int, **more: Any) -> None:
        self.done_ops[op] = more

    def fail(self, op: int, reason: str, _message: str) -> None:
        self.failed[op] = reason

    def start(self, script: str, process_id: str = "p", **more: Any) -> int:
        return self.start_with(b"/bin/sh\0-c\0%s\0" % script.encode(), b"{}", id=process_id, **more)

    def start_with(self, argv: bytes, env: bytes, **more: Any) -> int:
        self._ops += 1
        fields: dict[str, Any] = {"id": "p", "cwd": "", "stdin": False, "output_bytes": PLENTY, "granted": PLENTY}
        self.table.take(StartProcess(op=self._ops, argv=len(argv), **{**fields, **more}), argv + env)
        return self._ops

    def write(self, offset: int, data: bytes, *, eof: bool = False) -> int:
        self._ops += 1
        self.table.take(WriteProcess(op=self._ops, id="p", offset=offset, eof=eof), data)
        return self._ops

    def signal(self, number: int, target: str) -> None:
        self._ops += 1
        self.table.take(SignalProcess(op=self._ops, id="p", signal=number, target=target), b"")

    def turn(self) -> None:
        self.loop.turn(0.005)
        for pid in self.table.leaders:
            child, status, usage = os.wait4(pid, os.WNOHANG)
            if child:
                self.table.note_exit(child, status, usage)
        self.table.on_time(time.monotonic())

    def until(self, kind: type[Any]) -> Any:
        """Turns the loop until a message of this kind was sent; returns the first."""
        ends_s = time.monotonic() + WAIT_S
        while time.monotonic() < ends_s:
            for message, _ in self.sent:
                if isinstance(message, kind):
                    return message
            self.turn()
        raise AssertionError(f"no {kind.__name__} came")

    def exited(self) -> None:
        """Turns the loop until the process was reaped."""
        ends_s = time.monotonic() + WAIT_S
        while self.table.leaders:
            assert time.monotonic() < ends_s
            self.turn()

    @property
    def output(self) -> bytes:
        return b"".join(body for message, body in self.sent if isinstance(message, ProcessOutput))

    def close(self) -> None:
        for pid in self.table.leaders:
            os.kill(pid, signal.SIGKILL)
        self.exited()
        for pipe in self.left:
            pipe.close()
        self.loop.close()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with none_left_open():
        made = Sandbox()
        yield made
        made.close()


def test_a_command_that_begins_with_what_pid_1_ignores_ignores_none_of_it(sandbox: Sandbox) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        sandbox.start("grep SigIgn /proc/self/status")
    finally:
        signal.signal(signal.SIGTERM, before)
    sandbox.until(ProcessEnded)
    assert int(sandbox.output.split()[1], 16) & 1 << (signal.SIGTERM - 1) == 0


def test_the_kernel_takes_a_process_before_the_supervisor(sandbox: Sandbox) -> None:
    """A program that uses up the memory must not cost the session its supervisor, or an interpreter before itself."""
    sandbox.start("read line; cat /proc/self/oom_score_adj", stdin=True)
    sandbox.write(0, b"go\n", eof=True)
    sandbox.until(ProcessEnded)
    assert sandbox.output == b"1000\n"


def test_a_child_that_prints_without_end_does_not_keep_a_process_from_ending(sandbox: Sandbox) -> None:
    """It holds the pipe and fills it faster than it is read, so that an empty pipe is never seen."""
    sandbox.start("yes & echo $! >&2; exit 3")
    ended = sandbox.until(ProcessEnded)
    assert ended.exit_code == 3
    printed = [body for message, body in sandbox.sent if isinstance(message, ProcessOutput)]
    [child] = [int(body) for body in printed if body.strip().isdigit()]
    assert [pipe.stream for pipe in sandbox.left] == ["stdout", "stderr"]
    os.kill(child, signal.SIGKILL)


def test_a_process_that_fills_its_pipe_while_output_is_gathered_ends(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit is seen then, one look reads as much as it may, and nothing is gathered any more that would be due."""
    monkeypatch.setattr(outflow, "_JOIN_TIME_S", 1000.0)
    printing = "dd if=/dev/zero bs=10000 count=1 status=none; read line; "  # in one piece
    sandbox.start(f"{printing} {printing} head -c {PIPE_BYTES} /dev/zero", stdin=True)
    while len(sandbox.output) < 10_000:
        sandbox.turn()
    sandbox.write(0, b"go\n")
    while sandbox.table.due == float("inf"):
        sandbox.turn()
    sandbox.write(3, b"go\n")
    [pid] = sandbox.table.leaders
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sandbox.until(ProcessEnded).output_bytes == 20_000 + PIPE_BYTES


def test_a_process_whose_output_waits_for_room_ends_with_every_byte(sandbox: Sandbox) -> None:
    sandbox.start("head -c 100000 /dev/zero", granted=20_000)
    sandbox.exited()
    assert len(sandbox.output) < 20_000
    assert not any(isinstance(message, ProcessEnded) for message, _ in sandbox.sent)
    sandbox.table.take(GrantOutput(id="p", granted=PLENTY), b"")
    assert sandbox.until(ProcessEnded).output_bytes == 100_000
    assert len(sandbox.output) == 100_000


def test_a_process_that_was_reaped_is_signalled_no_more(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output waits for room meanwhile, and the kernel may have given its pid to another process."""
    sandbox.start("head -c 100000 /dev/zero", granted=20_000)
    sandbox.exited()
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal"))
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a signal"))
    for target in ("process", "group", "tree"):
        sandbox.signal(signal.SIGTERM, target)
    assert not sandbox.failed
    sandbox.table.take(GrantOutput(id="p", granted=PLENTY), b"")
    sandbox.until(ProcessEnded)


def test_closing_an_input_again_is_no_error(sandbox: Sandbox) -> None:
    """A daemon that was killed in between asks for it again."""
    sandbox.start("cat", stdin=True)
    first = sandbox.write(0, b"abc", eof=True)
    again = sandbox.write(0, b"abc", eof=True)
    assert sandbox.done_ops[first] == sandbox.done_ops[again] == {"written": 3}
    sandbox.until(ProcessEnded)
    assert sandbox.output == b"abc"


def test_a_terminal_ends_its_input_by_the_character_that_it_has_for_it(sandbox: Sandbox) -> None:
    sandbox.start("stty eof ^E; echo set; cat; echo ended", stdin=True, columns=80, rows=24)
    while b"set" not in sandbox.output:
        sandbox.turn()
    sandbox.write(0, b"", eof=True)
    sandbox.until(ProcessEnded)
    assert b"ended" in sandbox.output


def test_an_end_of_a_terminals_input_that_is_repeated_is_sent_once(sandbox: Sandbox) -> None:
    sandbox.start("cat; echo first; cat; echo second", stdin=True, columns=80, rows=24)
    for _ in range(3):
        sandbox.write(0, b"", eof=True)
    while b"first" not in sandbox.output:
        sandbox.turn()
    sandbox.write(0, b"word\n", eof=True)
    sandbox.until(ProcessEnded)
    assert sandbox.output.count(b"word") == 2, "the second program has read a line: its echo, and its copy"


def test_a_known_id_starts_nothing_until_it_is_forgotten(sandbox: Sandbox) -> None:
    sandbox.start("echo once")
    sandbox.until(ProcessEnded)
    assert sandbox.start("echo once") in sandbox.done_ops
    assert not sandbox.table.leaders
    sandbox.table.take(ForgetProcess(id="p"), b"")
    sandbox.start("echo again")
    assert sandbox.table.leaders


@pytest.mark.parametrize("argv", [b"", b"true", b"true\0x", b"true\0\xff\0", b"\xed\xa0\x80\0"])
def test_a_command_that_the_system_can_not_take_breaks_the_protocol(sandbox: Sandbox, argv: bytes) -> None:
    with pytest.raises(FrameError):
        sandbox.start_with(argv, b"{}")


@pytest.mark.parametrize("env", [b"[]", b'{"": "x"}', b'{"a=b": "x"}', b'{"a": "\\u0000"}', b'{"a": 1}'])
def test_variables_that_the_system_can_not_take_break_the_protocol(sandbox: Sandbox, env: bytes) -> None:
    with pytest.raises(FrameError):
        sandbox.start_with(b"true\0", env)


def test_a_directory_that_is_no_path_breaks_the_protocol(sandbox: Sandbox) -> None:
    with pytest.raises(FrameError):
        sandbox.start("true", cwd="a\0b")


def test_an_argument_that_is_too_long_is_the_fault_of_the_command(sandbox: Sandbox) -> None:
    op = sandbox.start("true " + "x" * 200_000)
    assert sandbox.failed[op] == "too_large"


def test_no_process_left_is_not_the_fault_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    monkeypatch.setattr(os, "fork", full)
    with pytest.raises(BlockingIOError):
        start_command(Command(["/bin/true"], ".", {}), Streams(0, 1, 2), lambda: None)


def test_a_failed_start_leaves_the_directory_as_it_was() -> None:
    before = os.open(".", os.O_PATH)
    try:
        with pytest.raises(NotStarted):
            start_command(Command(["no-such-command"], "/tmp", {}), Streams(0, 1, 2), lambda: None)
        assert os.path.samestat(os.stat("."), os.fstat(before))  # noqa: PTH116 - by descriptor
    finally:
        os.close(before)
