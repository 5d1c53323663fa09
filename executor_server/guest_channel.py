"""The daemon's end of the channel to one guest.

Speaks frames over whatever leads to a sandbox, remembers how far it has taken them, and so can connect again without
losing or repeating one. It trusts nothing: a frame that is not of the protocol closes the channel for good, because a
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
from executor_server.guest.tokens import CHAIN_LENGTH, chained
from executor_server.reading_shares import ReadingShares

# For a guest to answer the first frame: an interpreter starts within a tenth of that, even on a loaded host.
READY_TIME_S = 30.0
# Unacknowledged bytes after which an acknowledgement goes out by itself; the guest stops at 8 MiB.
_ACK_BYTES = 1024 * 1024
# What may wait for the guest's acknowledgement before `drain` holds the sender back.
_KEPT_BYTES = 8 * 1024 * 1024
_WRITE_HIGH_BYTES = 4 * CHUNK_BYTES
# By which a guest tells a daemon that connects again from another one.
_DAEMON_ID = secrets.token_hex(16)


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


class GuestChannel(asyncio.Protocol):
    """One connection at a time to one guest, with a position that outlives it.

    `on_frame` takes each frame, once and in order. `on_send` is given each numbered frame before it leaves: kind,
    number, what goes before the body, the body. `on_lost` is called once, with the reason, when the connection ended
    though nobody closed it. All run in the event loop and must not block.
    """

    def __init__(self, endpoint: GuestEndpoint, *, shown: int = 0, daemon_id: str = _DAEMON_ID) -> None:
        """`shown`: how many connections earlier daemons may have begun."""
        self._endpoint = endpoint
        self._daemon_id = daemon_id
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
        self._closing = False
        self.violated = False  # what came was not of the protocol
        self.info: GuestInfo | None = None
        self.last_heard_s = time.monotonic()
        self.on_frame: Callable[[Frame], None] = _nobody_listens
        self.on_send: Callable[[int, int, bytes, bytes], None] = _nobody_notes
        self.on_lost: Callable[[str], None] = _nobody_minds

    def go_on_after(self, taken_seq: int) -> None:
        """Before the first connection: how far earlier daemons took the guest's frames and remember them."""
        self._last_seq = taken_seq

    def share_reading(self, shares: ReadingShares, tenant: str) -> None:
        """From here on, what it reads counts for the tenant."""
        self._shares, self._tenant = shares, tenant

    # -- connecting ----------------------------------------------------------------------------------------------

    async def connect(self, deadline_s: float = READY_TIME_S) -> GuestInfo:
        """Connects, or connects again, and waits for the guest to be ready. Raises SandboxFailure.

        Once closed, by its owner or because the guest broke the protocol, a channel stays closed.
        """
        if self._closing:
            raise SandboxFailure("the channel is closed")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                await self._endpoint.open(lambda: self)
                self._ready = loop.create_future()
                assert self._transport is not None
                self._transport.write(encode_frame(Kind.HELLO, self._hello()))
                self.info = await self._ready
        except TimeoutError as error:
            self.close()
            raise SandboxFailure(f"the guest was not ready within {deadline_s:g} s") from error
        except OSError as error:
            self.close()
            raise SandboxFailure(f"the guest cannot be reached: {error.strerror}") from error
        return self.info

    def _hello(self) -> dict[str, Any]:
        """Raises SandboxFailure when there is no token left to show."""
        self._connections += 1
        if self._connections >= CHAIN_LENGTH:
            raise SandboxFailure("the guest has been connected to too often")
        token = chained(self._endpoint.token, CHAIN_LENGTH - self._connections)
        return {
            "token": token.hex(),
            "protocol": PROTOCOL_VERSION,
            "daemon": self._daemon_id,
            "last_seq": self._last_seq,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, but are no subclass.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        self._decoder = FrameDecoder()
        self._writable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._greeted = False
        reason = "the guest closed the channel" if exc is None else f"the channel broke: {type(exc).__name__}"
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxFailure(reason))
        elif not self._closing:
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

    def close(self) -> None:
        """Ends the channel; `on_lost` is not called for it. Idempotent."""
        self._closing = True
        self._kept.clear()
        self._kept_bytes = 0
        self._room.set()
        self._delivery.set()
        if self._transport is not None:
            self._transport.abort()

    # -- receiving -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
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
            return
        elif frame.seq <= self._last_seq:
            return  # sent again after a reconnect, and taken before it
        elif frame.seq != self._last_seq + 1:
            raise FrameError(f"frame {frame.seq} came after frame {self._last_seq}")
        else:
            self._last_seq = frame.seq
            self.on_frame(frame)

    def _violated(self, error: FrameError) -> None:
        reason = f"the guest broke the protocol: {error}"
        self.violated = True
        self.close()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(SandboxFailure(reason))
        else:
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
        if self._greeted:
            self._unacknowledged_bytes = 0
            self._write(kept)

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

    def pause_writing(self) -> None:
        self._writable = False
        self._update_room()

    def resume_writing(self) -> None:
        self._writable = True
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


def _nobody_minds(_reason: str) -> None:
    return
