"""The input of one process: bytes that calls have written, on their way into its pipe or terminal.

Each write has the offset of its bytes, so a write repeated after a broken connection adds nothing. Bytes that the
process has not read wait here, up to a limit. Writes beyond it are answered when there is room.
"""

from __future__ import annotations

import os

from ..wire.lean import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..wire.guest_channel import Channel
    from ..wire.process_messages import WriteProcess

# Bytes that wait for the process, and writes that wait for room.
_BUFFER_BYTES = 256 * 1024
_MAX_WRITES = 4


class Inflow:
    """Owns the descriptor of a pipe; a terminal's belongs to the process."""

    def __init__(self, channel: Channel, fd: int, on_close: Callable[[int], None], *, is_terminal: bool) -> None:
        """`on_close` is called with the descriptor before that is closed."""
        self._channel = channel
        self._on_close = on_close
        self._is_terminal = is_terminal
        self._buffer = bytearray()
        self._writes: deque[tuple[WriteProcess, bytes]] = deque()
        self._closes = False
        self._ended_at = -1  # bytes before the last end of the input
        self.fd: Optional[int] = fd  # None once it is closed
        self.taken_bytes = 0  # bytes accepted in all

    @property
    def waits(self) -> bool:
        """True while bytes wait for the process."""
        return self.fd is not None and bool(self._buffer)

    def add(self, write: WriteProcess, data: bytes) -> None:
        """Accepts a write and answers it, now or when there is room."""
        if len(self._writes) >= _MAX_WRITES:
            self._channel.fail(write.op, "queue_full", f"{_MAX_WRITES} writes wait for this process to read")
            return
        self._writes.append((write, data))
        self._accept()
        self.flush()

    def flush(self) -> None:
        """Writes as much as the process takes now."""
        while self.waits:
            assert self.fd is not None
            try:
                sent = os.write(self.fd, self._buffer[:65536])
            except BlockingIOError:
                return
            except OSError:
                self.close()  # the process has closed its input, or has ended
                return
            del self._buffer[:sent]
            self._accept()
        if self._closes and not self._buffer and not self._is_terminal:
            self.close()

    def close(self) -> None:
        """Closes the input, and refuses waiting writes. Idempotent."""
        fd, self.fd = self.fd, None
        if fd is not None and not self._is_terminal:
            self._on_close(fd)
            os.close(fd)
        self._buffer.clear()
        self._accept()

    def _accept(self) -> None:
        """Accepts and answers writes in order, as far as there is room."""
        while self._writes:
            write, data = self._writes[0]
            if write.offset > self.taken_bytes:
                problem = f"offset {write.offset} leaves a gap after the {self.taken_bytes} bytes before it"
                self._channel.fail(write.op, "input_gap", problem)
            elif write.offset + len(data) <= self.taken_bytes and not self._adds_an_end(write, data):
                self._channel.done(write.op, written=self.taken_bytes)  # repeated, or a query for the total
            elif self.fd is None or (self._closes and data[self.taken_bytes - write.offset :]):
                self._channel.fail(write.op, "input_closed", "the process has closed its input, or has ended")
            else:
                new = data[self.taken_bytes - write.offset :]
                if self._buffer and len(self._buffer) + len(new) > _BUFFER_BYTES:
                    return
                self._buffer += new
                self.taken_bytes += len(new)
                if self._adds_an_end(write, data):
                    self._ended_at = self.taken_bytes
                    if self._is_terminal:  # input can follow
                        self._buffer += _end_of_input(self.fd)
                    else:
                        self._closes = True
                self._channel.done(write.op, written=self.taken_bytes)
            self._writes.popleft()

    def _adds_an_end(self, write: WriteProcess, data: bytes) -> bool:
        """True for a new end of the input. An end at or before the last one is a repeated write."""
        return bool(write.eof) and not self._closes and write.offset + len(data) > self._ended_at


def _end_of_input(terminal: int) -> bytes:
    """Returns the terminal's end-of-input character: Ctrl-D unless the program has set another."""
    import termios

    character = termios.tcgetattr(terminal)[6][termios.VEOF]
    return character if isinstance(character, bytes) else bytes([character])
