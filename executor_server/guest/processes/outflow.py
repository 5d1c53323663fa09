"""The output of one process on its way to the daemon: joined into frames, sent as far as granted, cut past its limit.

The first piece is sent at once, so that a terminal responds at once. Pieces that follow within milliseconds are joined:
a frame costs as much as copying some hundred kilobytes.
"""

from __future__ import annotations

import time

from ..wire.frames import CHUNK_BYTES
from ..wire.lean import deque
from ..wire.process_messages import OUTPUT_OVERHEAD_BYTES, TAIL_BYTES, ProcessOutput, ProcessOutputCut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wire.guest_channel import Channel


# Seconds after a frame in which further output is gathered; fewer after a small frame, such as the echo of a key.
_JOIN_TIME_S = 0.003
_SHORT_JOIN_TIME_S = 0.0003
_SMALL_BYTES = 4096


class Outflow:
    """Counts the written and the sent bytes. `granted` is the total cost that the daemon has allowed."""

    def __init__(self, channel: Channel, process_id: str, limit_bytes: int, granted: int) -> None:
        self._channel = channel
        self._process_id = process_id
        self._limit_bytes = limit_bytes
        self._sent_bytes = 0
        self._cost_bytes = 0
        self._pending: list[bytes] = []  # unsent pieces of one stream
        self._pending_stream = ""
        self._pending_bytes = 0
        self._last_sent_s = 0.0
        self._join_time_s = 0.0
        self.due_s = float("inf")  # when to call `flush`
        self._tail: deque[tuple[str, bytes]] = deque()
        self._tail_bytes = 0
        self.granted = granted
        self.total_bytes = 0

    @property
    def room(self) -> int:
        """Bytes that may be read now; 0 while the daemon has no room. Output past the limit is read and not sent."""
        sent_bytes = self._sent_bytes + self._pending_bytes
        if sent_bytes >= self._limit_bytes:
            return CHUNK_BYTES
        # Two frames: the pending pieces, and the next read if it is from the other stream.
        granted = self.granted - self._cost_bytes - self._pending_bytes - 2 * OUTPUT_OVERHEAD_BYTES
        return max(0, min(CHUNK_BYTES - self._pending_bytes, granted, self._limit_bytes - sent_bytes))

    def add(self, stream: str, data: bytes) -> None:
        """Sends a piece of at most `room` bytes, or keeps it as part of the tail."""
        self.total_bytes += len(data)
        if self._sent_bytes + self._pending_bytes < self._limit_bytes:
            if stream != self._pending_stream:
                self.flush()
            self._pending_stream = stream
            self._pending.append(data)
            self._pending_bytes += len(data)
            self.due_s = self._last_sent_s + self._join_time_s
            if self._pending_bytes >= CHUNK_BYTES or time.monotonic() >= self.due_s:
                self.flush()
            return
        data = data[OUTPUT_OVERHEAD_BYTES - TAIL_BYTES :]
        self._tail.append((stream, data))
        self._tail_bytes += len(data)
        while self._tail_bytes + len(self._tail) * OUTPUT_OVERHEAD_BYTES > TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft()[1])

    def flush(self) -> None:
        """Sends the gathered pieces."""
        self.due_s = float("inf")
        if self._pending:
            data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
            self._last_sent_s = time.monotonic()
            self._join_time_s = _JOIN_TIME_S if len(data) > _SMALL_BYTES else _SHORT_JOIN_TIME_S
            self._send(self._pending_stream, data)

    def finish(self) -> None:
        """Sends the gathered pieces, the number of omitted bytes, and the tail."""
        self.flush()
        omitted = self.total_bytes - self._sent_bytes - self._tail_bytes
        if omitted:
            self._channel.send(ProcessOutputCut(id=self._process_id, omitted=omitted))
        for stream, data in self._tail:
            self._send(stream, data)
        self._tail.clear()
        self._tail_bytes = 0

    def _send(self, stream: str, data: bytes) -> None:
        self._sent_bytes += len(data)
        self._cost_bytes += len(data) + OUTPUT_OVERHEAD_BYTES
        self._channel.send(ProcessOutput(id=self._process_id, stream=stream), data)
