"""Connects the local terminal with a program on a terminal in a session.

Theory of operation. One event loop has four tasks: output of the process to our terminal, keys to a buffer, the buffer
to the process, and sizes to the process. They are separate, because a process that reads no input must not block its
output or the detach keys. The buffer is bounded; input beyond it is dropped with a bell, as a terminal does. The
conversation ends with the process, with the detach keys, or with our terminal; then all tasks end. The client resumes
by itself after a lost connection; this module only reports it.

No thread is used: a blocking read in a thread can't be ended when the program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import signal
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

from executor_client.cli.detach_keys import DetachKeys
from executor_client.cli.terminal_modes import ReplayFilter
from executor_client.errors import PreconditionError
from executor_client.waits import Wait, WaitKind

TYPED_BYTES_MAX = 1 << 20
"""Bytes that wait for a process that reads no input, such as a large paste."""
WRITE_BYTES_MAX = 65_536
_BELL = b"\a"
_LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class ConversationEnd(enum.Enum):
    """Why a conversation ended."""

    PROCESS_ENDED = "process ended"
    DETACHED = "detached"
    TERMINAL_GONE = "terminal gone"


class Process(Protocol):
    """The parts of a process that a conversation needs. Its events are output and reports of omitted output."""

    def __aiter__(self) -> AsyncIterator[Any]: ...
    async def write(self, data: bytes) -> Any: ...


class Terminal(Protocol):
    """The terminal of this machine, as `LocalTerminal` has it."""

    def size(self) -> tuple[int, int]: ...
    async def read(self) -> bytes: ...
    async def write(self, output: bytes) -> None: ...
    def say(self, line: str) -> None: ...
    def make_raw(self) -> None: ...


class Conversation:
    """One process on one terminal. It is used once."""

    def __init__(
        self,
        process: Process,
        resize: Callable[[int, int], Awaitable[Any]],
        terminal: Terminal,
        keys: DetachKeys,
        *,
        replayed_to: int = 0,
    ) -> None:
        """`resize` sets the columns and rows of the process's terminal. Output up to the event `replayed_to` is old: it
        is shown without terminal queries, and then the program is made to redraw its screen."""
        self._process = process
        self._resize = resize
        self._terminal = terminal
        self._keys = keys
        self._replayed_to = replayed_to
        self._typed = bytearray()
        self._has_typed = asyncio.Event()
        self._has_resized = asyncio.Event()
        self._end: asyncio.Future[ConversationEnd] = asyncio.get_running_loop().create_future()
        self._is_away = False
        self._is_gone = False
        self._needs_redraw = replayed_to > 0

    async def run(self) -> ConversationEnd:
        """Returns once the process has ended or we have detached. Raises ExecutorClientError, OSError."""
        tasks = [
            asyncio.create_task(self._follow(each))
            for each in (self._show_output(), self._take_keys(), self._pass_keys(), self._pass_sizes())
        ]
        try:
            with self._signals():
                end = await self._end
                self._is_gone = end is ConversationEnd.TERMINAL_GONE
                return end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def show_wait(self, wait: Wait) -> None:
        """Reports once that the daemon is away. The client's `on_wait`."""
        if wait.kind is WaitKind.DAEMON and not self._is_away:
            self._is_away = True
            self._terminal.say(
                "the daemon does not answer; the program continues, and its output will follow when the daemon is back"
            )

    # -----------------------------------------------------------------------------------------------------------------
    # The tasks

    async def _follow(self, work: Coroutine[Any, Any, ConversationEnd]) -> None:
        """Ends the conversation with the first task that ends, or with its error."""
        try:
            end = await work
        except Exception as error:  # noqa: BLE001 - the owner of the task raises it
            if not self._end.done():
                if isinstance(error, OSError) and error.errno == errno.EIO:  # a write to a terminal that hung up
                    self._end.set_result(ConversationEnd.TERMINAL_GONE)
                else:
                    self._end.set_exception(error)
        else:
            if not self._end.done():
                self._end.set_result(end)

    async def _show_output(self) -> ConversationEnd:
        replay: ReplayFilter | None = ReplayFilter() if self._replayed_to else None
        async for event in self._process:
            self._note_answer()
            if replay is not None and event.number > self._replayed_to:
                await self._terminal.write(replay.finish())
                replay = None
            data = getattr(event, "data", None)
            if data is None:
                self._terminal.say(f"{event.omitted_bytes:,} bytes of output left out")
            else:
                await self._terminal.write(data if replay is None else replay.feed(data))
        return ConversationEnd.PROCESS_ENDED

    async def _take_keys(self) -> ConversationEnd:
        while typed := await self._terminal.read():
            passed, is_leaving = self._keys.feed(typed)
            if is_leaving:
                return ConversationEnd.DETACHED
            room = TYPED_BYTES_MAX - len(self._typed)
            if len(passed) > room:
                await self._terminal.write(_BELL)
            self._typed += passed[:room]
            if self._typed:
                self._has_typed.set()
        return ConversationEnd.TERMINAL_GONE

    async def _pass_keys(self) -> ConversationEnd:
        with contextlib.suppress(PreconditionError):  # it has ended; its output says how
            while True:
                await self._has_typed.wait()
                piece = bytes(self._typed[:WRITE_BYTES_MAX])
                del self._typed[: len(piece)]
                if not self._typed:
                    self._has_typed.clear()
                await self._process.write(piece)
                self._note_answer()
        return await self._never()

    async def _pass_sizes(self) -> ConversationEnd:
        """Sends the current size first: the process may have an older one."""
        while True:
            self._has_resized.clear()
            if self._needs_redraw:
                self._needs_redraw = False
                await self._redraw()
            else:
                await self._resize(*self._terminal.size())
            await self._has_resized.wait()

    async def _redraw(self) -> None:
        """Changes the size and back: programs redraw their screen when the size changes."""
        columns, rows = self._terminal.size()
        await self._resize(columns, rows - 1 if rows > 1 else rows + 1)
        await self._resize(columns, rows)

    async def _never(self) -> ConversationEnd:
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    def _note_answer(self) -> None:
        if self._is_away:
            self._is_away = False
            self._terminal.say("the daemon is back")
            self._needs_redraw = True  # our own lines are on its screen
            self._has_resized.set()

    # -----------------------------------------------------------------------------------------------------------------
    # Signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGHUP end the conversation and restore the terminal; SIGWINCH and SIGCONT send its size.

        Once the terminal is gone, the first two stay harmless until the loop ends: a closed window causes several
        SIGHUPs, by the kernel and by its shell, and the caller still has to hang up the process.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self._has_resized.set)
        loop.add_signal_handler(signal.SIGCONT, self._continued)
        for number in _LEAVING_SIGNALS:
            loop.add_signal_handler(number, self._leave)
        try:
            yield
        finally:
            for number in (signal.SIGWINCH, signal.SIGCONT, *(() if self._is_gone else _LEAVING_SIGNALS)):
                loop.remove_signal_handler(number)

    def _leave(self) -> None:
        if not self._end.done():
            self._end.set_result(ConversationEnd.TERMINAL_GONE)

    def _continued(self) -> None:
        with contextlib.suppress(termios.error):  # a terminal that hangs up also sends SIGCONT
            self._terminal.make_raw()
        self._has_resized.set()
