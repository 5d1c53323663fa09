"""The output of one process on its way to the daemon: as far as it is granted, cut past its limit."""

from __future__ import annotations

from ..wire.frames import CHUNK_BYTES
from ..wire.lean import deque
from ..wire.messages import OUTPUT_OVERHEAD_BYTES, TAIL_BYTES, ProcessOutput, ProcessOutputCut

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wire.channel import Channel


class Outflow:
    """Counts what was written and what was sent. `granted` is the cost that the daemon has room for."""

    def __init__(self, channel: Channel, process_id: str, limit_bytes: int, granted: int) -> None:
        self._channel = channel
        self._process_id = process_id
        self._limit_bytes = limit_bytes
        self._sent_bytes = 0
        self._cost_bytes = 0
        self._tail: deque[tuple[str, bytes]] = deque()
        self._tail_bytes = 0
        self.granted = granted
        self.total_bytes = 0

    @property
    def room(self) -> int:
        """Bytes that may be read now: 0 while the daemon has no room. Past the limit nothing is sent any more."""
        if self._sent_bytes >= self._limit_bytes:
            return CHUNK_BYTES
        granted = self.granted - self._cost_bytes - OUTPUT_OVERHEAD_BYTES
        return max(0, min(CHUNK_BYTES, granted, self._limit_bytes - self._sent_bytes))

    def add(self, stream: str, data: bytes) -> None:
        """Sends what was read, at most `room` bytes, or keeps it as a part of the tail."""
        self.total_bytes += len(data)
        if self._sent_bytes < self._limit_bytes:
            self._send(stream, data)
            return
        data = data[OUTPUT_OVERHEAD_BYTES - TAIL_BYTES :]
        self._tail.append((stream, data))
        self._tail_bytes += len(data)
        while self._tail_bytes + len(self._tail) * OUTPUT_OVERHEAD_BYTES > TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft()[1])

    def finish(self) -> None:
        """Sends how much was left out, and what came after it."""
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
