"""TLS over the proxy's endpoints, with memory buffers: nothing is read before there is room for it.

asyncio's own TLS takes over a transport and reads ahead. This stream reads only on request, as an endpoint does, within
the session's room, and accepts bytes that were read before it was created.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from executor_server.guest.egress.endpoint import CHUNK_BYTES, Endpoint, LoopShare

# Reads of what a server may send between two responses: tickets for later sessions.
_IDLE_READS = 4


@dataclass(frozen=True)
class Intake:
    """The room for bytes from one side, and the function that counts them (guest/egress/connection.py)."""

    room: Callable[[], int]
    room_opened: Callable[[], Awaitable[None]]
    count: Callable[[int], None]


class TlsStream:
    """One side of a TLS connection. One coroutine may receive while another one sends."""

    def __init__(
        self,
        endpoint: Endpoint,
        context: ssl.SSLContext,
        *,
        server_name: str | None,
        intake: Intake,
        received: bytes = b"",
    ) -> None:
        """With a `server_name` it is the client, otherwise the server."""
        self.endpoint = endpoint
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._incoming.write(received)
        self._intake = intake
        self._sending = asyncio.Lock()
        self._share = LoopShare()  # a peer may send endless TLS messages without data
        self.ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )

    async def handshake(self, deadline: float) -> None:
        """Raises ssl.SSLError when it fails, after the alert was sent; OSError and DeadlinePassed."""
        while True:
            try:
                self.ssl.do_handshake()
                return await self._flush(deadline)
            except ssl.SSLWantReadError:
                await self._flush(deadline)
                await self._fill(deadline)
            except ssl.SSLError:
                await self._flush(deadline)
                raise

    async def receive(self, deadline: float | None = None) -> bytes:
        """Returns the available data; empty at the end, which a peer need not announce."""
        await self._share.step()
        while True:
            try:
                return self.ssl.read(CHUNK_BYTES)
            except ssl.SSLWantReadError:
                await self._flush(deadline)  # the answer to an update of keys
                await self._fill(deadline)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def send(self, data: bytes) -> None:
        if data:
            self.ssl.write(data)
            await self._flush(None)

    async def close(self, deadline: float) -> None:
        """Announces the end, so that the peer knows that nothing was cut off. Does not wait for the peer's."""
        # `unwrap` raises when it would wait for the peer, or the peer is gone.
        with contextlib.suppress(ssl.SSLError):
            self.ssl.unwrap()
        await self._flush(deadline)

    def is_idle(self) -> bool:
        """False if the peer has ended the connection or sent unexpected data. Never waits."""
        for _ in range(_IDLE_READS):
            try:
                self.ssl.read(1)
                return False
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
            try:
                data = self.endpoint.sock.recv(self._intake.room())
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._intake.count(len(data))
            self._incoming.write(data)
        return False

    async def _fill(self, deadline: float | None) -> None:
        data = await self._receive(deadline)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _receive(self, deadline: float | None) -> bytes:
        """Reads at most as much as there is room for now.

        There is no await between reading and counting, since other connections of the session share the room.
        """
        await self._share.step()
        while True:
            size = self._intake.room()
            if not size:
                await self._intake.room_opened()
                continue
            try:
                data = self.endpoint.sock.recv(size)
            except (BlockingIOError, InterruptedError):
                await self.endpoint.readable(deadline)
                continue
            self._intake.count(len(data))
            return data

    async def _flush(self, deadline: float | None) -> None:
        # Under the lock, so that two sending coroutines do not interleave their records.
        async with self._sending:
            if self._outgoing.pending:
                await self.endpoint.send(self._outgoing.read(), deadline)
