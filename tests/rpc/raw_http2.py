"""A client of gRPC that speaks HTTP/2 itself, so that it can do what a gRPC library does not: leave a call unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events

_READ_BYTES = 65_536
EMPTY_MESSAGE = b"\0" + (0).to_bytes(4, "big")


def unfinished_message(size_bytes: int) -> bytes:
    """The prefix of a message that never becomes complete."""
    return b"\0" + size_bytes.to_bytes(4, "big") + b"\x0a"


@dataclass
class RawCall:
    """One stream. `status` is the call's grpc-status as soon as there is one, -1 when it was reset."""

    stream_id: int
    status: int | None = None
    message: str = ""
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the first data has arrived
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class RawConnection:
    """One connection; `calls` are all calls that were begun on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.calls: dict[int, RawCall] = {}

    async def begin(self, method: str, token: str | None, body: bytes | None = None, *, ends: bool) -> RawCall:
        """Sends the headers of a call and possibly a beginning of its body; with `ends`, the end of the request, too."""
        stream_id = self._http.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
        if token is not None:
            headers.append(("authorization", f"Bearer {token}"))
        self._http.send_headers(stream_id, headers, end_stream=ends and body is None)
        if body is not None:
            self._http.send_data(stream_id, body, end_stream=ends)
        call = self.calls[stream_id] = RawCall(stream_id)
        await self._flush()
        return call

    async def start(self) -> None:
        self._http.initiate_connection()
        await self._flush()

    async def read_forever(self) -> None:
        while data := await self._reader.read(_READ_BYTES):
            for event in self._http.receive_data(data):
                self._take(event)
            await self._flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            call, headers = (
                self.calls[event.stream_id or 0],
                {str(key): str(value) for key, value in event.headers or ()},
            )
            if "grpc-status" in headers:
                call.status, call.message = int(headers["grpc-status"]), headers.get("grpc-message", "")
        elif isinstance(event, h2.events.DataReceived):
            self.calls[event.stream_id or 0].answered.set()
            self._http.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
        elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
            call = self.calls[event.stream_id or 0]
            call.status = -1 if call.status is None else call.status
            call.ended.set()

    async def _flush(self) -> None:
        self._writer.write(self._http.data_to_send())
        await self._writer.drain()


@asynccontextmanager
async def raw_connection(path: str, *, reads: bool = True) -> AsyncIterator[RawConnection]:
    """Opens a connection to a Unix socket, and aborts it at the end. Without `reads`, nothing is taken from it."""
    reader, writer = await asyncio.open_unix_connection(path)
    connection = RawConnection(reader, writer)
    await connection.start()
    reading = [asyncio.create_task(connection.read_forever())] if reads else []
    try:
        yield connection
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        writer.transport.abort()
