"""A person at a terminal talks with a program in a session: on a real terminal, with a process that is in memory."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import pytest

from executor_client.cli.conversation import TYPED_BYTES_MAX, Conversation, ConversationEnd
from executor_client.cli.detach_keys import DETACH_KEYS, DetachKeys, parse_keys
from executor_client.cli.local_terminal import LocalTerminal, own_terminal
from executor_client.errors import InvalidRequest, PreconditionError, UnavailableError
from executor_client.waits import Wait, WaitKind


@dataclass(frozen=True)
class Output:
    number: int
    data: bytes


@dataclass(frozen=True)
class Cut:
    number: int
    omitted_bytes: int


@dataclass
class FakeProcess:
    """Yields the `events` that a test puts in: output, None for its end, an exception for a daemon that is lost."""

    events: asyncio.Queue[Output | Cut | Exception | None] = field(default_factory=asyncio.Queue)
    written: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    sizes: asyncio.Queue[tuple[int, int]] = field(default_factory=asyncio.Queue)
    takes_input: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.takes_input.set()

    async def __aiter__(self) -> AsyncIterator[Output | Cut]:
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event

    async def write(self, data: bytes) -> None:
        await self.takes_input.wait()
        if self.has_ended:
            raise PreconditionError("it has ended", reason="PROCESS_ENDED")
        self.written.put_nowait(data)

    async def resize(self, columns: int, rows: int) -> None:
        self.sizes.put_nowait((columns, rows))


@dataclass
class Screen:
    """The two ends of a terminal: a person types into `person`, the program under test has `program`."""

    person: int
    program: int

    def type(self, keys: bytes) -> None:
        assert os.write(self.person, keys) == len(keys)

    async def shows(self, text: bytes) -> bytes:
        """Reads what came until the text is in it."""
        seen = b""
        os.set_blocking(self.person, False)
        while text not in seen:
            try:
                seen += os.read(self.person, 65_536)
            except BlockingIOError:
                event = asyncio.Event()
                asyncio.get_running_loop().add_reader(self.person, event.set)
                try:
                    await asyncio.wait_for(event.wait(), 10)
                finally:
                    asyncio.get_running_loop().remove_reader(self.person)
        return seen


@pytest.fixture
def screen() -> Iterator[Screen]:
    person, program = os.openpty()
    termios.tcsetwinsize(program, (30, 100))
    yield Screen(person, program)
    for descriptor in (person, program):
        os.close(descriptor)


async def talk(
    screen: Screen, process: FakeProcess, *, keys: str = DETACH_KEYS, replayed_to: int = 0
) -> asyncio.Task[ConversationEnd]:
    """Begins a conversation as the commands do, and returns its task."""
    is_raw = asyncio.Event()

    async def run() -> ConversationEnd:
        with LocalTerminal(screen.program, screen.program) as terminal:
            is_raw.set()
            detach_keys = DetachKeys(parse_keys(keys))
            return await Conversation(process, process.resize, terminal, detach_keys, replayed_to=replayed_to).run()

    task = asyncio.create_task(run())
    await is_raw.wait()
    return task


async def test_keys_go_to_the_program_and_its_bytes_come_unchanged(screen: Screen) -> None:
    process = FakeProcess()
    task = await talk(screen, process)
    screen.type(b"ls\r")
    assert await process.written.get() == b"ls\r"
    process.events.put_nowait(Output(1, b"\x1b[31mred\x1b[0m\n\xff"))
    assert await screen.shows(b"\xff") == b"\x1b[31mred\x1b[0m\n\xff"
    process.events.put_nowait(None)
    assert await task is ConversationEnd.PROCESS_ENDED


async def test_interrupt_suspend_and_quit_are_keys_of_the_program(screen: Screen) -> None:
    process = FakeProcess()
    task = await talk(screen, process)
    screen.type(b"\x03\x1a\x1c\x13\x04")
    assert await process.written.get() == b"\x03\x1a\x1c\x13\x04"
    process.events.put_nowait(None)
    await task


@pytest.mark.parametrize("end", ["process", "keys", "lost", "cancelled", "signal"])
async def test_terminal_is_as_before_however_it_ends(screen: Screen, end: str) -> None:
    before = termios.tcgetattr(screen.program)
    process = FakeProcess()
    task = await talk(screen, process)
    assert termios.tcgetattr(screen.program) != before
    process.events.put_nowait(Output(1, b"\x1b[?1049h\x1b[?25lvi"))
    await screen.shows(b"vi")
    match end:
        case "process":
            process.events.put_nowait(None)
        case "keys":
            screen.type(b"\x1d")
        case "lost":
            process.events.put_nowait(UnavailableError("gone", reason=""))
        case "cancelled":
            task.cancel()
        case "signal":
            os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait([task])
    assert termios.tcgetattr(screen.program) == before
    assert await screen.shows(b"\x1b[0m") == b"\x1b[?25h\x1b[?1049l\x1b[0m"
    if end == "lost":
        assert isinstance(task.exception(), UnavailableError)
    if end == "signal":  # a closed window sends more than one, while the process is still hung up on
        os.kill(os.getpid(), signal.SIGHUP)
    else:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_keys_detach_and_drop_what_follows(screen: Screen) -> None:
    process = FakeProcess()
    task = await talk(screen, process, keys="ctrl-p,ctrl-q")
    screen.type(b"a\x10b\x10\x10")
    assert await process.written.get() == b"a\x10b\x10"
    screen.type(b"\x11rm -r /\r")
    assert await task is ConversationEnd.DETACHED
    assert process.written.empty()


async def test_process_that_takes_no_input_can_be_left(screen: Screen) -> None:
    process = FakeProcess()
    process.takes_input.clear()
    task = await talk(screen, process)
    screen.type(b"waits")
    process.events.put_nowait(Output(1, b"still printing"))
    await screen.shows(b"still printing")
    screen.type(b"\x1d")
    assert await task is ConversationEnd.DETACHED


async def test_what_is_typed_past_the_buffer_is_dropped_with_a_bell() -> None:
    class Paste:
        """A terminal on which much is pasted."""

        def __init__(self) -> None:
            self.pieces = [b"x" * TYPED_BYTES_MAX, b"more", b"\x1d"]
            self.shown = b""

        def size(self) -> tuple[int, int]:
            return 80, 24

        async def read(self) -> bytes:
            return self.pieces.pop(0)

        async def write(self, output: bytes) -> None:
            self.shown += output

        def say(self, line: str) -> None:
            raise AssertionError(line)

        def make_raw(self) -> None:
            raise AssertionError

    process, terminal = FakeProcess(), Paste()
    process.takes_input.clear()
    end = await Conversation(process, process.resize, terminal, DetachKeys(b"\x1d")).run()
    assert (end, terminal.shown) == (ConversationEnd.DETACHED, b"\a")


async def test_program_learns_each_new_size(screen: Screen) -> None:
    process = FakeProcess()
    task = await talk(screen, process)
    assert await process.sizes.get() == (100, 30), "that of now, whatever it was when the program began"
    termios.tcsetwinsize(screen.program, (40, 120))
    os.kill(os.getpid(), signal.SIGWINCH)
    assert await process.sizes.get() == (120, 40)
    process.events.put_nowait(None)
    await task


async def test_one_line_says_that_the_daemon_is_away_and_one_that_it_is_back(screen: Screen) -> None:
    process = FakeProcess()
    with LocalTerminal(screen.program, screen.program) as terminal:
        conversation = Conversation(process, process.resize, terminal, DetachKeys(b""))
        task = asyncio.create_task(conversation.run())
        for waited_s in (1.0, 3.0):
            conversation.show_wait(Wait(WaitKind.DAEMON, "the daemon at \x1b]0;x\a", "", waited_s, None))
        process.events.put_nowait(Output(1, b"$ "))
        process.events.put_nowait(None)
        await task
    seen = await screen.shows(b"$ ")
    assert seen.count(b"the daemon does not answer") == 1 and seen.count(b"[the daemon is back]") == 1
    assert b"\x1b]" not in seen


async def test_program_draws_its_screen_again_when_the_daemon_is_back(screen: Screen) -> None:
    """The lines of this program's own are on that screen."""
    process = FakeProcess()
    with LocalTerminal(screen.program, screen.program) as terminal:
        conversation = Conversation(process, process.resize, terminal, DetachKeys(b""))
        task = asyncio.create_task(conversation.run())
        assert await process.sizes.get() == (100, 30)
        conversation.show_wait(Wait(WaitKind.DAEMON, "the daemon", "", 1.0, None))
        process.events.put_nowait(Output(1, b"x"))
        assert [await process.sizes.get(), await process.sizes.get()] == [(100, 29), (100, 30)]
        process.events.put_nowait(None)
        await task


