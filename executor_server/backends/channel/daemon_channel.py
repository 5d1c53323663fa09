"""The daemon's end of the channel to one guest.

Theory of operation. A channel is a position in two sequences of frames (the window, sequenced.py) and at most one
connection that carries them. Connections break, are closed while a session rests, and are opened again; the position
stays, so that no frame is lost or delivered twice. A restarted daemon has no position: the guest's READY says where the
daemon's numbers continue, and the journal how far the guest's frames were stored (`go_on_after`).

States of a connection: none -> opening (the endpoint opens it; HELLO is written) -> greeted (READY arrived and was
valid) -> none. Only a greeted connection carries numbered frames. The first READY after HELLO counts and no other: a
second one could move the position.

Invariants.
- Bytes of a released connection are dropped. `Connection` forgets the channel at once, so bytes of an old connection,
  which the event loop may still deliver, never reach the decoder of a new one.
- `on_frame` gets each frame once and in order, and has returned before the next acknowledgement is sent. So the
  kernel has the owner's write to its journal before the guest may drop the frame.
- A frame reaches `on_send` before it is written to any connection, for the same reason in the other direction.

Races.
- A frame that is sent without a connection is kept, and leaves after READY in its order. After `hang_up` the owner
  learns by `on_waiting` that a frame waits, and connects.
- A cancelled or timed-out attempt leaves nothing behind: the `finally` of `connect` releases an ungreeted connection.
- The owner's pause of reading holds only once READY has arrived, else a guest would look dead because its owner is
  busy. From then on it holds for each new connection (reading.py).

Attacks. The guest is hostile.
- A frame that violates the protocol closes the channel for good (`violated`): later frames are not trusted.
- Lengths are checked before allocation (frames.py). A gap in the numbers, and an acknowledgement of a frame that was
  never sent, are violations (sequenced.py).
- A guest that acknowledges nothing, and a client that stops the reading of acknowledgements, can't make the daemon keep
  frames without bound: `drain` blocks the sender of data, and no request is sent while the channel is `crowded`.
- Each token is shown once. A process that took the guest's place at the socket and read the token from HELLO can open
  no connection with it (tokens.py).

The channel knows frames, not sessions: the owner interprets the frames.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from executor_server.backends.channel.connection import Connection, common_space
from executor_server.backends.channel.endpoint import GuestEndpoint, RefusedError, Tokens, UnreachedError
from executor_server.backends.channel.flow_control import ReadingControl, WritingControl
from executor_server.backends.channel.listener import take_listener
from executor_server.core import SandboxFailure
from executor_server.core.fairness import ReadingShares
from executor_server.guest.wire.frames import (
    CHUNK_BYTES,
    PROTOCOL_VERSION,
    Frame,
    FrameDecoder,
    FrameError,
    encode_frame,
)
from executor_server.guest.wire.messages import Ack, Hello, Ping, Pong, Ready
from executor_server.guest.wire.schema import Message
from executor_server.guest.wire.sequenced import KEPT_BYTES, Sequenced

READY_TIME_S = 30.0
"""Seconds to wait for the guest's first frame; an interpreter starts in a tenth of that, even on a loaded host."""
_WRITE_HIGH_BYTES = 4 * CHUNK_BYTES
# Kept bytes above which no requests are sent. Twice the limit for data, so that an upload never blocks requests.
_CROWDED_BYTES = 2 * KEPT_BYTES
_HANG_UP_TIME_S = 5.0  # for written bytes to leave
_DAEMON_ID = secrets.token_hex(16)  # lets a guest distinguish a daemon that reconnects from another one


@dataclass(frozen=True)
class GuestInfo:
    """The guest's description of itself in READY."""

    python_version: str
    generation: int


