"""Cuts the output of an execution to its limit, keeping head and tail, and decodes it.

The first half of the limit goes out as it comes. Of what follows, the last half is kept in a ring, and given out at the
end after a note of how much was left out between.
"""

from __future__ import annotations

import codecs

from .lean import deque

# Past so many times its limit a program is not talkative but broken, and is stopped.
STOP_FACTOR = 16
# Pieces of the tail; neighbours of one stream are joined up to this size, so that tiny writes cost no more than text.
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
        """Takes bytes of a stream; returns the part of them to give out now."""
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
        """The tail, to be given out at the end (after a note, when `omitted_bytes` is not 0)."""
        tail = [(stream, bytes(data)) for stream, data in self._tail]
        self._tail.clear()
        self._tail_bytes = 0
        return tail


class StreamDecoder:
    """UTF-8 to text for each stream, whatever the pieces are; what is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("replace") for name in ("stdout", "stderr")}

    def decode(self, stream: str, data: bytes) -> str:
        return self._decoders[stream].decode(data)

    def reset(self) -> list[tuple[str, str]]:
        """What an incomplete character at the end of each stream becomes."""
        return [(name, decoder.decode(b"", True)) for name, decoder in self._decoders.items()]
