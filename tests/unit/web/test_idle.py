"""Connections that ask for nothing, against a real server."""

from __future__ import annotations

import asyncio

from granian.constants import HTTPModes, Interfaces
from granian.server.embed import Server
from starlette.types import Receive, Scope, Send

from executor_server.web import IdleConnections
from tests.support.free_ports import free_port

FIRST_REQUEST_S, IDLE_S = 0.06, 0.3
TIMEOUT_S = 30.0
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


async def answer_after(silent: list[bytes]) -> bytes:
    """The answer to a request that is given once the server has closed connections that sent these bytes."""
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            with idle.request(scope):
                await ended.wait()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"answered"})

    port = free_port()
    idle = IdleConnections(port, first_request_s=FIRST_REQUEST_S, idle_s=IDLE_S)
    server = Server(
        app, address="127.0.0.1", port=port, interface=Interfaces.ASGINL, http=HTTPModes.auto, log_enabled=False
    )
    started = asyncio.Event()
    server.on_startup(started.set)
    serving, closing = asyncio.create_task(server.serve()), asyncio.create_task(idle.close_late())
    await started.wait()

    async def exchange(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        received = await reader.read(-1)
        writer.close()
        return received

    try:
        async with asyncio.timeout(TIMEOUT_S):
            running = asyncio.create_task(exchange(GET))
            await asyncio.gather(*map(exchange, silent))
            ended.set()
            return await running
    finally:
        server.stop()
        closing.cancel()
        await asyncio.gather(serving, closing, return_exceptions=True)


def test_connections_without_a_request_are_closed_and_one_with_a_request_is_not() -> None:
    answer = asyncio.run(answer_after([b"", GET[:-2], PREFACE[:3], PREFACE]))
    assert answer.endswith(b"answered")
