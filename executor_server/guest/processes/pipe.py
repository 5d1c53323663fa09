"""A pipe that a process of the sandbox writes its output into, and the supervisor reads."""

from __future__ import annotations

import fcntl
import os

F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024


class Pipe:
    """The supervisor's end of a pipe that is a process's stdout or stderr; `write_fd` is for the process."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.ended = False
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)
        try:
            fcntl.fcntl(self.write_fd, F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # a smaller pipe is only slower

    def read(self) -> bytes:
        """Reads without waiting; returns nothing when nothing is there yet, or (`ended`) when nothing will come."""
        try:
            data = os.read(self.read_fd, 65536)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def close(self) -> None:
        os.close(self.read_fd)
