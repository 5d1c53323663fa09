"""Carries the output of a run to the daemon: cut to its limit, decoded, and in pieces worth a frame.

The first piece goes out at once; what follows within a few milliseconds goes together.
"""

from __future__ import annotations

import time

from .channel import Channel
from .frames import CHUNK_BYTES, Kind
from .offline import says_offline
from .output import OutputCutter, StreamDecoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

_COALESCE_S = 0.005
# Bytes of the output in which a hint is looked for that the network is missed.
_SCANNED_BYTES = 256 * 1024
# Around output that is not the run's own.
BACKGROUND_BEGIN = "[background output of earlier steps]"
BACKGROUND_END = "[end of background output]"
# At most 4 bytes each in UTF-8, so a piece is never larger than a chunk.
_LOG_CHARS = CHUNK_BYTES // 4


class LogRelay:
    """The output of one run."""

    def __init__(self, channel: Channel, execution_id: str, limit_bytes: int) -> None:
        self._channel = channel
        self._execution_id = execution_id
        self._cutter = OutputCutter(limit_bytes)
        self._decoder = StreamDecoder()
        self._pending: list[tuple[str, bytes]] = []
        self._last_sent = 0.0
        self._background_bytes = 0
        self._unscanned_bytes = _SCANNED_BYTES
        self.offline = False  # the program, or a child of it, has printed that it could not reach something
        self._lines_open: set[str] = set()  # streams whose last line has no end yet
        self.due: Optional[float] = None  # when `flush` should be called

    @property
    def total_bytes(self) -> int:
        return self._cutter.total_bytes + self._background_bytes

    @property
    def flooded(self) -> bool:
        return self._cutter.flooded

    def add(self, stream: str, data: bytes) -> None:
        if self._unscanned_bytes > 0 and not self.offline:
            self._unscanned_bytes -= len(data)
            self.offline = says_offline(data)
        now = self._cutter.feed(stream, data)
        if now and self._execution_id:
            self._pending.append((stream, now))
            if self.due is None:
                self.due = max(time.monotonic(), self._last_sent + _COALESCE_S)

    def flush(self) -> None:
        """Sends what waits, neighbours of one stream joined."""
        self.due = None
        pending, self._pending = self._pending, []
        if not pending:
            return
        self._last_sent = time.monotonic()
        start = 0
        for index in range(1, len(pending) + 1):
            if index == len(pending) or pending[index][0] != pending[start][0]:
                stream = pending[start][0]
                self.say(stream, self._decoder.decode(stream, b"".join(data for _, data in pending[start:index])))
                start = index

    def finish(self) -> None:
        """Sends the rest: what waits, then the tail after a note of what was left out before it."""
        self.flush()
        if not self._execution_id:
            return
        tail = self._cutter.drain()
        if self._cutter.omitted_bytes:
            self._decoder = StreamDecoder()
            head = {"id": self._execution_id, "omitted": self._cutter.omitted_bytes}
            self._channel.send(Kind.OUTPUT_CUT, head)
        for stream, data in tail:
            self.say(stream, self._decoder.decode(stream, data))
        for stream, text in self._decoder.reset():
            self.say(stream, text)

    def say_background(self, stream: str, data: bytes, total_bytes: int) -> None:
        """Sends what processes of earlier runs printed, between two lines that say so; charged as this run's own."""
        self._background_bytes += total_bytes
        before = "\n" if stream in self._lines_open else ""
        text = data.decode("utf-8", "replace")
        after = "" if text.endswith("\n") else "\n"
        self.say(stream, f"{before}{BACKGROUND_BEGIN}\n{text}{after}{BACKGROUND_END}\n")

    def say(self, stream: str, text: str) -> None:
        """Sends a text as it is."""
        if text:
            (self._lines_open.discard if text.endswith("\n") else self._lines_open.add)(stream)
        for start in range(0, len(text), _LOG_CHARS):
            data = text[start : start + _LOG_CHARS].encode("utf-8", "replace")  # a notice may hold lone surrogates
            self._channel.send(Kind.LOG, {"id": self._execution_id, "stream": stream}, data)
