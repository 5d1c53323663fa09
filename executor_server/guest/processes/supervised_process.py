"""One process: its start, its output and input, its end.

States: running -> exited (reaped, but its output is not read to the end) -> ended (reported). The exit alone is not the
end: the last output may still be in the pipes, and may have to wait until the daemon has room. Later output of other
processes into these pipes belongs to no process: the pipes are handed over as background output.
"""

from __future__ import annotations

import os
import struct
import time

from ..wire.loop import READ, WRITE, Loop
from ..wire.process_messages import ProcessEnded, ProcessStarted
from . import sessions
from .inflow import Inflow
from .outflow import Outflow
from .pipe import Pipe
from .start import Command, Streams, start_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Union

    from ..wire.guest_channel import Channel
    from ..wire.process_messages import StartProcess, WriteProcess
    from .table import Processes

    Source = Union[Pipe, "Terminal"]


_TIOCSWINSZ = 0x5414
# Reads of one descriptor in a turn of the loop, so that a process that prints endlessly can't starve the others.
_READS_PER_EVENT = 4
_FIONREAD = 0x541B
# Bytes that are read from a terminal after its process has exited: more than the kernel buffers.
_TERMINAL_BYTES = 128 * 1024


class Terminal:
    """The supervisor's end of a terminal. Reads like a pipe; the kernel reports its end as an error."""

    stream = "stdout"

    def __init__(self, columns: int, rows: int) -> None:
        self.ended = False
        self.read_fd, self.slave_fd = os.openpty()
        os.set_blocking(self.read_fd, False)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        import fcntl

        fcntl.ioctl(self.read_fd, _TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        os.close(self.read_fd)


class Process:
    """A process of the table."""

    def __init__(self, request: StartProcess, channel: Channel, loop: Loop, owner: Processes) -> None:
        self.process_id = request.id
        self.pid = 0
        self.ended = False
        self._request = request
        self._channel = channel
        self._loop = loop
        self._owner = owner
        self._outflow = Outflow(channel, request.id, request.output_bytes, request.granted)
        self._inflow: Optional[Inflow] = None
        self._terminal: Optional[Terminal] = None
        self._sources: list[Source] = []
        self._exit: Optional[tuple[int, float, int]] = None  # status, CPU seconds, peak bytes
        self._unread: dict[str, int] = {}  # bytes of each stream still to be read, once it has exited
        self._timed_out = False
        self._deadline_s = float("inf")
        self._paused = False
        self._began_s = time.monotonic()

    # -- beginning -----------------------------------------------------------------------------------------------

    def start(self, command: Command, limit: Callable[[], None]) -> None:
        """Starts it; `limit` is called in the process before it runs the command.

        Raises NotStarted; OSError if no process, descriptor or terminal is available.
        """
        opened: list[int] = []
        try:
            self.pid = start_command(command, self._make_streams(opened), limit)
            _offer_to_oom_killer(self.pid)
        except BaseException:
            self._close_sources()
            raise
        finally:
            for fd in opened:
                os.close(fd)
        if self._request.timeout_s is not None:
            self._deadline_s = self._began_s + self._request.timeout_s
        self._channel.send(ProcessStarted(id=self.process_id, pid=self.pid))
        self._channel.done(self._request.op)
        self._watch()

    def _make_streams(self, opened: list[int]) -> Streams:
        """Makes the streams; `opened` gets the process's ends, which are closed here after the fork."""
        request = self._request
        if request.columns is not None and request.rows is not None:
            self._terminal = Terminal(request.columns, request.rows)
            opened.append(self._terminal.slave_fd)
            self._sources = [self._terminal]
            self._inflow = Inflow(self._channel, self._terminal.read_fd, self._forget, is_terminal=True)
            return Streams(-1, -1, -1, os.ttyname(self._terminal.slave_fd))
        pipes = []
        for stream in ("stdout",) if request.merge_stderr else ("stdout", "stderr"):
            pipe = Pipe(stream)
            pipe.make_large()
            opened.append(pipe.write_fd)
            self._sources.append(pipe)
            pipes.append(pipe)
        if request.stdin:
            stdin, ours = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours, False)
            self._inflow = Inflow(self._channel, ours, self._forget, is_terminal=False)
        else:
            stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        opened.append(stdin)
        return Streams(stdin, pipes[0].write_fd, pipes[-1].write_fd)

    # -- output and input ----------------------------------------------------------------------------------------

    def grant(self, granted: int) -> None:
        self._outflow.granted = max(self._outflow.granted, granted)
        self._watch()

    def pause(self, paused: bool) -> None:
        """Stops reading its output, or starts again."""
        if paused != self._paused:
            self._paused = paused
            self._go_on()

    def write(self, write: WriteProcess, data: bytes) -> None:
        if self._inflow is None:
            self._channel.fail(write.op, "no_input", "the process was started without an input")
            return
        self._inflow.add(write, data)
        self._watch()

    def resize(self, columns: int, rows: int) -> None:
        if self._terminal is not None and not self.ended:
            self._terminal.resize(columns, rows)

    def _watch(self) -> None:
        if self.ended or not self._sources:
            return
        reads = not self._paused and self._outflow.room > 0
        # While output is gathered, a pipe fills, and is then read in one go; a terminal's buffer is too small for that.
        gathers = self._outflow.due_s < float("inf")
        for source in self._sources:
            waits = gathers and source is not self._terminal
            done = source.ended or self._unread.get(source.stream) == 0
            events = READ if reads and not waits and not done else 0
            if source is self._terminal and self._inflow is not None and self._inflow.waits:
                events |= WRITE
            self._loop.watch(source.read_fd, events, self._reader_of(source) if events else None)
        if self._inflow is not None and self._inflow.fd is not None and self._terminal is None:
            self._loop.watch(self._inflow.fd, WRITE, self._on_writable if self._inflow.waits else None)

    def _reader_of(self, source: Source) -> Callable[[int], None]:
        def on_event(events: int) -> None:
            if events & WRITE and self._inflow is not None:
                self._inflow.flush()
            if events & ~WRITE:
                self._read(source)
            self._go_on()

        return on_event

    def _on_writable(self, _events: int) -> None:
        assert self._inflow is not None
        self._inflow.flush()
        self._watch()

    def _forget(self, fd: int) -> None:
        self._loop.watch(fd, 0, None)

    def _read(self, source: Source) -> bool:
        """Reads a bounded amount; returns true if nothing is left to read now."""
        for _ in range(_READS_PER_EVENT):
            unread = self._unread.get(source.stream)
            if unread == 0:
                return True
            room = self._outflow.room
            if not room:
                return False
            try:
                data = os.read(source.read_fd, room if unread is None else min(room, unread))
            except BlockingIOError:
                return True
            except OSError:  # no process has the terminal open
                data = b""
            if not data:
                source.ended = True
                return True
            if unread is not None:
                self._unread[source.stream] = unread - len(data)
            self._outflow.add(source.stream, data)
        return self._unread.get(source.stream) == 0

    # -- the end -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kills all processes of its kernel session."""
        sessions.kill_session(self.pid)

    @property
    def exited(self) -> bool:
        """True once it was reaped: then the kernel may reuse its pid."""
        return self._exit is not None

    @property
    def due_s(self) -> float:
        """Time for the next call of `on_time`."""
        return min(self._deadline_s, self._outflow.due_s)

    def on_time(self, now: float) -> None:
        """Sends gathered output, and kills the process when its time is over."""
        if now >= self._outflow.due_s:
            self._outflow.flush()
            self._go_on()
        if now >= self._deadline_s:
            self._timed_out = True
            self._deadline_s = float("inf")
            self.kill()

    def note_exit(self, status: int, cpu_time_s: float, peak_memory_bytes: int) -> None:
        """Notes that it was reaped. Its end is reported once its output has been read.

        Only the output in its pipes by now counts: a child that prints into them endlessly must not delay the end.
        """
        self._exit = status, cpu_time_s, peak_memory_bytes
        self._unread = {source.stream: _unread_bytes(source) for source in self._sources}
        self._deadline_s = float("inf")
        self._go_on()

    def _go_on(self) -> None:
        """Ends the process if its output is read, else waits for more. In this order, because the first step reads."""
        self._end_if_read()
        self._watch()

    def _end_if_read(self) -> None:
        """Reports the end once it has exited and its pipes are empty."""
        if self._exit is None or self.ended or self._paused:
            return
        for source in self._sources:
            if not source.ended and not self._read(source):
                return  # more is left than may be read now
        self._end(*self._exit)

    def _end(self, status: int, cpu_time_s: float, peak_memory_bytes: int) -> None:
        self.ended = True
        self._outflow.finish()
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        outcome = "timeout" if self._timed_out else "signalled" if signalled else "exited"
        self._channel.send(
            ProcessEnded(
                id=self.process_id,
                outcome=outcome,
                exit_code=128 + signalled if signalled else os.WEXITSTATUS(status),
                signal=signalled,
                wall_time_s=time.monotonic() - self._began_s,
                cpu_time_s=cpu_time_s,
                peak_memory_bytes=peak_memory_bytes,
                output_bytes=self._outflow.total_bytes,
            )
        )
        left = [source for source in self._sources if isinstance(source, Pipe) and not source.ended]
        self._close_sources(left)
        self._owner.on_ended(self, left)

    def _close_sources(self, left: Optional[list[Pipe]] = None) -> None:
        """Closes its descriptors but those in `left`."""
        if self._inflow is not None:
            self._inflow.close()
        for source in self._sources:
            self._loop.watch(source.read_fd, 0, None)
            if source not in (left or ()):
                source.close()
        self._sources = []


def _unread_bytes(source: Source) -> int:
    """Returns the bytes in a pipe; for a terminal an upper bound: the kernel keeps its bytes in two places."""
    if isinstance(source, Terminal):
        return _TERMINAL_BYTES
    import fcntl

    return int(struct.unpack("i", fcntl.ioctl(source.read_fd, _FIONREAD, bytes(4)))[0])


def _offer_to_oom_killer(pid: int) -> None:
    """Makes the kernel kill this process, not the supervisor, when memory runs out."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")
    except OSError:
        pass  # it has ended, or may not be traced
