"""A program on a terminal at which a test types: it waits for text on the screen, never for time to pass."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.fork_server import is_forked, popen

READ_BYTES = 65_536
# Makes standard input the controlling terminal, so that a new size is reported by SIGWINCH. Not as a `preexec_fn`:
# that is run after a fork, in which gRPC starts its threads again, and one of them aborts once Python has closed its
# descriptors (https://github.com/grpc/grpc/pull/43157).
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
TIMEOUT_S = 30.0


@dataclass
class TypedTerminal:
    """The person's side of the terminal. `seen` is everything that came; `expect` goes on behind what it found last."""

    process: subprocess.Popen[bytes]
    descriptor: int
    program_side: int
    seen: bytearray = field(default_factory=bytearray)
    _place: int = 0

    def type(self, keys: bytes) -> None:
        left = memoryview(keys)
        while left:
            left = left[os.write(self.descriptor, left) :]

    def expect(self, text: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """Waits for the text and returns what came up to its end. Fails when the program ends without it."""
        ends_s = time.monotonic() + timeout_s
        while (found := self.seen.find(text, self._place)) < 0:
            readable, _, _ = select.select([self.descriptor], [], [], max(0.0, ends_s - time.monotonic()))
            assert readable, f"{text!r} did not come; {bytes(self.seen[self._place :])!r} did"
            assert self._read(), f"the program ended without {text!r}: {bytes(self.seen[self._place :])!r}"
        place, self._place = self._place, found + len(text)
        return bytes(self.seen[place : self._place])

    def resize(self, columns: int, rows: int) -> None:
        """Sets the size; the kernel sends SIGWINCH."""
        termios.tcsetwinsize(self.descriptor, (rows, columns))

    def modes(self) -> list[object]:
        """The terminal's settings, as termios has them."""
        return termios.tcgetattr(self.program_side)

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Waits for the program's end, reads the rest of what it wrote, and returns its exit code."""
        code = self.process.wait(timeout_s)
        while select.select([self.descriptor], [], [], 0)[0] and self._read():
            pass
        return code

    def _read(self) -> bool:
        try:
            piece = os.read(self.descriptor, READ_BYTES)
        except OSError:  # EIO: no process has the other side open any more
            piece = b""
        self.seen += piece
        return bool(piece)


@contextmanager
def on_terminal(
    command: Sequence[str], environment: Mapping[str, str], *, columns: int = 100, rows: int = 30
) -> Iterator[TypedTerminal]:
    """Runs a program on a terminal of its own, as its leader. What is left of it at the end is killed."""
    inherited = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    person, program = os.openpty()
    process = None
    try:
        termios.tcsetwinsize(program, (rows, columns))
        streams = {"stdin": program, "stdout": program, "stderr": program}
        if not is_forked(command, {"env": inherited}):  # a fork takes it itself
            command = [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *command]
        process = popen(command, env=inherited, start_new_session=True, **streams)
        yield TypedTerminal(process, person, program)
    finally:
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        for descriptor in (person, program):
            os.close(descriptor)
