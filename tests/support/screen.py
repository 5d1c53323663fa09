"""A terminal for tests: what a person would see of what a program wrote to it.

It knows what rich writes, and refuses everything else: so a sequence that got through from a sandbox is found.
"""

from __future__ import annotations

import functools
import os
import pty
import re
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from tests.support.fork_server import popen

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x00-\x1f\x7f]+)|([\x00-\x1f\x7f])")
READ_BYTES = 65_536


class Screen:
    """Rows without end: what a terminal scrolled out is still there."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        for found in _TOKEN.finditer(text):
            arguments, command, carriage_return, line_feed, printed, other = found.groups()
            assert other is None, f"{other!r} was sent to the terminal"
            if command is not None:
                self._obey(arguments, command)
            elif carriage_return:
                self._column = 0
            elif line_feed:
                self._row += 1
                self.rows.extend([] for _ in range(self._row + 1 - len(self.rows)))
            elif printed:
                self._write(printed)

    def _obey(self, arguments: str, command: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(arguments or 1))
        elif command == "K" and arguments == "2":
            self.rows[self._row] = []
        else:
            assert command == "m" or arguments == "?25", f"the terminal was told {arguments + command}"

    def _write(self, text: str) -> None:
        row = self.rows[self._row]
        for character in text:
            width = cell_len(character)
            row.extend(" " * (self._column + max(width, 1) - len(row)))
            if width:
                row[self._column : self._column + width] = [character, *[""] * (width - 1)]
                self._column += width
            elif self._column:
                row[self._column - 1] += character

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


@dataclass(frozen=True)
class Shown:
    """The text that a program left on its terminal, and its exit status."""

    exit_code: int
    raw: str

    @functools.cached_property
    def lines(self) -> list[str]:
        screen = Screen()
        screen.feed(self.raw)
        return screen.lines()


def run_on_terminal(command: Sequence[str], environment: Mapping[str, str], *, columns: int, rows: int = 50) -> Shown:
    """Runs a program on a terminal of its own until it ends."""
    # The sizes of the terminal that the tests run on go by these names to whatever they start.
    inherited = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (rows, columns))
        with popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=inherited, start_new_session=True
        ) as process:
            os.close(theirs)
            try:
                raw = _read_all(ours)
            except BaseException:
                process.kill()  # or its end would be waited for
                raise
    finally:
        os.close(ours)
    return Shown(process.returncode, raw.decode())


def _read_all(descriptor: int) -> bytes:
    pieces: list[bytes] = []
    while True:
        try:
            piece = os.read(descriptor, READ_BYTES)
        except OSError:  # EIO is how Linux says that no process has the other side open any more
            break
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces)
