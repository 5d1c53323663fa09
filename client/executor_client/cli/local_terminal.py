"""The local terminal while a program in a session uses it.

In raw mode every key goes to the program, including Ctrl-C, and output is unchanged. At the end of the block, the
terminal's settings and the modes that the program switched are restored.
"""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from typing import Any, Self

from executor_client.cli.descriptors import read_some, write_all
from executor_client.cli.terminal_modes import ModeTracker
from executor_client.errors import InvalidRequest

COLUMNS, ROWS = 80, 24
SIZE_MAX = 1_000
"""Columns and rows that a daemon accepts."""


class LocalTerminal:
    """A context manager for raw mode. The descriptors belong to the caller and stay open."""

    def __init__(self, input_fd: int = 0, output_fd: int = 1) -> None:
        self._input_fd = input_fd
        self._output_fd = output_fd
        self._saved: list[Any] | None = None
        self._modes = ModeTracker()
        self._flushes_input = False

    def size(self) -> tuple[int, int]:
        """Returns columns and rows, each from 1 to 1,000; 80 and 24 if the terminal does not know its size."""
        try:
            columns, rows = os.get_terminal_size(self._output_fd)
        except OSError:  # stdout is not a terminal
            columns, rows = os.get_terminal_size(self._input_fd)
        return min(columns or COLUMNS, SIZE_MAX), min(rows or ROWS, SIZE_MAX)

    async def read(self) -> bytes:
        """Returns typed bytes; b"" if the terminal hung up."""
        return await read_some(self._input_fd)

    async def write(self, output: bytes) -> None:
        """Writes the program's bytes unchanged."""
        self._modes.feed(output)
        await write_all(self._output_fd, output)

    def say(self, line: str) -> None:
        """Writes our own line between the program's. The text must be safe for a terminal."""
        os.write(self._output_fd, f"\r\n[{line}]\r\n".encode(errors="backslashreplace"))

    def drop_typed(self) -> None:
        """Drops pending input at the end: it was typed for the program, not for the local shell."""
        self._flushes_input = True

    def make_raw(self) -> None:
        """Sets raw mode: at the start, and when this process continues after a stop."""
        tty.setraw(self._input_fd, termios.TCSADRAIN)

    def __enter__(self) -> Self:
        self._saved = termios.tcgetattr(self._input_fd)
        self.make_raw()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restores the terminal, unless it is gone."""
        assert self._saved is not None
        with contextlib.suppress(OSError):
            os.write(self._output_fd, self._modes.undo() + b"\x1b[0m")
        with contextlib.suppress(termios.error):
            termios.tcsetattr(
                self._input_fd, termios.TCSAFLUSH if self._flushes_input else termios.TCSADRAIN, self._saved
            )


def own_terminal(command: str) -> LocalTerminal:
    """Returns the terminal of this process. Raises InvalidRequest if standard input is not a terminal."""
    if not os.isatty(0):
        raise InvalidRequest(
            f"`executor {command}` needs a terminal, and standard input is not one; "
            "`executor exec SESSION -- COMMAND` accepts a pipe or a file"
        )
    return LocalTerminal(0, 1 if os.isatty(1) else 0)
