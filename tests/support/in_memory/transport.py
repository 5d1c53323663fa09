"""A connection between two protocols of one event loop: what one writes, the other receives in a later turn of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

_DEFAULT_HIGH_BYTES = 64 * 1024
# Bytes that one call of data_received gets at most, as from a socket.
_READ_BYTES = 256 * 1024


class MemoryTransport(asyncio.Transport):
    """One end. Bytes wait at the receiving end while its protocol has paused reading; then the sender is paused, too."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._peer: MemoryTransport | None = None
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._reading = True
        self._scheduled = False
        self._closing = False
        self._high_bytes = _DEFAULT_HIGH_BYTES
        self._holds_writer = False

    # -- receiving

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._schedule()

    def _receive(self, data: bytes) -> None:
        self._inbox.append(data)
        self._inbox_bytes += len(data)
        self._schedule()

    def _schedule(self) -> None:
        if self._inbox and self.is_reading() and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if not self._inbox or not self.is_reading():
            return
        data = self._inbox.popleft()
        if len(data) > _READ_BYTES:
            self._inbox.appendleft(data[_READ_BYTES:])
            data = data[:_READ_BYTES]
        self._inbox_bytes -= len(data)
        if self._peer is not None:
            self._peer._update_writing()
        self._protocol.data_received(data)
        self._schedule()

    # -- sending

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and self._peer is not None and not self._closing:
            self._peer._receive(bytes(data))
            self._update_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = _DEFAULT_HIGH_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._peer._inbox_bytes if self._peer is not None else 0

    def _update_writing(self) -> None:
        """Pauses its protocol's writing while too much waits at the other end, and resumes it."""
        waits = self.get_write_buffer_size()
        if not self._holds_writer and waits > self._high_bytes:
            self._holds_writer = True
            self._protocol.pause_writing()
        elif self._holds_writer and waits <= self._high_bytes // 4:
            self._holds_writer = False
            self._protocol.resume_writing()

    # -- ending

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Ends both ends: what was not received yet is lost, as with a connection that is reset."""
        peer, self._peer = self._peer, None
        if self._closing:
            return
        self._closing = True
        self._inbox.clear()
        self._loop.call_soon(self._protocol.connection_lost, None)
        if peer is not None:
            peer._peer = None
            peer.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def connect(make_protocol: Callable[[], asyncio.Protocol], other: asyncio.Protocol) -> None:
    """Connects a new protocol to `other`; both have had `connection_made` when it returns."""
    protocol = make_protocol()
    ours, theirs = MemoryTransport(protocol), MemoryTransport(other)
    ours._peer, theirs._peer = theirs, ours
    other.connection_made(theirs)
    protocol.connection_made(ours)
