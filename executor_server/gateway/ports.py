"""Passes HTTP and WebSockets to the ports of a sandbox (`get_host(port)`).

Anyone who knows the address may use it, unless the sandbox was created with `allowPublicTraffic: false`; then a request
needs the sandbox's traffic token. The program at the port is hostile: libraries parse its answers, within limits, and
the gateway passes redirects to the caller and never follows them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpcore
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from executor_client.aio_session import AsyncSession
from executor_client.errors import ExecutorClientError
from executor_server.gateway.e2b.errors import refusal_of
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.errors import Refusal
from executor_server.gateway.leaving import EndsWithClient
from executor_server.gateway.routing import StreamCut, current_target

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of a WebSocket's message."""
MESSAGES_MAX = 4
"""Messages of a WebSocket that wait for a slow client."""
OPEN_TIME_S = 30.0
FIRST_PIECE_S = 60.0
"""A request is refused if its body has not begun by then: it has no connection to the port yet that could end it."""

# Headers about one connection (RFC 9110, 7.6.1), and the gateway's own.
_NOT_PASSED_ON = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade", b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token",
})  # fmt: skip
_OF_HANDSHAKE = frozenset({
    b"host", b"content-length", b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-protocol",
    b"sec-websocket-extensions", b"sec-websocket-accept",
})  # fmt: skip


def ports_app(sandboxes: Sandboxes) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        target = current_target()
        try:
            token = Headers(scope=scope).get("e2b-traffic-access-token")
            session = (await sandboxes.find_port(target.sandbox_id, token)).session
            try:
                pass_on = _pass_websocket if scope["type"] == "websocket" else _pass_request
                await pass_on(session, target.port, scope, receive, send)
            except ExecutorClientError as error:
                if error.reason == "PORT_CLOSED":
                    raise Refusal(502, "The sandbox is running but port is not open") from error
                raise refusal_of(error) from error
        except Refusal as error:
            await error.response()(scope, receive, send)

    return EndsWithClient(app)


# ---------------------------------------------------------------------------------------------------------------------
# HTTP


async def _pass_request(session: AsyncSession, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    has_begun = False
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    url = httpcore.URL(scheme=b"http", host=b"sandbox", port=port, target=scope["raw_path"] + query)
    content, length = await _content(scope, receive)
    headers = [*_passed_on(scope["headers"], frozenset({b"content-length"})), *length]
    stream = _Stream(*await session.ports.connect(port))
    try:
        async with httpcore.AsyncHTTP11Connection(httpcore.Origin(b"http", b"sandbox", port), stream) as connection:
            request = httpcore.Request(scope["method"], url, headers=headers, content=content)
            response = await connection.handle_async_request(request)
            async with contextlib.aclosing(response):
                answer = _passed_on(response.headers)
                has_begun = True
                await send({"type": "http.response.start", "status": response.status, "headers": answer})
                async for piece in response.aiter_stream():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        if has_begun:
            raise StreamCut from error
        raise Refusal(502, f"the program at port {port} closed the connection, or does not speak HTTP") from error


async def _content(scope: Scope, receive: Receive) -> tuple[bytes | AsyncIterator[bytes], list[tuple[bytes, bytes]]]:
    """Returns the body, and the header with its length, if it has one. Raises Refusal."""
    try:
        async with asyncio.timeout(FIRST_PIECE_S):
            first = await receive()
    except TimeoutError as error:
        raise Refusal(408, f"the request sent nothing of its body for {FIRST_PIECE_S:.0f} s") from error
    declared = [(name, value) for name, value in scope["headers"] if name == b"content-length"]
    if not first.get("more_body", False):
        body = first.get("body", b"")
        return body, [(b"content-length", b"%d" % len(body))] if body or declared else []

    async def pieces() -> AsyncIterator[bytes]:
        message = first
        while True:
            if message["type"] != "http.request":
                raise StreamCut
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return
            message = await receive()

    return pieces(), declared or [(b"transfer-encoding", b"chunked")]


def _passed_on(headers: list[tuple[bytes, bytes]], but: frozenset[bytes] = frozenset()) -> list[tuple[bytes, bytes]]:
    named = b",".join(value.lower() for name, value in headers if name.lower() == b"connection").split(b",")
    left_out = _NOT_PASSED_ON | but | {name.strip() for name in named}
    return [(name.lower(), value) for name, value in headers if name.lower() not in left_out]


class _Stream(httpcore.AsyncNetworkStream):
    """A connection to a port in httpcore's form. It has no time limit: a caller that leaves ends it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 (httpcore's)
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._writer.close()


# ---------------------------------------------------------------------------------------------------------------------
# WebSockets


class _Connect(connect):
    """Follows no redirect: a sandbox could send the gateway to any address that the gateway reaches."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def _pass_websocket(session: AsyncSession, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    await receive()  # websocket.connect
    inner = await _opened(session, port, scope)
    try:
        await send({"type": "websocket.accept", "subprotocol": inner.subprotocol})
        await _relay(inner, receive, send)
    finally:
        inner.transport.abort()


async def _opened(session: AsyncSession, port: int, scope: Scope) -> ClientConnection:
    """Makes the handshake. Raises Refusal."""
    query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
    host = Headers(scope=scope).get("host", "sandbox")
    connected, _ = await session.ports.connected_socket(port)
    try:
        return await _Connect(
            f"ws://{host}{scope['raw_path'].decode('latin-1')}{query}",
            sock=connected,
            subprotocols=scope["subprotocols"] or None,
            additional_headers=_texts(_passed_on(scope["headers"], _OF_HANDSHAKE)),
            compression=None,
            user_agent_header=None,
            ping_interval=None,
            proxy=None,
            open_timeout=OPEN_TIME_S,
            max_size=MESSAGE_BYTES_MAX,
            max_queue=MESSAGES_MAX,
        )
    except InvalidURI as error:
        connected.close()
        raise Refusal(400, f"{host[:256]!r} is no host") from error
    except InvalidStatus as refusal:
        raise Refusal(refusal.response.status_code, f"the program at port {port} refused the WebSocket") from refusal
    except (InvalidHandshake, OSError, TimeoutError) as error:
        raise Refusal(502, f"the program at port {port} does not speak WebSocket") from error


def _texts(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


async def _relay(inner: ClientConnection, receive: Receive, send: Send) -> None:
    """Passes messages in both directions until one side closes, and then the closing, with its code."""

    async def outwards() -> None:
        try:
            async for message in inner:
                kind = "text" if isinstance(message, str) else "bytes"
                await send({"type": "websocket.send", kind: message})
        except ConnectionClosed:
            pass
        # Nobody sends 1005 (no code) and 1006 (no closing): RFC 6455, 7.4.1, reserves them.
        code = {None: 1011, 1005: 1000, 1006: 1011}.get(inner.close_code, inner.close_code)
        await send({"type": "websocket.close", "code": code, "reason": inner.close_reason or ""})

    sending = asyncio.create_task(outwards())
    try:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            await inner.send(text if text is not None else message["bytes"])
        await inner.close(message.get("code") or 1000, message.get("reason") or "")
    except ConnectionClosed:
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
