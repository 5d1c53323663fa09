"""A guest without a sandbox: it speaks frames over a Unix socket, and says what the test has it say.

Left alone it behaves: it greets, answers every operation with DONE, numbers its frames, and after a new connection
sends again what the daemon has not taken. A test makes it misbehave by `on` (what it does with a frame of a kind) and
by `say` and `write_raw` (what it says unasked).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor_server.backends.channel.endpoint import SocketEndpoint
from executor_server.guest.wire.frames import PROTOCOL_VERSION, Frame, FrameDecoder, Kind, encode_frame
from executor_server.guest.wire.sequenced import Sequenced
from tests.support.polling import eventually_async

TOKEN = bytes(range(32))
USAGE = {"operations": 1, "wall_time_s": 0.5, "cpu_time_s": 0.25, "peak_memory_bytes": 1, "output_bytes": 0}

# Turns of the event loop from a connection that is accepted until its protocol knows it.
_TURNS_TO_ACCEPT = 3


class _Connection(asyncio.Protocol):
    def __init__(self, guest: FakeGuest) -> None:
        self._guest = guest
        self._decoder = FrameDecoder()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._guest.connections.append(self)
        if self._guest.frozen:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._guest.take(self, frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None


class Network:
    """A way to a fake guest that breaks by itself. It leads nowhere while `up` is not set."""

    breaks_by_itself = True
    socket_path = None
    reconnects_max = 1000
    connections_max = 256

    def __init__(self, guest: FakeGuest) -> None:
        self._endpoint = guest.endpoint
        self.token = guest.endpoint.token
        self.reconnect_s = 10.0
        self.up = asyncio.Event()
        self.up.set()

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        await self.up.wait()
        await self._endpoint.open(make_protocol)


class FakeGuest:
    """One guest; at most its newest connection is spoken to."""

    def __init__(self, socket_path: Path) -> None:
        self.endpoint = SocketEndpoint(socket_path, TOKEN)
        self.ready: dict[str, Any] | None = {"protocol": PROTOCOL_VERSION, "python": "3.11.0", "generation": 1}
        self.on: dict[int, Callable[[Frame], object]] = {}
        self.received: list[Frame] = []
        self.connections: list[_Connection] = []
        self.window = Sequenced()
        self._server: asyncio.Server | None = None
        self.network: Network | None = None  # the network that leads to it; None when it is on this host
        self.frozen = False
        self.egress_listener: socket.socket | None = None  # handed out to a daemon that asks for it

    async def start(self) -> None:
        """A caller that is cancelled meanwhile has to call `die`, which finds the listener."""
        path, loop = self.endpoint.socket_path, asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), path, start_serving=False)
        await self._server.start_serving()

    async def die(self) -> None:
        """Closes the listener and breaks the connection. Idempotent."""
        if self._server is not None:
            server, self._server = self._server, None
            # asyncio drops a connection that it has accepted, unclosed, when its server closes before the protocol knows
            # it (https://github.com/python/cpython/issues/109564). A pool that ends a creation comes in between.
            asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
            try:
                for _ in range(_TURNS_TO_ACCEPT):
                    await asyncio.sleep(0)
            finally:
                server.close()
        self.hang_up()
        await eventually_async(lambda: all(connection.transport is None for connection in self.connections))

    def hang_up(self) -> None:
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.abort()

    def hang_up_on_newest(self) -> None:
        """Breaks the newest connection, which may be none for frames."""
        newest = self.connections.pop()
        assert newest.transport is not None
        newest.transport.abort()

    def freeze(self) -> None:
        """It stands still: what comes waits, and it says nothing."""
        self.frozen = True
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.pause_reading()

    def thaw(self) -> None:
        """It goes on."""
        self.frozen = False
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.resume_reading()
        self._flush()

    # -- speaking

    def say(self, kind: int, head: dict[str, Any], body: bytes = b"") -> None:
        """Sends a numbered frame, or keeps it for the next connection."""
        self.window.send(kind, head, body)
        self._flush()

    def _flush(self) -> None:
        """Writes what the newest connection has not carried yet, unless it stands still."""
        if self.connections and self.connections[-1].transport is not None and not self.frozen:
            while (frame := self.window.next_frame()) is not None:
                self.write_raw(frame.prefix + frame.body)

    def write_raw(self, data: bytes) -> None:
        if self.connections and self.connections[-1].transport is not None and not self.frozen:
            self.connections[-1].transport.write(data)

    def log(self, execution_id: str, text: str) -> None:
        self.say(Kind.LOG, {"id": execution_id, "stream": "stdout"}, text.encode())

    def end(self, execution_id: str, **more: Any) -> None:
        head = {
            "id": execution_id,
            "outcome": "succeeded",
            "variables": "kept",
            "generation": 1,
            "final": "",
            "error": 0,
        }
        self.say(Kind.RESULT, {**head, **USAGE, **more})

    def done(self, frame: Frame, body: bytes = b"", **more: Any) -> None:
        self.say(Kind.DONE, {"op": frame.head.integer("op"), "ok": True, **more}, body)

    def refuse(self, frame: Frame, reason: str, message: str = "no") -> None:
        self.say(Kind.DONE, {"op": frame.head.integer("op"), "ok": False, "reason": reason, "message": message})

    # -- listening

    def take(self, connection: _Connection, frame: Frame) -> None:
        self.window.acknowledge(frame.ack)
        if frame.seq and not self.window.accept(frame.seq):
            return  # sent again after a new connection
        self.received.append(frame)
        if frame.kind in self.on:
            self.on[frame.kind](frame)
        elif frame.kind == Kind.HELLO:
            self.greet(frame)
        elif frame.kind == Kind.TAKE_LISTENER:
            self._hand_out_listener(connection)
        elif frame.kind == Kind.PING:
            self.write_raw(self.window.unnumbered(Kind.PONG, {}))
        elif frame.kind == Kind.FIND_MODULES:
            self.done(frame, b"[]")
        elif frame.kind in (Kind.CONFIGURE, Kind.RESTRICT, Kind.REGISTER_TOOLS, Kind.SET_VARIABLES, Kind.BLOB_BEGIN):
            self.done(frame)

    def greet(self, hello: Frame) -> None:
        """Answers a new connection."""
        if self.ready is not None:
            self.window.reconnect(hello.head.integer("last_seq"))
            ready = {"last_seq": self.window.taken, "acked": self.window.acked, **self.ready}
            self.write_raw(encode_frame(Kind.READY, ready))
            self._flush()

    def _hand_out_listener(self, connection: _Connection) -> None:
        """Answers on a connection that is none for frames, and closes it."""
        self.connections.remove(connection)
        assert connection.transport is not None
        if self.egress_listener is not None:
            with socket.socket(fileno=os.dup(connection.transport.get_extra_info("socket").fileno())) as own:
                socket.send_fds(own, [encode_frame(Kind.LISTENER, {})], [self.egress_listener.fileno()])
        connection.transport.abort()

    def of_kind(self, kind: int) -> list[Frame]:
        return [frame for frame in self.received if frame.kind == kind]

    async def got(self, kind: int, count: int = 1) -> Frame:
        """Waits for the `count`th frame of a kind."""
        assert await eventually_async(lambda: len(self.of_kind(kind)) >= count), f"no frame of kind {kind} came"
        return self.of_kind(kind)[count - 1]
