"""A server without HTTP: the first line says what it does with the rest of the connection.

The lines, each of which ends with a line feed:

    echo        it sends back what it gets
    sink        it takes what it gets
    source N    it sends N bytes and ends the connection
    hold N      it sends N bytes and is silent until the client ends the connection
    endless     it sends until the client goes
    drip S      it sends a byte every S seconds

It counts every byte of each connection in both directions.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

_CHUNK = memoryview(bytes(1024 * 1024))
_READ_BYTES = 256 * 1024
_LINE_BYTES = 1024


@dataclass
class Conversation:
    """One connection, as the server sees it."""

    peer: str
    command: str = ""
    received_bytes: int = 0
    sent_bytes: int = 0  # handed to the kernel
    ended: bool = False


class RawServer:
    """Serves connections, and remembers each."""

    def __init__(self) -> None:
        self.conversations: list[Conversation] = []

    @property
    def open(self) -> int:
        """Connections that have not ended."""
        return sum(not each.ended for each in self.conversations)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The callback of `asyncio.start_server`."""
        seen = Conversation("{}:{}".format(*writer.get_extra_info("peername")))
        self.conversations.append(seen)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                line = await reader.readuntil(b"\n")
                assert len(line) <= _LINE_BYTES
                seen.received_bytes += len(line)
                seen.command, *arguments = line.decode().split()
                await self._obey(seen, arguments, reader, writer)
        finally:
            seen.ended = True
            writer.close()

    async def _obey(
        self, seen: Conversation, arguments: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async def send(data: bytes | memoryview) -> None:
            writer.write(data)
            seen.sent_bytes += len(data)
            await writer.drain()
            await asyncio.sleep(0)  # the above does not wait where there is room, and a lost connection has room

        if seen.command in ("echo", "sink"):
            while data := await reader.read(_READ_BYTES):
                seen.received_bytes += len(data)
                if seen.command == "echo":
                    await send(data)
        elif seen.command in ("source", "hold"):
            left = int(arguments[0])
            while left > 0:
                await send(_CHUNK[:left])
                left -= len(_CHUNK[:left])
            if seen.command == "hold":
                await reader.read()
        elif seen.command == "endless":
            while True:
                await send(_CHUNK)
        elif seen.command == "drip":
            while True:
                await send(b".")
                await asyncio.sleep(float(arguments[0]))
        else:
            await send(b"unknown command\n")
