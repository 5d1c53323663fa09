"""A pipe that a process of the sandbox writes its output into, and the supervisor reads."""

from __future__ import annotations

import fcntl
import os

F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024
READ_BYTES = 65536


class Pipe:
    """The supervisor's end of a pipe that is a process's stdout or stderr; `write_fd` is for the process."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.ended = False
        self.is_large = True  # a program can write for some milliseconds before it has to wait for a reader
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)
        try:
            fcntl.fcntl(self.write_fd, F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            self.is_large = False  # the user has many pipes; a smaller one is only slower

    def read(self) -> bytes:
        """Reads at most READ_BYTES without waiting; fewer when that is all.

        Returns nothing when nothing is there yet, or (`ended`) when nothing will come.
        """
        try:
            data = os.read(self.read_fd, READ_BYTES)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def close(self) -> None:
        os.close(self.read_fd)
