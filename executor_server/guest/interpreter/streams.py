"""stdout and stderr of the programs in the interpreter, and their destination while no program runs.

Each run gets pipes of its own, so that output of a process that outlives its run is never taken for the next one's.
Between two runs the descriptors lead to the idle pipes, the same ones for the life of an interpreter; what threads
print there is background output. The first run brings the idle pipes. Until then the descriptors lead to /dev/null.

References are taken when this module is imported, before any agent code runs.
"""

from __future__ import annotations

import io
import os
import sys

from ..wire import libc

_dup2, _close = os.dup2, os.close


class Streams:
    """Owns the descriptors 0, 1 and 2 of this process and the stream objects at them."""

    def __init__(self) -> None:
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._idle = (self.null, self.null)
        # Kept, since dropping the last reference to one of them closes its descriptor.
        self._first = sys.__stdin__, sys.__stdout__, sys.__stderr__
        self._libc_flush = libc.function("fflush")
        for fd in (0, 1, 2):
            _dup2(self.null, fd)
        sys.stdin = open(os.devnull)  # noqa: SIM115 (lives as long as the process)
        self.renew()

    def renew(self) -> None:
        """Makes new stream objects: the last program may have closed or broken its own."""
        self._stdout = sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
        self._stderr = sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]

    def put_back(self) -> None:
        """Restores the objects of the last `renew`, which imports may have replaced."""
        sys.stdout, sys.stderr = self._stdout, self._stderr

    def connect(self, fds: list[int]) -> None:
        """Begins a run with its stdout and stderr. The first run also brings the two idle pipes."""
        for fd, number in zip(fds, (1, 2)):
            _dup2(fd, number)
            _close(fd)
        if len(fds) == 4:
            self._idle = fds[2], fds[3]
            for fd in self._idle:
                os.set_inheritable(fd, False)
        _dup2(self.null, 0)  # a program that closed it would open its next file as stdin
        self.renew()

    def disconnect(self) -> None:
        """Ends a run: this process releases its pipes."""
        for fd, number in zip(self._idle, (1, 2)):
            _dup2(fd, number)

    def forget_idle(self) -> None:
        """Closes the idle pipes in a copy of the interpreter; its first run brings new ones."""
        for fd in self._idle:
            if fd != self.null:
                _close(fd)
        self._idle = (self.null, self.null)

    def flush(self) -> None:
        """Flushes each of the streams that is still open."""
        for stream in (sys.stdout, sys.stderr, self._stdout, self._stderr, sys.__stdout__, sys.__stderr__):
            if stream is not None and getattr(stream, "closed", False) is not True:
                stream.flush()
        self._libc_flush(None)

    def settle(self) -> None:
        """Flushes after a failure, which must not become another one."""
        try:
            self.flush()
        except BaseException:  # noqa: BLE001 (the program broke its own streams, or its time is up)
            return


def _stream(fd: int) -> io.TextIOWrapper:
    raw = io.FileIO(fd, "wb", closefd=False)
    return _SlicedText(io.BufferedWriter(raw, 8192), encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _SlicedText(io.TextIOWrapper):
    """Writes a huge text in slices, so that its bytes are never held as a whole."""

    _SLICE = 1024 * 1024

    def write(self, text: str) -> int:
        if len(text) <= self._SLICE:
            return super().write(text)
        for start in range(0, len(text), self._SLICE):
            super().write(text[start : start + self._SLICE])
        return len(text)