class GuestChannel:
    """One connection at a time to one guest, with a position that outlives it.

    The callbacks, all of which run in the event loop and must not block: `on_frame` gets each frame, once and in order.
    `on_send` gets each numbered frame before it leaves: kind, number, the bytes before the body, the body. `on_lost` is
    called once per connection that ends without being closed here, with the reason. `on_waiting` is called when a frame
    is sent after the channel hung up. `on_background_cpu` gets, with each PONG, the CPU seconds that the sandbox used
    outside of executions since its session began.
    """

    def __init__(self, endpoint: GuestEndpoint, *, shown: int = 0, daemon_id: str = _DAEMON_ID) -> None:
        """`shown` is the number of connections that earlier daemons may have begun."""
        self._endpoint = endpoint
        self._daemon_id = daemon_id
        self._connection: Connection | None = None  # open, or being opened
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._ready: asyncio.Future[GuestInfo] | None = None
        self.tokens = Tokens(endpoint, shown)
        self._first = True
        self._greeted = False
        self._window = Sequenced()
        self._writing = WritingControl(self._window)
        self.reading = ReadingControl()
        self._shares: ReadingShares | None = None
        self._tenant = ""
        self._hung_up = False
        self._closing = False
        self.violated = False  # the guest broke the protocol
        self.info: GuestInfo | None = None
        self.last_heard_s = time.monotonic()
        self.last_used_s = self.last_heard_s  # the last numbered frame in either direction
        self.on_frame: Callable[[Frame], None] = _unexpected_frame
        self.on_send: Callable[[int, int, bytes, bytes], None] = _ignore
        self.on_lost: Callable[[str], None] = _ignore
        self.on_background_cpu: Callable[[float], None] = _ignore
        self.on_waiting: Callable[[], None] = _ignore

    def go_on_after(self, taken_seq: int) -> None:
        """Sets the last guest frame that an earlier daemon stored; to be called before the first connection."""
        self._window.taken = taken_seq

    def share_reading(self, shares: ReadingShares, tenant: str) -> None:
        """Counts all further reading for the tenant."""
        self._shares, self._tenant = shares, tenant

    # -- connecting ----------------------------------------------------------------------------------------------

    async def connect(self, deadline_s: float = READY_TIME_S, *, answer_s: float = READY_TIME_S) -> GuestInfo:
        """Opens a connection and waits for the guest's READY, for at most `answer_s` seconds once it is open.

        An open connection is released first. Raises SandboxFailure, an UnreachedError when another attempt may succeed.
        A channel that was closed, by its owner or because the guest broke the protocol, stays closed.
        """
        if self._closing:
            raise SandboxFailure("the channel is closed")
        self._release("the channel connects again")
        try:
            async with asyncio.timeout(deadline_s):
                await self._endpoint.open(self._new_connection)
                assert self._ready is not None, "the endpoint is open, and there is no connection"
                if self._transport is not None:  # else it has ended already, and `_ready` holds the error
                    token, taken = self.tokens.next(), self._window.taken
                    hello = Hello(token=token, protocol=PROTOCOL_VERSION, daemon=self._daemon_id, last_seq=taken)
                    self._transport.write(encode_frame(hello.kind, hello.head()))
                async with asyncio.timeout(answer_s):
                    self.info = await self._ready
        except TimeoutError as error:
            raise UnreachedError(f"the guest was not ready within {deadline_s:g} s") from error
        except OSError as error:
            raise UnreachedError(f"the guest cannot be reached: {error.strerror}") from error
        finally:
            if not self._greeted:
                self._release("the attempt to connect ended")
        self._hung_up = False
        return self.info

    async def take_listener(self) -> socket.socket:
        """Returns the egress proxy's listener, over a connection of its own. Raises SandboxFailure, UnreachedError."""
        if self._endpoint.socket_path is None:
            raise SandboxFailure("this sandbox can't hand a listener out")
        return await take_listener(self._endpoint.socket_path, self.tokens.next())

    def _new_connection(self) -> Connection:
        """Makes a protocol for the endpoint, which may need several attempts; the newest counts."""
        self._release("the endpoint tries again")
        self._connection = Connection(self)
        return self._connection

    def begin_connection(self, transport: asyncio.Transport) -> None:
        """Called by the connection when it is open."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        if (sock := transport.get_extra_info("socket")) is not None:
            # Room for a whole piece: with less, each one would be written in parts, with a turn of the loop between.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WRITE_HIGH_BYTES)
        self._decoder = FrameDecoder()
        self._ready = asyncio.get_running_loop().create_future()
        self.reading.attach(transport)
        self.note_writable(True)

    def end_connection(self, exc: Exception | None) -> None:
        """Called by the connection when it ended and was not released."""
        reason = "the guest closed the channel" if exc is None else f"the channel broke: {type(exc).__name__}"
        was_ready = self._greeted
        self._release(reason, RefusedError if exc is None else UnreachedError)
        if was_ready and not self._closing:
            self.on_lost(reason)

    def _release(self, reason: str, failure: type[UnreachedError] = UnreachedError) -> None:
        """Forgets and aborts the connection; a `connect` that waits for it fails with the reason."""
        connection = self._detach()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(failure(reason))
            self._ready.exception()  # marks it as seen: possibly no task waits for it
        if connection is not None:
            connection.release()
            if connection.transport is not None:
                connection.transport.abort()

    async def hang_up(self) -> None:
        """Closes the connection in order; `connect` opens another one. `on_lost` is not called.

        Frames sent after this call wait for that one. Frames of the guest that are still on their way are sent again.
        """
        self._say(Ack())
        self._hung_up = True
        connection = self._detach()
        if connection is None or connection.transport is None:
            return
        connection.release()
        connection.transport.close()
        try:
            async with asyncio.timeout(_HANG_UP_TIME_S):
                await connection.ended.wait()
        except TimeoutError:
            pass  # the rest is lost with this connection, and is sent again on the next one
        finally:
            connection.transport.abort()

    def break_off(self, reason: str) -> None:
        """Treats the connection as broken, though its transport reports nothing."""
        if self._greeted and not self._closing:
            self._release(reason)
            self.on_lost(reason)

    def _detach(self) -> Connection | None:
        connection, self._connection, self._transport = self._connection, None, None
        self._greeted = False
        self.reading.detach()
        return connection

    @property
    def connections(self) -> int:
        """Connections begun so far, those of earlier daemons included."""
        return self.tokens.shown

    @property
    def sent_seq(self) -> int:
        """The number of the daemon's last frame; once connected, earlier daemons included."""
        return self._window.sent

    @property
    def connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def closed(self) -> bool:
        """True when the channel has ended for good."""
        return self._closing

    @property
    def position(self) -> tuple[int, int]:
        """The numbers of the last frame taken and of the last one acknowledged: progress in both directions."""
        return self._window.taken, self._window.acked

    @property
    def settled(self) -> bool:
        """True when the guest has acknowledged every frame."""
        return self._window.settled

    @property
    def crowded(self) -> bool:
        """True while too many frames are unacknowledged for another request."""
        return self._window.kept_bytes > _CROWDED_BYTES

    def close(self) -> None:
        """Ends the channel; `on_lost` is not called for it. Idempotent."""
        self._closing = True
        self._window.forget()
        self._writing.close()
        self._release("the channel was closed")

    # -- receiving -----------------------------------------------------------------------------------------------

    def take_data(self, data: bytes) -> None:
        """Called by the connection with the bytes that arrived."""
        self._take_all(len(data), self._decoder.feed, data)

    def space(self) -> memoryview:
        """Called by the connection for the buffer to read into."""
        return self._decoder.space(common_space)

    def take_filled(self, space: memoryview, size: int) -> None:
        """Called by the connection with the number of bytes that arrived in the buffer from `space`."""
        self._take_all(size, self._decoder.filled, space, size)

    def _take_all(self, size: int, decode: Callable[..., list[Frame]], *arrived: Any) -> None:
        self.last_heard_s = time.monotonic()
        try:
            for frame in decode(*arrived):
                self._take(frame)
        except FrameError as error:
            self._violated(error)
        if self._window.note_received(size):
            self._say(Ack())
        if self._shares is not None:
            self._shares.note(self._tenant, self.reading, size, self.last_heard_s)

    def _take(self, frame: Frame) -> None:
        before = self._window.acked
        self._window.acknowledge(frame.ack)
        self._writing.note_acknowledged(before)
        if frame.kind == Ready.kind:
            if self._ready is not None and not self._ready.done():
                ready = Ready.read(frame.head)
                if ready.protocol != PROTOCOL_VERSION:
                    raise FrameError("a guest of another version")
                self._greet(ready.last_seq, ready.acked)
                self._ready.set_result(GuestInfo(ready.python, ready.generation))
        elif frame.kind == Pong.kind:
            self.on_background_cpu(Pong.read(frame.head).background_cpu_time_s)
        elif self._window.accept(frame.seq):
            self.last_used_s = self.last_heard_s
            self.on_frame(frame)

    def _violated(self, error: FrameError) -> None:
        reason = f"the guest broke the protocol: {error}"
        self.violated = True
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxFailure(reason))
            self.close()
        else:
            self.close()
            lost, self.on_lost = self.on_lost, _ignore
            lost(reason)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, message: Message, body: bytes = b"") -> None:
        """Sends a frame, now or with the next connection, and keeps it until the guest has acknowledged it."""
        if self._closing:
            return
        frame = self._window.send(message.kind, message.head(), body)
        self.on_send(message.kind, frame.seq, frame.prefix, body)
        self._writing.update()
        self.last_used_s = time.monotonic()
        if self._greeted:
            self._write_waiting()
        elif self._hung_up:
            self.on_waiting()

    def ping(self) -> None:
        """Asks the guest for a sign of life."""
        self._say(Ping())

    def _say(self, message: Message) -> None:
        """Sends a frame without a number, which is never sent again."""
        if self._transport is not None and self._greeted:
            self._transport.write(self._window.unnumbered(message.kind, message.head()))

    def _greet(self, taken: int, dropped: int) -> None:
        """Begins the numbered frames: those that the guest has not taken from an earlier connection go first.

        On this daemon's first connection the numbers continue an earlier daemon's. The guest has dropped its frames up
        to `dropped`; those that the earlier daemon did not store are lost. Raises FrameError.
        """
        before = self._window.acked
        if self._first:
            self._window.adopt(sent=taken, taken=dropped)
            self._first = False
        else:
            self._window.reconnect(taken)
        self._writing.note_acknowledged(before)
        self._greeted = True
        self.reading.greeted()
        self._write_waiting()
        if self._writing.awaits_delivery:
            self.ping()

    def _write_waiting(self) -> None:
        """Writes every frame that this connection has not carried. The transport buffers; `drain` bounds the sender."""
        while self._transport is not None and (frame := self._window.next_frame()) is not None:
            if len(frame.body) < CHUNK_BYTES // 4:
                self._transport.write(frame.prefix + frame.body)
            else:
                self._transport.write(frame.prefix)
                self._transport.write(frame.body)

    async def delivered(self) -> None:
        """Waits until the guest has taken every frame that was sent so far, or the channel is closed."""
        await self._writing.delivered(self.ping)

    async def drain(self) -> None:
        """Waits until there is room for another chunk, or the channel is closed."""
        await self._writing.drain()

    def note_writable(self, writable: bool) -> None:
        """Called by the connection when its buffer is full, or has room again."""
        self._writing.note_writable(writable)


def _unexpected_frame(frame: Frame) -> None:
    raise FrameError(f"a frame of kind {frame.kind} before anything was asked")


def _ignore(*_arguments: object) -> None:
    pass
