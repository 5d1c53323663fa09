"""Connections that ask for nothing, and readers that are slow, against a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server
from starlette.types import Receive, Scope, Send

from executor_server.web import IdleConnections
from tests.support.free_ports import free_port
from tests.support.polling import eventually

FIRST_REQUEST_S, IDLE_S = 0.06, 0.3
TIMEOUT_S = 30.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
LARGE = bytes(5 << 20)


@asynccontextmanager
async def served(body: bytes, *, after: asyncio.Event) -> AsyncIterator[int]:
    """The port of a server that answers after the event."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            with idle.request(scope):
                await after.wait()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": body})

    port = free_port()
    idle = IdleConnections(port, first_request_s=FIRST_REQUEST_S, idle_s=IDLE_S)
    server = Server(
        app, address="127.0.0.1", port=port, interface=Interfaces.ASGINL, http=HTTPModes.auto, log_enabled=False
    )
    serving, closing = asyncio.create_task(server.serve()), asyncio.create_task(idle.close_late())
    await asyncio.to_thread(eventually, lambda: listens(port), timeout_s=TIMEOUT_S)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield port
    finally:
        server.stop()
        closing.cancel()
        await asyncio.gather(serving, closing, return_exceptions=True)


def listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    received = await reader.read(-1)
    writer.close()
    return received


async def answer_after(silent: list[bytes]) -> bytes:
    """The answer to a request that is given once the server has closed connections that sent these bytes."""
    ended = asyncio.Event()
    async with served(b"answered", after=ended) as port:
        running = asyncio.create_task(exchange(port, GET))
        await asyncio.gather(*(exchange(port, data) for data in silent))
        ended.set()
        return await running


async def bytes_read_within(seconds: float) -> int:
    """How much of a large answer arrives at a reader that takes this long."""
    at_once = asyncio.Event()
    at_once.set()
    async with served(LARGE, after=at_once) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.setblocking(False)
            loop, received = asyncio.get_running_loop(), 0
            await loop.sock_sendall(connection, GET)
            while data := await loop.sock_recv(connection, 1 << 16):
                received += len(data)
                await asyncio.sleep(seconds * len(data) / len(LARGE))  # the pace of the reader
    return received


def test_connections_without_a_request_are_closed_and_one_with_a_request_is_not() -> None:
    answer = asyncio.run(answer_after([b"", GET[:-2], PREFACE[:3], PREFACE]))
    assert answer.endswith(b"answered")


def test_a_slow_reader_gets_its_whole_answer() -> None:
    assert asyncio.run(bytes_read_within(5 * IDLE_S)) > len(LARGE)