async def test_old_output_asks_the_terminal_nothing_and_the_program_draws_again(screen: Screen) -> None:
    process = FakeProcess()
    for event in (Output(1, b"\x1b[6nold\x1b["), Output(2, b"c\x1b[31"), Output(3, b"mred"), Output(4, b"\x1b[6nnew")):
        process.events.put_nowait(event)
    task = await talk(screen, process, replayed_to=2)
    assert await screen.shows(b"new") == b"old\x1b[31mred\x1b[6nnew"
    assert [await process.sizes.get(), await process.sizes.get()] == [(100, 29), (100, 30)]
    process.events.put_nowait(None)
    await task


async def test_output_that_was_left_out_is_said(screen: Screen) -> None:
    process = FakeProcess()
    task = await talk(screen, process)
    process.events.put_nowait(Cut(1, 12_345))
    await screen.shows(b"[12,345 bytes of output left out]")
    process.events.put_nowait(None)
    await task


async def test_keys_for_a_program_that_has_just_ended_are_no_error(screen: Screen) -> None:
    process = FakeProcess(has_ended=True)
    task = await talk(screen, process)
    screen.type(b"x")
    process.events.put_nowait(Output(1, b"bye"))
    await screen.shows(b"bye")
    process.events.put_nowait(None)
    assert await task is ConversationEnd.PROCESS_ENDED


def test_input_that_is_no_terminal_is_refused_with_the_command_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    with pytest.raises(InvalidRequest, match="executor exec SESSION -- COMMAND"):
        own_terminal("shell")
