"""The in-memory guest's end of the channel: numbered frames, kept until the daemon has acknowledged them.

It has the methods of `executor_server.guest.channel.Channel` that the guest's own modules call, so those can be used.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_server.guest import link
from executor_server.guest.channel import OUTBOX_BYTES
from executor_server.guest.frames import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    encode_frame,
    encode_prefix,
)
from executor_server.guest.tokens import CHAIN_LENGTH, chained, is_next

_ACK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class _Kept:
    seq: int
    data: bytes


class _Connection(asyncio.Protocol):
    """One connection; the daemon's once its first frame held the token."""

    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel
        self.decoder = FrameDecoder()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._channel.connections.add(self)
        if self._channel.frozen:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._channel.receive(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._channel.forget(self)


class MemoryChannel:
    """`on_frame` takes each frame of the daemon; `describe` gives READY; `on_room`: what was kept has been taken."""

    def __init__(
        self, secret: bytes, on_frame: Callable[[Frame], None], describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._token = chained(secret, CHAIN_LENGTH)
        self._on_frame = on_frame
        self._describe = describe
        self.on_room: Callable[[], None] = lambda: None
        self.on_new_daemon: Callable[[], None] = lambda: None
        self.connections: set[_Connection] = set()
        self.frozen = False
        self.last_heard_s = time.monotonic()
        self._daemon: _Connection | None = None
        self._daemon_id = ""
        self._seq = 0
        self._taken = 0
        self._acked = 0
        self._unacked: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._unacknowledged_bytes = 0
        self._blobs_sent = 0

    # -- as executor_server.guest.channel.Channel

    @property
    def full(self) -> bool:
        return self._kept_bytes > OUTBOX_BYTES

    @property
    def connected(self) -> bool:
        return self._daemon is not None

    def send(self, kind: int, head: dict[str, Any], body: bytes = b"") -> None:
        self._seq += 1
        data = encode_prefix(kind, head, len(body), seq=self._seq, ack=self._taken) + body
        self._unacked.append(_Kept(self._seq, data))
        self._kept_bytes += len(data)
        self._write(data)

    def send_blob(self, head: dict[str, Any], data: bytes) -> str:
        self._blobs_sent += 1
        blob_id = f"g{self._blobs_sent}"
        for start in range(0, len(data), CHUNK_BYTES):
            self.send(Kind.BLOB_CHUNK, {**head, "blob": blob_id}, data[start : start + CHUNK_BYTES])
        return blob_id

    def send_payload(self, kind: int, head: dict[str, Any], data: bytes) -> None:
        if len(data) <= CHUNK_BYTES:
            self.send(kind, head, data)
        else:
            blob_id = self.send_blob({"id": head["id"]}, data)
            self.send(kind, {**head, "blob": blob_id, "size": len(data)})

    def done(self, op: int, body: bytes = b"", **more: Any) -> None:
        self.send(Kind.DONE, {"op": op, "ok": True, **more}, body)

    def fail(self, op: int, reason: str, message: str, body: bytes = b"") -> None:
        self.send(Kind.DONE, {"op": op, "ok": False, "reason": reason, "message": message[:4000]}, body)

    # -- connections

    def new_connection(self) -> asyncio.Protocol:
        """The guest's protocol for a connection that begins."""
        return _Connection(self)

    def close(self) -> None:
        """Every connection breaks."""
        for connection in list(self.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def freeze(self, frozen: bool) -> None:
        """While it is frozen nothing is taken; what is sent to it waits."""
        self.frozen = frozen
        for connection in self.connections:
            if connection.transport is not None:
                (connection.transport.pause_reading if frozen else connection.transport.resume_reading)()
        self.last_heard_s = time.monotonic()

    def forget(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        if connection is self._daemon:
            self._daemon = None

    def receive(self, connection: _Connection, data: bytes) -> None:
        try:
            for frame in connection.decoder.feed(data):
                self._take(connection, frame)
        except FrameError:
            if connection.transport is not None:
                connection.transport.abort()
            return
        self._unacknowledged_bytes += len(data)
        if self._unacknowledged_bytes > _ACK_BYTES:
            self._say(Kind.ACK)

    def _take(self, connection: _Connection, frame: Frame) -> None:
        if connection is not self._daemon:
            self._greet(connection, frame)
            return
        self.last_heard_s = time.monotonic()
        self._acknowledge(frame.ack)
        if frame.kind == Kind.PING:
            self._say(Kind.PONG)
        elif frame.kind != Kind.ACK and frame.seq > self._taken:
            if frame.seq != self._taken + 1:
                raise FrameError(f"frame {frame.seq} came after frame {self._taken}")
            self._taken = frame.seq
            self._on_frame(frame)

    def _greet(self, connection: _Connection, hello: Frame) -> None:
        """The newest connection that shows the token is the daemon's. Raises FrameError for any other."""
        token = bytes.fromhex(hello.head.text("token", 256)) if hello.kind == Kind.HELLO else b""
        if not is_next(token, self._token) or hello.head.integer("protocol") != PROTOCOL_VERSION:
            raise FrameError("not the daemon of this guest")
        last_seq, daemon_id = hello.head.integer("last_seq", 0, self._seq), hello.head.text("daemon", 64)
        self._token = token
        before, self._daemon = self._daemon, connection
        if before is not None and before.transport is not None:
            before.transport.abort()
        self.last_heard_s = time.monotonic()
        self._acknowledge(last_seq)
        if daemon_id != self._daemon_id:
            self._daemon_id = daemon_id
            self.on_new_daemon()
        self._write(encode_frame(Kind.READY, {**self._describe(), "last_seq": self._taken, "acked": self._acked}))
        for kept in self._unacked:
            self._write(kept.data)

    def _acknowledge(self, seq: int) -> None:
        was_full = self.full
        while self._unacked and self._unacked[0].seq <= seq:
            kept = self._unacked.popleft()
            self._acked = kept.seq
            self._kept_bytes -= len(kept.data)
        if was_full and not self.full:
            self.on_room()

    def _say(self, kind: int) -> None:
        self._unacknowledged_bytes = 0
        self._write(encode_frame(kind, {}, ack=self._taken))

    def _write(self, data: bytes) -> None:
        if self._daemon is not None and self._daemon.transport is not None:
            self._daemon.transport.write(data)


def read_file(fd: int) -> bytes:
    """All of a sealed memory file, which is closed."""
    return link.read_memfd(fd, os.fstat(fd).st_size)
