"""Answers that break HTTP or never end. They are written past the library, which would not send them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

_DRIP_S = 0.05
_LINE = b"X-More: " + bytes(range(48, 123)) + b"\r\n"

Write = Callable[[bytes], Awaitable[None]]


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Answers as the path says, and ends the connection."""
    behave = BEHAVIOURS.get(request.path)
    if behave is None:
        return web.Response(status=404, text=f"there are: {' '.join(BEHAVIOURS)}\n")
    transport = request.transport
    assert transport is not None
    protocol: Any = request.protocol

    async def write(data: bytes) -> None:
        # The library forgets the transport when the connection is lost; a TLS transport itself does not say so.
        if request.transport is None or transport.is_closing():
            raise ConnectionResetError
        transport.write(data)
        await protocol._drain_helper()
        await asyncio.sleep(0)  # the above does not wait where there is room

    with contextlib.suppress(ConnectionError):
        await behave(write)
    request.protocol.force_close()
    transport.close()
    return web.Response()


async def _less_than_said(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nonly this")


async def _more_than_said(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nonly this and then HTTP/1.1 200 OK\r\n\r\n")


async def _two_lengths(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\nfirst")


async def _length_and_chunks(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n")


async def _endless_body(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await write(bytes(64 * 1024))


async def _endless_head(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\n")
    while True:
        await write(_LINE * 100)


async def _drip(write: Write) -> None:
    await write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await write(b"1\r\n.\r\n")
        await asyncio.sleep(_DRIP_S)


async def _no_http(write: Write) -> None:
    await write(b"\x00\xff220 this is another protocol\r\n")


async def _nothing(write: Write) -> None:
    await write(b"")


async def _silence(write: Write) -> None:
    while True:
        await write(b"")
        await asyncio.sleep(_DRIP_S)


async def _two_answers(write: Write) -> None:
    """The second one answers a request that was not sent yet."""
    await write(
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirst" + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond"
    )


BEHAVIOURS: dict[str, Callable[[Write], Awaitable[None]]] = {
    "/drip": _drip,
    "/endless-body": _endless_body,
    "/endless-head": _endless_head,
    "/length-and-chunks": _length_and_chunks,
    "/less-than-said": _less_than_said,
    "/more-than-said": _more_than_said,
    "/no-http": _no_http,
    "/nothing": _nothing,
    "/silence": _silence,
    "/two-answers": _two_answers,
    "/two-lengths": _two_lengths,
}
