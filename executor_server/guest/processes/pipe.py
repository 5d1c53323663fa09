"""A pipe that a process of the sandbox writes its output into, and the supervisor reads."""

from __future__ import annotations

import fcntl
import os

F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024
READ_BYTES = 65536


class Pipe:
    """The supervisor's end of a process's stdout or stderr pipe; `write_fd` is for the process."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.ended = False
        self._is_large = False
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def make_large(self) -> None:
        """Makes room for some milliseconds of output, once, unless the user's pipes have used up the kernel's limit.

        The limit counts all pipes of a user, so a pipe without output takes no room.
        """
        if not self._is_large:
            self._is_large = True
            try:
                fcntl.fcntl(self.read_fd, F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:
                pass  # only slower

    def read(self) -> bytes:
        """Reads at most READ_BYTES without waiting. Returns nothing if the pipe is empty, or (`ended`) closed."""
        try:
            data = os.read(self.read_fd, READ_BYTES)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def close(self) -> None:
        if self.read_fd >= 0:
            os.close(self.read_fd)
        self.read_fd = -1
