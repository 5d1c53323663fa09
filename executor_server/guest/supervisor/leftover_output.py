"""Output of processes that outlive their run: it is read, kept, and shown with later runs.

A run's pipes come here when the run has ended and another process still has them open. So a server that the program
started can continue to print, and is not killed by SIGPIPE. Each run has its own pipes, so this output is never taken
for output of the current run. It is shown between marker lines when the next run starts and when that run ends.

Everything has a limit. Head and tail of each stream are kept. A process that prints endlessly is read at a limited rate
and blocks in between, so it can use up neither memory nor the supervisor's time.
"""

from __future__ import annotations

import fcntl
import time

from ..processes.pipe import F_SETPIPE_SZ, Pipe
from ..wire.lean import deque
from ..wire.loop import READ, Loop
from .output import OutputCutter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .output import LogRelay

# Bytes of one stream that are kept until it is shown.
BACKGROUND_BYTES = 32 * 1024
# Bytes that are read from all pipes together in an interval; the rest waits in the pipes.
_INTERVAL_S = 0.25
_BYTES_PER_INTERVAL = 1024 * 1024
# Open pipes. Beyond that, the oldest is closed, and a process that prints into it gets a SIGPIPE.
MAX_PIPES = 32
# Bytes that a pipe may hold after its run.
_PIPE_BYTES = 64 * 1024


class LeftoverOutput:
    """Owns the pipes of runs that have ended, and the output read from them."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._pipes: deque[Pipe] = deque()
        self._idle: list[Pipe] = []  # the interpreter's own, between runs
        self._kept = {"stdout": _Kept(), "stderr": _Kept()}
        self._keeps = False  # there is something to show
        self._interval_ends = 0.0
        self._interval_bytes = 0
        self._waits = False
        self._closed = 0  # pipes closed since the last call of `show`

    @property
    def due(self) -> float:
        """Latest time for the next call of `on_time`."""
        return self._interval_ends if self._waits else float("inf")

    def on_time(self, now: float) -> None:
        if self._waits and now >= self._interval_ends:
            self._waits = False
            self._watch()

    # -- pipes -----------------------------------------------------------------------------------------------------

    def open_idle(self) -> tuple[int, int]:
        """Makes pipes for a new interpreter's output between runs; returns their write ends, which the caller owns."""
        for pipe in self._idle:
            self._loop.watch(pipe.read_fd, 0, None)
            pipe.close()
        self._idle = [Pipe("stdout"), Pipe("stderr")]
        self._watch()
        return self._idle[0].write_fd, self._idle[1].write_fd

    def adopt(self, pipes: list[Pipe]) -> None:
        """Takes the pipes of a run that has ended; closes those that no process has open."""
        held = [pipe for pipe in pipes if not pipe.ended]
        for pipe in pipes:
            if pipe.ended:
                pipe.close()
        if not held:
            return
        for pipe in held:
            try:
                fcntl.fcntl(pipe.read_fd, F_SETPIPE_SZ, _PIPE_BYTES)
            except OSError:
                pass  # it contains more at the moment; the kernel charges that to the sandbox
            self._pipes.append(pipe)
        while len(self._pipes) > MAX_PIPES:
            self._closed += 1
            self._end(self._pipes[0])
        self._watch()

    def _end(self, pipe: Pipe) -> None:
        self._loop.watch(pipe.read_fd, 0, None)
        pipe.close()
        (self._pipes if pipe in self._pipes else self._idle).remove(pipe)

    def _watch(self) -> None:
        for pipe in (*self._pipes, *self._idle):
            self._loop.watch(pipe.read_fd, READ, None if self._waits else self._reader_of(pipe))

    def _reader_of(self, pipe: Pipe) -> Callable[[int], None]:
        def on_readable(_events: int) -> None:
            self._read(pipe)

        return on_readable

    def _read(self, pipe: Pipe) -> bool:
        """Reads one piece, unless the interval's bytes are used up; returns true if there was any."""
        now = time.monotonic()
        if now >= self._interval_ends:
            self._interval_ends, self._interval_bytes = now + _INTERVAL_S, 0
        if self._interval_bytes >= _BYTES_PER_INTERVAL:
            self._waits = True
            self._watch()
            return False
        data = pipe.read()
        self._interval_bytes += len(data)
        if pipe.ended:
            self._end(pipe)
        elif data:
            self._kept[pipe.stream].add(data)
            self._keeps = True
        return bool(data)

    # -- showing ---------------------------------------------------------------------------------------------------

    def show(self, logs: LogRelay, limit_bytes: int, *, drain: bool = False) -> None:
        """Sends the kept output, at most `limit_bytes` of each stream. `drain`: reads the pipes first."""
        for pipe in tuple(self._pipes) if drain else ():
            while self._read(pipe):
                pass
        shown, self._keeps = self._kept if self._keeps else {}, False
        for stream, kept in shown.items():
            if kept.total_bytes:
                self._kept[stream] = _Kept()
                logs.say_background(stream, kept.data(limit_bytes), kept.total_bytes)
        if self._closed:
            logs.say("stderr", f"[{self._closed} outputs of background processes were closed: at most {MAX_PIPES}]\n")
            self._closed = 0


class _Kept:
    """Head and tail of one stream's output."""

    def __init__(self) -> None:
        self._cutter = OutputCutter(BACKGROUND_BYTES)
        self._head = bytearray()

    @property
    def total_bytes(self) -> int:
        return self._cutter.total_bytes

    def add(self, data: bytes) -> None:
        self._head += self._cutter.feed("", data)

    def data(self, limit_bytes: int) -> bytes:
        """Returns the kept bytes, cut to the limit; a line marks omitted bytes."""
        head, tail = bytes(self._head), b"".join(data for _, data in self._cutter.drain())
        omitted = self._cutter.omitted_bytes
        if len(head) + len(tail) > limit_bytes:
            whole, half = head + tail, limit_bytes // 2
            omitted += len(whole) - 2 * half
            head, tail = whole[:half], whole[len(whole) - half :]
        return head + b"\n[%d bytes of it left out]\n" % omitted + tail if omitted else head + tail
