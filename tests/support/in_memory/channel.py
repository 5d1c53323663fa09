"""The in-memory guest's end of the channel: numbered frames, kept until the daemon has acknowledged them.

It has the methods of `executor_server.guest.wire.guest_channel.Channel` that the guest's own modules call, so those can be used.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from executor_server.guest.wire import link
from executor_server.guest.wire.frames import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Frame,
    FrameDecoder,
    FrameError,
    encode_frame,
)
from executor_server.guest.wire.messages import Ack, BlobChunk, Done, Hello, Image, Ping, Pong, Ready, ToolCall
from executor_server.guest.wire.schema import Message
from executor_server.guest.wire.sequenced import Sequenced
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained, is_next


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

    def __init__(self, secret: bytes, on_frame: Callable[[Frame], None], describe: Callable[[int, int], Ready]) -> None:
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
        self._window = Sequenced()
        self._blobs_sent = 0

    # -- as executor_server.guest.wire.guest_channel.Channel

    @property
    def full(self) -> bool:
        return self._window.full

    @property
    def connected(self) -> bool:
        return self._daemon is not None

    def send(self, message: Message, body: bytes = b"") -> None:
        self._window.send(message.kind, message.head(), body)
        self._flush()

    def send_blob(self, data: bytes, *, execution_id: str | None = None, op: int | None = None) -> str:
        self._blobs_sent += 1
        blob_id = f"g{self._blobs_sent}"
        for start in range(0, len(data), CHUNK_BYTES):
            self.send(BlobChunk(id=execution_id, op=op, blob=blob_id), data[start : start + CHUNK_BYTES])
        return blob_id

    def send_payload(self, message: Image | ToolCall, data: bytes) -> None:
        if len(data) <= CHUNK_BYTES:
            self.send(message, data)
        else:
            self.send(message.but(blob=self.send_blob(data, execution_id=message.id), size=len(data)))

    def done(self, op: int, body: bytes = b"", **more: Any) -> None:
        self.send(Done(op=op, ok=True, **more), body)

    def fail(self, op: int, reason: str, message: str, body: bytes = b"") -> None:
        self.send(Done(op=op, ok=False, reason=reason, message=message[:4000]), body)

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
        if self._window.note_received(len(data)):
            self._say(Ack())

    def _take(self, connection: _Connection, frame: Frame) -> None:
        if connection is not self._daemon:
            self._greet(connection, frame)
            return
        self.last_heard_s = time.monotonic()
        self._make_room(lambda: self._window.acknowledge(frame.ack))
        if frame.kind == Ping.kind:
            self._say(Pong())
        elif frame.kind != Ack.kind and self._window.accept(frame.seq):
            self._on_frame(frame)

    def _greet(self, connection: _Connection, hello: Frame) -> None:
        """The newest connection that shows the token is the daemon's. Raises FrameError for any other."""
        greeting = Hello.read(hello.head)
        token = bytes.fromhex(greeting.token) if hello.kind == Hello.kind else b""
        if not is_next(token, self._token) or greeting.protocol != PROTOCOL_VERSION:
            raise FrameError("not the daemon of this guest")
        self._make_room(lambda: self._window.reconnect(greeting.last_seq))
        self._token = token
        before, self._daemon = self._daemon, connection
        if before is not None and before.transport is not None:
            before.transport.abort()
        self.last_heard_s = time.monotonic()
        if greeting.daemon != self._daemon_id:
            self._daemon_id = greeting.daemon
            self.on_new_daemon()
        ready = self._describe(self._window.taken, self._window.acked)
        self._write(encode_frame(ready.kind, ready.head()))
        self._flush()

    def _make_room(self, acknowledge: Callable[[], object]) -> None:
        was_full = self.full
        acknowledge()
        if was_full and not self.full:
            self.on_room()

    def _say(self, message: Message) -> None:
        self._write(self._window.unnumbered(message.kind, message.head()))

    def _flush(self) -> None:
        while self.connected and (frame := self._window.next_frame()) is not None:
            self._write(frame.prefix + frame.body)

    def _write(self, data: bytes) -> None:
        if self._daemon is not None and self._daemon.transport is not None:
            self._daemon.transport.write(data)


def read_file(fd: int) -> bytes:
    """All of a sealed memory file, which is closed."""
    return link.read_memfd(fd, os.fstat(fd).st_size)
