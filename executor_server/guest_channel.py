"""The daemon's end of the channel to one guest.

Speaks frames over whatever leads to a sandbox, remembers how far it has taken them, and so can connect again without
losing or repeating one. It can hang up for a while too: what is sent then waits, and its owner learns that something
does. It trusts nothing: a frame that is not of the protocol closes the channel for good, because a
guest that lies once is not believed twice. It knows frames, not sessions: what they mean is its owner's business.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from executor_server.backends.base import GuestEndpoint
from executor_server.errors import SandboxFailure
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
from executor_server.guest.tokens import chained
from executor_server.reading_shares import ReadingShares

# For a guest to answer the first frame: an interpreter starts within a tenth of that, even on a loaded host.
READY_TIME_S = 30.0
# Unacknowledged bytes after which an acknowledgement goes out by itself; the guest stops at 8 MiB.
_ACK_BYTES = 1024 * 1024
# What may wait for the guest's acknowledgement before `drain` holds the sender back.
_KEPT_BYTES = 8 * 1024 * 1024
_WRITE_HIGH_BYTES = 4 * CHUNK_BYTES
# For what was written to leave, when the channel hangs up.
_HANG_UP_TIME_S = 5.0
# By which a guest tells a daemon that connects again from another one.
_DAEMON_ID = secrets.token_hex(16)


class UnreachedError(SandboxFailure):
    """The guest did not answer this time. Nothing says that it is gone: the next attempt may go better."""


class RefusedError(UnreachedError):
    """Who listens hung up without a word: it does not know the token, or has been shown it before."""


@dataclass(frozen=True)
class _Kept:
    """A frame that the guest has not acknowledged."""

    seq: int
    prefix: bytes
    body: bytes


@dataclass(frozen=True)
class GuestInfo:
    """What a guest says of itself when it is ready."""

    python_version: str
    generation: int


class _Connection(asyncio.Protocol):
    """One connection. What comes from it once the channel has let go of it is nobody's business any more."""

    def __init__(self, channel: GuestChannel) -> None:
        self._channel: GuestChannel | None = channel
        self.transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()

    def let_go(self) -> None:
        self._channel = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, but are no subclass.
        self.transport = cast("asyncio.Transport", transport)
        if self._channel is None:
            self.transport.abort()
        else:
            self._channel.begin_connection(self.transport)

    def data_received(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.take_data(data)

    def pause_writing(self) -> None:
        if self._channel is not None:
            self._channel.note_writable(False)

    def resume_writing(self) -> None:
        if self._channel is not None:
            self._channel.note_writable(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        if self._channel is not None:
            self._channel.end_connection(exc)


class GuestChannel:
    """One connection at a time to one guest, with a position that outlives it.

    `on_frame` takes each frame, once and in order. `on_send` is given each numbered frame before it leaves: kind,
    number, what goes before the body, the body. `on_lost` is called once, with the reason, when the connection ended
    though nobody closed it; `on_waiting`, when a frame was sent after the channel had hung up. All run in the event
    loop and must not block.
    """

    def __init__(self, endpoint: GuestEndpoint, *, shown: int = 0, daemon_id: str = _DAEMON_ID) -> None:
        """`shown`: how many connections earlier daemons may have begun."""
        self._endpoint = endpoint
        self._daemon_id = daemon_id
        self._connection: _Connection | None = None  # that is there, or is being made
        self._transport: asyncio.Transport | None = None
        self._decoder = FrameDecoder()
        self._ready: asyncio.Future[GuestInfo] | None = None
        self._connections = shown
        self._first = True
        self._greeted = False
        self._last_seq = 0  # of the guest's frames, taken
        self._unacknowledged_bytes = 0
        self._seq = 0  # of our own
        self._delivered_seq = 0  # of our own, acknowledged
        self._delivery = asyncio.Event()  # not set while somebody waits for an acknowledgement
        self._delivery.set()
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._writable = True
        self._room = asyncio.Event()
        self._room.set()
        self._held = False  # by its owner, who has no room for more
        self._rests = False  # since its tenant has had its share
        self._shares: ReadingShares | None = None
        self._tenant = ""
        self._hung_up = False
        self._closing = False
        self.violated = False  # what came was not of the protocol
        self.info: GuestInfo | None = None
        self.last_heard_s = time.monotonic()
        self.last_used_s = self.last_heard_s  # when a numbered frame went either way
        self.on_frame: Callable[[Frame], None] = _nobody_listens
        self.on_send: Callable[[int, int, bytes, bytes], None] = _nobody_notes
        self.on_lost: Callable[[str], None] = _nobody_minds
        # Told with each PONG: the CPU time of the sandbox since its session began, beside that of executions.
        self.on_background_cpu: Callable[[float], None] = _nobody_charges
        self.on_waiting: Callable[[], None] = _nobody_waits

    def go_on_after(self, taken_seq: int) -> None:
        """Before the first connection: how far earlier daemons took the guest's frames and remember them."""
        self._last_seq = taken_seq

    def share_reading(self, shares: ReadingShares, tenant: str) -> None:
        """From here on, what it reads counts for the tenant."""
        self._shares, self._tenant = shares, tenant

    # -- connecting ----------------------------------------------------------------------------------------------

    async def connect(self, deadline_s: float = READY_TIME_S, *, answer_s: float = READY_TIME_S) -> GuestInfo:
        """Connects, or connects again, and waits for the guest to be ready: `answer_s` at most, once the way is open.

        A connection that is still there gives way. Raises SandboxFailure; it is an UnreachedError when another attempt
        may be made. Once closed, by its owner or because the guest broke the protocol, a channel stays closed.
        """
        if self._closing:
            raise SandboxFailure("the channel is closed")
        self._let_go("the channel connects anew")
        try:
            async with asyncio.timeout(deadline_s):
                await self._endpoint.open(self._new_connection)
                assert self._ready is not None, "a way that is open, and no connection"
                if self._transport is not None:  # else it has ended already, and `_ready` says how
                    self._transport.write(encode_frame(Kind.HELLO, self._hello()))
                async with asyncio.timeout(answer_s):
                    self.info = await self._ready
        except TimeoutError as error:
            raise UnreachedError(f"the guest was not ready within {deadline_s:g} s") from error
        except OSError as error:
            raise UnreachedError(f"the guest cannot be reached: {error.strerror}") from error
        finally:
            if not self._greeted:
                self._let_go("the attempt to connect ended")
        self._hung_up = False
        return self.info

    def _hello(self) -> dict[str, Any]:
        """Raises SandboxFailure when there is no token left to show."""
        chain_length = self._endpoint.connections_max
        self._connections += 1
        if self._connections >= chain_length:
            raise SandboxFailure("the guest has been connected to too often")
        token = chained(self._endpoint.token, chain_length - self._connections)
        return {
            "token": token.hex(),
            "protocol": PROTOCOL_VERSION,
            "daemon": self._daemon_id,
            "last_seq": self._last_seq,
        }

    def _new_connection(self) -> _Connection:
        """An endpoint may need several until its way is open; the newest counts."""
        self._let_go("the endpoint tries again")
        self._connection = _Connection(self)
        return self._connection

    def begin_connection(self, transport: asyncio.Transport) -> None:
        """For the connection: it is there."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        self._decoder = FrameDecoder()
        self._ready = asyncio.get_running_loop().create_future()
        self.note_writable(True)

    def end_connection(self, exc: Exception | None) -> None:
        """For the connection: it has ended by itself."""
        reason = "the guest closed the channel" if exc is None else f"the channel broke: {type(exc).__name__}"
        was_ready = self._greeted
        self._let_go(reason, RefusedError if exc is None else UnreachedError)
        if was_ready and not self._closing:
            self.on_lost(reason)

    def _let_go(self, reason: str, failure: type[UnreachedError] = UnreachedError) -> None:
        """Knows nothing more of the connection there is; aborts it. Who waits for it to be ready is told why."""
        connection, self._connection, self._transport = self._connection, None, None
        self._greeted = False
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(failure(reason))
            self._ready.exception()  # there may be nobody who waits
        if connection is not None:
            connection.let_go()
            if connection.transport is not None:
                connection.transport.abort()

    async def hang_up(self) -> None:
        """Ends the connection in order; `connect` makes another one. `on_lost` is not called for it.

        What is sent from here on is kept for that one. What the guest still says it will say again.
        """
        self._say(Kind.ACK)
        self._hung_up = True
        connection, self._connection, self._transport = self._connection, None, None
        self._greeted = False
        if connection is None or connection.transport is None:
            return
        connection.let_go()
        connection.transport.close()
        try:
            async with asyncio.timeout(_HANG_UP_TIME_S):
                await connection.ended.wait()
        except TimeoutError:
            pass  # what was written will not leave any more
        finally:
            connection.transport.abort()

    def break_off(self, reason: str) -> None:
        """Takes the connection for broken, though it does not say so itself."""
        if self._greeted and not self._closing:
            self._let_go(reason)
            self.on_lost(reason)

    @property
    def connections(self) -> int:
        """How many have been begun, those of earlier daemons included."""
        return self._connections

    @property
    def sent_seq(self) -> int:
        """The number of the last frame of ours; once connected, of earlier daemons' too."""
        return self._seq

    @property
    def connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def closed(self) -> bool:
        """Whether it has ended, for good."""
        return self._closing

    @property
    def position(self) -> tuple[int, int]:
        """How far frames came in both directions: numbers of the last one taken, and of the last one acknowledged."""
        return self._last_seq, self._delivered_seq

    @property
    def settled(self) -> bool:
        """Whether the guest has acknowledged all that was sent."""
        return not self._kept

    def close(self) -> None:
        """Ends the channel; `on_lost` is not called for it. Idempotent."""
        self._closing = True
        self._kept.clear()
        self._kept_bytes = 0
        self._room.set()
        self._delivery.set()
        self._let_go("the channel was closed")

    # -- receiving -----------------------------------------------------------------------------------------------

    def take_data(self, data: bytes) -> None:
        """For the connection: so much has come."""
        self.last_heard_s = time.monotonic()
        try:
            for frame in self._decoder.feed(data):
                self._take(frame)
        except FrameError as error:
            self._violated(error)
        self._unacknowledged_bytes += len(data)
        if self._unacknowledged_bytes > _ACK_BYTES:
            self._say(Kind.ACK)
        if self._shares is not None:
            self._shares.note(self._tenant, self, len(data), self.last_heard_s)

    def _take(self, frame: Frame) -> None:
        self._acknowledge(frame.ack)
        if frame.kind == Kind.READY:
            if self._ready is not None and not self._ready.done():
                info = _read_ready(frame)
                self._greet(frame.head.integer("last_seq"), frame.head.integer("acked"))
                self._ready.set_result(info)
        elif frame.kind == Kind.PONG:
            self.on_background_cpu(frame.head.number("background_cpu_time_s", default=0.0))
        elif frame.seq <= self._last_seq:
            return  # sent again after a reconnect, and taken before it
        elif frame.seq != self._last_seq + 1:
            raise FrameError(f"frame {frame.seq} came after frame {self._last_seq}")
        else:
            self._last_seq = frame.seq
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
            lost, self.on_lost = self.on_lost, _nobody_minds
            lost(reason)

    def pause_reading(self) -> None:
        """Takes nothing more for now: the guest will hold its program back."""
        self._held = True
        self._update_reading()

    def resume_reading(self) -> None:
        self._held = False
        self._update_reading()

    def rest(self) -> None:
        """The same, until `go_on`, and whatever the owner wants."""
        self._rests = True
        self._update_reading()

    def go_on(self) -> None:
        self._rests = False
        self._update_reading()

    def _update_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        # What the guest answers first is read in any case, or it would not count as there.
        reads = not (self._rests or (self._held and self._greeted))
        if reads and not self._transport.is_reading():
            self._transport.resume_reading()
        elif not reads and self._transport.is_reading():
            self._transport.pause_reading()

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, kind: int, head: dict[str, Any], body: bytes = b"") -> None:
        """Sends a frame, now or with the next connection, and keeps it until the guest has acknowledged it."""
        if self._closing:
            return
        self._seq += 1
        kept = _Kept(self._seq, encode_prefix(kind, head, len(body), seq=self._seq, ack=self._last_seq), body)
        self.on_send(kind, self._seq, kept.prefix, body)
        self._kept.append(kept)
        self._kept_bytes += len(kept.body)
        self._update_room()
        self.last_used_s = time.monotonic()
        if self._greeted:
            self._unacknowledged_bytes = 0
            self._write(kept)
        elif self._hung_up:
            self.on_waiting()

    def ping(self) -> None:
        """Asks for a sign of life."""
        self._say(Kind.PING)

    def _say(self, kind: int) -> None:
        """A frame without a number, which is not sent again."""
        if self._transport is not None and self._greeted:
            self._unacknowledged_bytes = 0
            self._transport.write(encode_frame(kind, {}, ack=self._last_seq))

    def _greet(self, taken: int, let_go: int) -> None:
        """The guest is ready: what it has not taken of an earlier connection goes first.

        An earlier daemon may have spoken to it; then its numbers go on here. What that one had acknowledged and did not
        write down is gone, and was of no use to anybody but itself. Raises FrameError.
        """
        if self._first:
            assert not self._kept, "a frame was sent before the first connection"
            self._first, self._seq = False, taken
            self._last_seq = max(self._last_seq, let_go)
        elif taken > self._seq:
            raise FrameError(f"the guest has taken frame {taken} of {self._seq}")
        self._acknowledge(taken)
        self._greeted = True
        for kept in self._kept:
            self._write(kept)
        if not self._delivery.is_set():
            self.ping()

    def _write(self, kept: _Kept) -> None:
        if self._transport is None:
            return
        if len(kept.body) < CHUNK_BYTES // 4:
            self._transport.write(kept.prefix + kept.body)
        else:
            self._transport.write(kept.prefix)
            self._transport.write(kept.body)

    def _acknowledge(self, seq: int) -> None:
        while self._kept and self._kept[0].seq <= seq:
            self._kept_bytes -= len(self._kept.popleft().body)
        if seq > self._delivered_seq:
            self._delivered_seq = seq
            self._delivery.set()
        self._update_room()

    async def delivered(self) -> None:
        """Waits until the guest has taken all that was sent so far, or the channel is closed."""
        sent = self._seq
        while self._delivered_seq < sent and not self._closing:
            self._delivery.clear()
            self.ping()
            await self._delivery.wait()

    async def drain(self) -> None:
        """Waits until there is room for another chunk, or the channel is closed."""
        await self._room.wait()

    def note_writable(self, writable: bool) -> None:
        """For the connection: whether it takes more now."""
        self._writable = writable
        self._update_room()

    def _update_room(self) -> None:
        if self._closing or (self._writable and self._kept_bytes < _KEPT_BYTES):
            self._room.set()
        else:
            self._room.clear()


def _read_ready(frame: Frame) -> GuestInfo:
    if frame.head.integer("protocol") != PROTOCOL_VERSION:
        raise FrameError("a guest of another version")
    return GuestInfo(frame.head.text("python", 64), frame.head.integer("generation", 1, 2**31))


def _nobody_listens(frame: Frame) -> None:
    raise FrameError(f"a frame of kind {frame.kind} before anything was asked")


def _nobody_notes(_kind: int, _seq: int, _prefix: bytes, _body: bytes) -> None:
    return


def _nobody_charges(_cpu_time_s: float) -> None:
    pass


def _nobody_minds(_reason: str) -> None:
    return


def _nobody_waits() -> None:
    return
