"""Cuts the output of an execution to its limit, keeping head and tail, and decodes it.

The first half of the limit is sent as it comes. Of the rest, a ring keeps the last half, which is sent at the end,
after the number of bytes left out between.
"""

from __future__ import annotations

import codecs

from ..wire.lean import deque

# Multiple of its limit at which a program is stopped: it prints without end.
STOP_FACTOR = 16
# Pieces of the tail, and the bytes up to which neighbours of one stream are joined: tiny writes cost no more than text.
_MAX_PIECES = 4096
_JOIN_BYTES = 4096


class OutputCutter:
    """Counts and cuts the bytes of both streams together, in order of arrival."""

    def __init__(self, limit_bytes: int) -> None:
        self.total_bytes = 0
        self.omitted_bytes = 0
        self._stop_bytes = limit_bytes * STOP_FACTOR
        self._head_left = limit_bytes // 2
        self._tail_limit = limit_bytes - self._head_left
        self._tail: deque[tuple[str, bytearray]] = deque()
        self._tail_bytes = 0

    @property
    def flooded(self) -> bool:
        return self.total_bytes > self._stop_bytes

    def feed(self, stream: str, data: bytes) -> bytes:
        """Counts bytes of a stream; returns the part of them to send now."""
        self.total_bytes += len(data)
        now = data[: self._head_left]
        self._head_left -= len(now)
        rest = data[len(now) :]
        if rest:
            self._keep(stream, rest)
        return now

    def _keep(self, stream: str, data: bytes) -> None:
        if self._tail and self._tail[-1][0] == stream and len(self._tail[-1][1]) < _JOIN_BYTES:
            self._tail[-1][1].extend(data)
        else:
            self._tail.append((stream, bytearray(data)))
        self._tail_bytes += len(data)
        while self._tail_bytes > self._tail_limit or len(self._tail) > _MAX_PIECES:
            _, oldest = self._tail[0]
            excess = self._tail_bytes - self._tail_limit
            dropped = excess if 0 < excess < len(oldest) else len(oldest)
            if dropped == len(oldest):
                self._tail.popleft()
            else:
                del oldest[:dropped]
            self._tail_bytes -= dropped
            self.omitted_bytes += dropped

    def drain(self) -> list[tuple[str, bytes]]:
        """Returns the tail, and forgets it."""
        tail = [(stream, bytes(data)) for stream, data in self._tail]
        self._tail.clear()
        self._tail_bytes = 0
        return tail


class StreamDecoder:
    """Decodes the UTF-8 of each stream, wherever it is cut; other bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}  # made when a stream begins: most runs print nothing

    def decode(self, stream: str, data: bytes) -> str:
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(data)

    def reset(self) -> list[tuple[str, str]]:
        """Returns the replacement of an incomplete character at the end of each stream."""
        return [(name, decoder.decode(b"", True)) for name, decoder in self._decoders.items()]
