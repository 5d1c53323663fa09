"""The terminal of this machine while a program in a session has it.

Raw: every key goes to the program, Ctrl-C too, and its bytes come through unchanged. Whatever ends the block, the
terminal gets back the settings that it had, and the modes that the program has switched.
"""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from types import TracebackType
from typing import Any, Self

from executor_client.cli.descriptors import read_some, write_all
from executor_client.cli.terminal_modes import ModeTracker
from executor_client.errors import InvalidRequest

COLUMNS, ROWS = 80, 24
SIZE_MAX = 1_000
"""Columns and rows that a daemon takes."""


class LocalTerminal:
    """A context manager: raw inside. The descriptors belong to the caller, and stay as they are."""

    def __init__(self, input_fd: int = 0, output_fd: int = 1) -> None:
        self._input_fd = input_fd
        self._output_fd = output_fd
        self._saved: list[Any] | None = None
        self._modes = ModeTracker()
        self._flushes_input = False

    def size(self) -> tuple[int, int]:
        """Returns columns and rows, each from 1 to 1,000: 80 and 24 for a terminal that does not know its own."""
        try:
            columns, rows = os.get_terminal_size(self._output_fd)
        except OSError:  # stdout is no terminal
            columns, rows = os.get_terminal_size(self._input_fd)
        return min(columns or COLUMNS, SIZE_MAX), min(rows or ROWS, SIZE_MAX)

    async def read(self) -> bytes:
        """Returns what was typed; b"" when the terminal has hung up."""
        return await read_some(self._input_fd)

    async def write(self, output: bytes) -> None:
        """Writes bytes of the program as they are."""
        self._modes.feed(output)
        await write_all(self._output_fd, output)

    def say(self, line: str) -> None:
        """Writes a line of our own between those of the program. The text must be safe for a terminal."""
        os.write(self._output_fd, f"\r\n[{line}]\r\n".encode(errors="backslashreplace"))

    def drop_typed(self) -> None:
        """Has what is typed already dropped at the end: it was meant for the program, not for the shell after it."""
        self._flushes_input = True

    def make_raw(self) -> None:
        """Sets raw mode: at the start, and when this process goes on after it was stopped."""
        tty.setraw(self._input_fd, termios.TCSADRAIN)

    def __enter__(self) -> Self:
        self._saved = termios.tcgetattr(self._input_fd)
        self.make_raw()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """A terminal that is gone has nothing to restore."""
        assert self._saved is not None
        with contextlib.suppress(OSError):
            os.write(self._output_fd, self._modes.undo() + b"\x1b[0m")
        with contextlib.suppress(termios.error):
            termios.tcsetattr(
                self._input_fd, termios.TCSAFLUSH if self._flushes_input else termios.TCSADRAIN, self._saved
            )


def own_terminal(command: str) -> LocalTerminal:
    """Returns the terminal that this process was started on. Raises InvalidRequest for an input that is none."""
    if not os.isatty(0):
        raise InvalidRequest(
            f"`executor {command}` needs a terminal, and standard input is none; "
            "`executor exec SESSION -- COMMAND` takes a pipe or a file"
        )
    return LocalTerminal(0, 1 if os.isatty(1) else 0)
