"""A tunnel: bytes of each side are copied to the other one, counted, with back-pressure, until both have ended.

Theory of operation. Each direction is a pump. It reads from its source only while its sink has taken all that was read
before, so a direction holds one chunk at most (a small one if many directions hold one), and a peer that does not read
stops the other one through TCP itself.
All pumps read into one buffer: a chunk that is sent at once is never kept, and idle tunnels have no memory of their
own. The loop calls a pump once an iteration, for one chunk, so a quick transfer can't starve the others.

The end of one side is passed on as the end of the other side's stream, and the other direction goes on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Callable, Optional

from . import reasons
from .endpoint import CHUNK_BYTES
from .first_bytes import FirstBytes
from .protocols import Limits
from .refusals import Ended, Refusal

if TYPE_CHECKING:
    from .connection import Connection

_BUFFER = bytearray(CHUNK_BYTES)
_VIEW = memoryview(_BUFFER)
# Bytes to read at once while all pumps together hold more than Limits.held_bytes: a chunk for each of ten thousand
# tunnels whose clients do not read would be a gigabyte.
_SMALL_CHUNK_BYTES = 4096


class _Held:
    """Bytes that the pumps of this process have read and not sent."""

    bytes = 0


class Splice:
    """Owns the readers and writers on both sockets while it runs; the sockets stay the caller's."""

    def __init__(
        self,
        client: socket.socket,
        upstream: socket.socket,
        meter: Connection,
        first_bytes: Optional[FirstBytes],
        limits: Limits,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.limits = limits
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._up = _Pump(self, client, upstream, meter, meter.send_room, meter.count_sent)
        self._down = _Pump(self, upstream, client, meter, meter.receive_room, meter.count_received)
        self._up.first_bytes = self._down.answers = first_bytes
        self.over = False
        self._head_timer: Optional[asyncio.TimerHandle] = None
        self._half_closed_timer: Optional[asyncio.TimerHandle] = None
        self._moved_before = 0

    async def run(self, buffered: bytes) -> None:
        """Returns when both sides have ended. Raises Ended, and Refusal for the client's first bytes."""
        try:
            if self._up.first_bytes is not None and self._up.first_bytes.required:
                self.expect_first_bytes()
            self._down.start()
            self._up.start(buffered)
            await self._done
        finally:
            self._stop()

    def _stop(self) -> None:
        self.over = True
        self._up.stop()
        self._down.stop()
        for timer in (self._head_timer, self._half_closed_timer):
            if timer is not None:
                timer.cancel()

    # Called by the pumps.

    def end(self, error: Exception) -> None:
        """Ends both directions now, and not when `run` resumes: no byte may pass behind one that was refused."""
        if not self._done.done():
            self._stop()
            self._done.set_exception(error)

    def expect_first_bytes(self) -> None:
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(self.limits.head_s, self._end_late)

    def _end_late(self) -> None:
        if self._up.moved:
            message = "the connection was closed: its first bytes were not complete in time"
            self.end(Refusal(reasons.HEAD_TIMEOUT, message))
        else:
            self.end(Ended(reasons.HEAD_TIMEOUT))

    def passed_first_bytes(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def side_ended(self) -> None:
        if self._done.done():
            return
        if self._up.ended and self._down.ended:
            self._done.set_result(None)
        else:
            self._moved_before = self._up.moved + self._down.moved
            self._half_closed_timer = self._loop.call_later(self.limits.half_closed_s, self._check_half_closed)

    def _check_half_closed(self) -> None:
        """A tunnel with one ended side may stay silent only this long, or a flood of such tunnels would stay."""
        moved = self._up.moved + self._down.moved
        if moved == self._moved_before:
            self.end(Ended(reasons.ENDED))
            return
        self._moved_before = moved
        self._half_closed_timer = self._loop.call_later(self.limits.half_closed_s, self._check_half_closed)


class _Pump:
    """One direction. At any time it waits for its source or for its sink, or it has ended."""

    __slots__ = (
        "_count", "_held_bytes", "_is_undecided", "_loop", "_meter", "_pending", "_reading", "_room", "_sink",
        "_sink_fd", "_source", "_source_ended", "_source_fd", "_splice", "_writing", "answers", "ended", "first_bytes",
        "moved",
    )  # fmt: skip

    def __init__(
        self,
        splice: Splice,
        source: socket.socket,
        sink: socket.socket,
        meter: Connection,
        room: Callable[[], int],
        count: Callable[[int], None],
    ) -> None:
        self._splice = splice
        self._source, self._source_fd = source, source.fileno()
        self._sink, self._sink_fd = sink, sink.fileno()
        self._meter = meter
        self._held_bytes = splice.limits.held_bytes
        self._room = room
        self._count = count
        self._loop = asyncio.get_running_loop()
        self._pending = b""  # read, and not yet taken by the sink
        self._reading = self._writing = self._source_ended = False
        self._is_undecided = False  # the pending bytes wait for the rest of a ClientHello
        self.first_bytes: Optional[FirstBytes] = None  # reads what the client sends
        self.answers: Optional[FirstBytes] = None  # reads what the server sends
        self.moved = 0
        self.ended = False

    def start(self, buffered: bytes = b"") -> None:
        if buffered:
            self._take(memoryview(buffered))
        self._go_on()

    def stop(self) -> None:
        self._read(False)
        self._write(False)
        self._meter.forget(self._go_on)
        self._keep(b"")

    def _go_on(self) -> None:
        """Starts to wait for the source or the sink, whichever is next."""
        if self._splice.over:
            return
        if self._source_ended and self.first_bytes is not None:
            if self._is_undecided:  # it ended within its ClientHello, whose beginning is dropped
                self._keep(b"")
            self.first_bytes, self._is_undecided = None, False
            self._splice.passed_first_bytes()
        holds_back = bool(self._pending) and not self._is_undecided
        self._write(holds_back)
        self._read(not holds_back and not self._source_ended)
        if self._source_ended and not holds_back and not self.ended:
            self._pass_end_on()

    def _readable(self) -> None:
        if self._meter.share.is_spent:
            return  # the loop calls again in its next turn
        since = time.perf_counter()
        try:
            self._read_some()
        finally:
            self._meter.share.charge(since)

    def _read_some(self) -> None:
        try:
            size = self._room()
            if not size:  # the session's window is shut; whatever is unread stays with its sender
                self._read(False)
                self._meter.call_when_open(self._go_on)
                return
            if _Held.bytes > self._held_bytes or self.first_bytes is not None:
                size = min(size, _SMALL_CHUNK_BYTES)
            count = self._source.recv_into(_BUFFER, size)
        except Ended as ended:
            self._splice.end(ended)
            return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._splice.end(Ended(reasons.BROKEN))
            return
        if count:
            self._take(_VIEW[:count])
            if not self._pending:
                return  # the usual case: sent, and the reader stays
        else:
            self._source_ended = True
        self._go_on()

    def _take(self, data: memoryview) -> None:
        self.moved += len(data)
        self._count(len(data))
        if self.answers is not None:
            self.answers.feed_answer(bytes(data))
            if self.answers.done:
                self.answers = None
        if self.first_bytes is not None:
            self._keep(self._pending + data)
            try:
                self._is_undecided = not (self.first_bytes.done or self.first_bytes.feed(bytes(data)))
            except Refusal as refusal:
                self._splice.end(refusal)
                return
            if self._is_undecided:
                self._splice.expect_first_bytes()
                return
            self._splice.passed_first_bytes()
            if self.first_bytes.done:
                self.first_bytes = None
            data = memoryview(self._pending)
            self._keep(b"")
        self._send(data)

    def _send(self, data: memoryview) -> None:
        try:
            sent = self._sink.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._splice.end(Ended(reasons.BROKEN))
            return
        self._keep(bytes(data[sent:]) if sent < len(data) else b"")

    def _keep(self, data: bytes) -> None:
        _Held.bytes += len(data) - len(self._pending)
        self._pending = data

    def _writable(self) -> None:
        self._send(memoryview(self._pending))
        if not self._pending:
            self._go_on()

    def _pass_end_on(self) -> None:
        self.ended = True
        try:
            self._sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._splice.end(Ended(reasons.BROKEN))
        self._splice.side_ended()

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._source_fd, self._readable)
            else:
                self._loop.remove_reader(self._source_fd)

    def _write(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._sink_fd, self._writable)
            else:
                self._loop.remove_writer(self._sink_fd)
