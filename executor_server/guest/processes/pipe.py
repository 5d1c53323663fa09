"""A pipe that a process of the sandbox writes its output into, and the supervisor reads."""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024
READ_BYTES = 65536


class Pipe:
    """The supervisor's end of a pipe that is a process's stdout or stderr; `write_fd` is for the process."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.ended = False
        self._is_large: Optional[bool] = None
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)

    def make_large(self) -> bool:
        """Has room made for some milliseconds of output, once; false when the kernel gives the user no more of it.

        The kernel bounds the room of all pipes of a user, so one that nothing is printed into takes none of it.
        """
        if self._is_large is None:
            try:
                fcntl.fcntl(self.read_fd, F_SETPIPE_SZ, _PIPE_BYTES)
                self._is_large = True
            except OSError:
                self._is_large = False  # only slower
        return self._is_large

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
        if self.read_fd >= 0:
            os.close(self.read_fd)
        self.read_fd = -1
