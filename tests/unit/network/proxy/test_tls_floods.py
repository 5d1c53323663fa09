"""Peers that send messages of TLS without end: there is nothing in them for a reader, and the loop has other sessions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from executor_server.guest.egress.endpoint import CHUNK_BYTES, Endpoint
from executor_server.network.proxy.tls import Intake, TlsStream
from tests.support.certificates import Authority

TICKETS = 2000
PIECE_BYTES = 64


class Flood:
    """A socket to a server that sends tickets for later sessions, and always has some more."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._server = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.reads = 0

    def send(self, data: Any) -> int:
        self._incoming.write(bytes(data))
        with contextlib.suppress(ssl.SSLWantReadError):
            self._server.do_handshake()
        return len(data)

    def recv(self, size: int) -> bytes:
        self.reads += 1
        return self._outgoing.read(min(size, PIECE_BYTES))


@pytest.fixture
def flood(tmp_path: Path) -> Iterator[Any]:
    authority = Authority(tmp_path)
    pair = authority.site("site", "a.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    context.num_tickets = TICKETS
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    async def never() -> None:
        raise AssertionError("there is room all the time")

    with socket.socket() as ours:  # its descriptor is never waited for
        yield client, context, ours, Intake(lambda: CHUNK_BYTES, never, lambda count: None)


def _stream(flood: Any) -> tuple[TlsStream, Flood]:
    client, context, ours, intake = flood
    server = Flood(context)
    endpoint = Endpoint(ours)
    endpoint.sock = cast("socket.socket", server)
    return TlsStream(endpoint, client, server_name="a.example", intake=intake), server


async def test_a_stream_without_a_byte_for_its_reader_leaves_the_loop_to_others(flood: Any) -> None:
    stream, server = _stream(flood)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await stream.handshake(asyncio.get_running_loop().time() + 20)
    assert await stream.receive() == b""
    other.cancel()
    assert server.reads > TICKETS, "one read brings a part of a ticket"
    assert turns >= server.reads // 64


async def test_a_server_that_has_no_end_of_tickets_is_not_used_again(flood: Any) -> None:
    stream, server = _stream(flood)
    await stream.handshake(asyncio.get_running_loop().time() + 20)
    before = server.reads
    assert not stream.is_idle()
    assert server.reads - before < 10
