"""A connection to a guest over a Unix socket reads to where the bytes belong; a released one passes nothing on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import uvloop

from executor_server.backends.channel.connection import Connection, DirectConnection, common_space, directly
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.guest.wire.frames import CHUNK_BYTES, Frame, FrameDecoder, Kind, encode_frame


class Owner:
    """Gathers the frames that arrive, in place of a channel."""

    def __init__(self) -> None:
        self.decoder = FrameDecoder()
        self.bodies: list[bytes] = []
        self.spaces: set[bool] = set()  # True for the common one
        self.ended = asyncio.Event()

    def begin_connection(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def end_connection(self, exc: Exception | None) -> None:
        self.ended.set()

    def take_data(self, data: bytes) -> None:
        self._take(self.decoder.feed(data))

    def space(self) -> memoryview:
        space = self.decoder.space(common_space)
        self.spaces.add(space is common_space)
        return space

    def take_filled(self, space: memoryview, size: int) -> None:
        self._take(self.decoder.filled(space, size))

    def note_writable(self, writable: bool) -> None:
        pass

    def _take(self, frames: list[Frame]) -> None:
        self.bodies += [frame.body for frame in frames]


def connected(owner: Owner) -> Connection:
    return Connection(cast("GuestChannel", owner))


def sent_to(owner: Owner, directory: Path) -> None:
    """Has the owner's connection read two large frames and a small one, from a socket, in the daemon's event loop."""
    bodies = [b"a" * CHUNK_BYTES, b"small", b"b" * (CHUNK_BYTES - 1)]

    async def send(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for seq, body in enumerate(bodies):
            writer.write(encode_frame(Kind.BLOB_CHUNK, {"blob": "b"}, body, seq=seq))
        await writer.drain()
        writer.close()

    async def run() -> None:
        path = str(directory / "s")
        server = await asyncio.start_unix_server(send, path)
        async with server:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: directly(connected(owner)), path)
            await owner.ended.wait()

    uvloop.run(run())
    assert owner.bodies == bodies


def test_large_frames_are_read_to_their_place_and_others_to_the_common_one(tmp_path: Path) -> None:
    owner = Owner()
    sent_to(owner, tmp_path)
    assert owner.spaces == {True, False}


async def test_a_released_connection_passes_nothing_on() -> None:
    owner = Owner()
    connection = connected(owner)
    direct = directly(connection)
    assert isinstance(direct, DirectConnection)
    connection.release()
    space = direct.get_buffer(-1)
    assert space is common_space
    direct.buffer_updated(10)
    connection.data_received(b"x")
    direct.connection_lost(None)
    assert (owner.bodies, owner.ended.is_set(), connection.ended.is_set()) == ([], False, True)
