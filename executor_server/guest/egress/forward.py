"""Passes one plain-HTTP request on to its server, and the response back as it arrives.

Both sides are read and written by h11, so we frame everything that leaves: no length, no transfer coding and no header
of one connection reaches the other one as it was written. The client's connection is closed after one request, so that
none for another host can hide behind the first. In a tunnel a request may switch to WebSocket, if the server does;
after that, the bytes are not HTTP.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Callable, List, Optional, Set, Tuple

import h11

from . import reasons
from .endpoint import Endpoint, LoopShare
from .head import Head, LineLimit
from .host_names import Target
from .refusals import Ended, Refusal, shown

if TYPE_CHECKING:
    from h11._headers import Headers as ReceivedHeaders

    from .connection import Connection

# Servers send larger heads than clients: cookies, content security policies.
RESPONSE_HEAD_BYTES = 65536
RESPONSE_HEAD_LINES = 1024
MAX_INFORMATIONAL_RESPONSES = 16
Headers = List[Tuple[bytes, bytes]]

# RFC 9110, section 7.6.1, and what older clients send to proxies. `Expect` is passed on, and Host is made here.
_HOP_BY_HOP = {
    b"connection",
    b"host",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
UPGRADE_HEADERS: Headers = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
# `Connection: content-length` must not take the length away from a body that is sent.
_NEVER_HOP_BY_HOP = {b"content-length"}


def asks_for_websocket(request: h11.Request) -> bool:
    """True for a request to switch to WebSocket. No other is passed on: HTTP/2 would carry unchecked requests."""
    upgrades = [value.strip().lower() for name, value in request.headers if name == b"upgrade"]
    return request.method == b"GET" and upgrades == [b"websocket"]


def switching(response: h11.InformationalResponse) -> h11.InformationalResponse:
    """The server's answer that it switches to WebSocket, for the client."""
    headers = [*end_to_end(response.headers), *UPGRADE_HEADERS]
    return h11.InformationalResponse(status_code=101, headers=headers, reason=response.reason)


def request_for_server(head: Head, *, switches: bool = False) -> h11.Request:
    """The request as the server gets it: Host is the name that was checked, whatever the sandbox sent.

    `switches`: it asks for WebSocket.
    """
    chunked = has_header(head.request.headers, b"transfer-encoding")
    headers: Headers = [(b"Host", _host_of(head.target)), *end_to_end(head.request.headers)]
    if chunked:
        headers.append((b"Transfer-Encoding", b"chunked"))
    headers += UPGRADE_HEADERS if switches else [(b"Connection", b"close")]
    return h11.Request(method=head.request.method, target=head.path, headers=headers)


def response_for_client(response: h11.Response) -> h11.Response:
    headers = end_to_end(response.headers)
    if has_header(response.headers, b"transfer-encoding"):
        # The server's transfer coding overrides its length (RFC 9112, section 6.3), so the length means nothing.
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    headers.append((b"Connection", b"close"))
    return h11.Response(status_code=response.status_code, headers=headers, reason=response.reason)


def end_to_end(headers: ReceivedHeaders) -> Headers:
    dropped = _HOP_BY_HOP | (_named_by_connection(headers) - _NEVER_HOP_BY_HOP)
    return [(raw, value) for raw, value in headers.raw_items() if raw.lower() not in dropped]


def _named_by_connection(headers: ReceivedHeaders) -> Set[bytes]:
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}


def has_header(headers: ReceivedHeaders, wanted: bytes) -> bool:
    return any(name == wanted for name, _ in headers)


def _host_of(target: Target) -> bytes:
    return (target.host if target.port == 80 else str(target)).encode("ascii")


class Exchange:
    """A request and its response, between two endpoints that stay the caller's."""

    def __init__(
        self, client: Endpoint, upstream: Endpoint, head: Head, meter: Connection, *, in_tunnel: bool = False
    ) -> None:
        self._asks_to_switch = in_tunnel and asks_for_websocket(head.request)
        self._client = client
        self._upstream = upstream
        self._head = head
        self._meter = meter
        self._to_client = head.machine
        self._to_server = h11.Connection(h11.CLIENT, max_incomplete_event_size=RESPONSE_HEAD_BYTES)
        self._lines = LineLimit(RESPONSE_HEAD_LINES)
        self._informed = 0
        self._share = LoopShare()
        self.answered = False  # the response has begun
        self.has_switched = False  # to WebSocket: all that follows, in both directions, is to be copied

    async def run(self) -> None:
        """Returns when the response has been sent. Raises Refusal, as long as nothing was answered; Ended; OSError."""
        upload = self._meter.create_task(self._upload())
        download = self._meter.create_task(self._download())
        try:
            # A server may answer before it has read the request. Then nothing waits for the rest of the request.
            await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
            if not download.done() and upload.exception() is None:
                await download
            for task in (download, upload):
                if task.done():
                    task.result()
        finally:
            for task in (upload, download):
                task.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)

    async def _upload(self) -> None:
        machine = self._head.machine
        request = self._to_server.send(request_for_server(self._head, switches=self._asks_to_switch))
        self._meter.count_sent(len(request) + len(machine.trailing_data[0]))
        await self._send_up(request)
        while True:
            event = await self._next(machine)
            if event is h11.NEED_DATA:
                data = await self._receive(self._client, self._meter.send_room)
                self._meter.count_sent(len(data))
                machine.receive_data(data)
            elif isinstance(event, h11.Data):
                await self._send_up(self._to_server.send(h11.Data(data=bytes(event.data))))
            elif isinstance(event, h11.EndOfMessage):
                await self._send_up(self._to_server.send(h11.EndOfMessage()))
                return
            else:
                raise Ended(reasons.BROKEN)

    async def _send_up(self, data: bytes) -> None:
        try:
            await self._upstream.send(data)
        except OSError:
            pass  # a server that takes no more may still have answered; the download finds out

    async def _next(self, machine: h11.Connection) -> object:
        await self._share.step()
        try:
            return machine.next_event()
        except h11.RemoteProtocolError as error:
            raise Refusal(reasons.BAD_REQUEST, f"the body of the request can't be read: {shown(str(error))}") from error

    async def _download(self) -> None:
        while True:
            event = await self._next_of_server()
            if event is h11.NEED_DATA:
                data = await self._receive_down()
                self._meter.count_received(len(data))
                self._check_lines(data)
                self._to_server.receive_data(data)
            elif isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                await self._switch(event)
                return
            elif isinstance(event, h11.InformationalResponse):
                await self._inform(event)
            elif isinstance(event, h11.Response):
                await self._send_down(response_for_client(event))
            elif isinstance(event, h11.Data):
                await self._send_down(h11.Data(data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self._send_down(h11.EndOfMessage())
                return
            else:
                raise self._broken("it ended the connection")

    async def _receive_down(self) -> bytes:
        try:
            return await self._receive(self._upstream, self._meter.receive_room)
        except OSError as error:
            raise self._broken(error.strerror or "it broke the connection") from error

    async def _next_of_server(self) -> object:
        await self._share.step()
        try:
            return self._to_server.next_event()
        except h11.RemoteProtocolError as error:
            raise self._broken(shown(str(error))) from error

    def _check_lines(self, data: bytes) -> None:
        if not self._lines.allows(data):
            raise self._broken("its head has too many lines")

    def _broken(self, clause: str) -> Exception:
        if self.answered:
            return Ended(reasons.BROKEN)
        return Refusal(reasons.UNREACHED, f"{self._head.target} gave no response that can be read: {clause}")

    async def _inform(self, event: h11.InformationalResponse) -> None:
        self._informed += 1
        if self._informed > MAX_INFORMATIONAL_RESPONSES:
            raise self._broken("it sends informational responses without end")
        self._lines = LineLimit(RESPONSE_HEAD_LINES)
        self._check_lines(bytes(self._to_server.trailing_data[0]))
        # A client of HTTP/1.0 knows no such responses, and would take one for the final response.
        if self._head.request.http_version == b"1.1":
            headers = end_to_end(event.headers)
            await self._send_down(
                h11.InformationalResponse(status_code=event.status_code, headers=headers, reason=event.reason)
            )

    async def _switch(self, event: h11.InformationalResponse) -> None:
        """Switches to WebSocket; h11 refuses a 101 that was not requested. Bytes behind it were counted; sends them."""
        await self._send_down(switching(event))
        self.answered = self.has_switched = True
        await self._client.send(bytes(self._to_server.trailing_data[0]))
        await self._send_up(bytes(self._to_client.trailing_data[0]))

    async def _send_down(self, event: h11.Event) -> None:
        try:
            data: Optional[bytes] = self._to_client.send(event)
        except h11.LocalProtocolError as error:
            raise self._broken(shown(str(error))) from error
        if data:
            self.answered = self.answered or not isinstance(event, h11.InformationalResponse)
            await self._client.send(data)

    async def _receive(self, source: Endpoint, room: Callable[[], int]) -> bytes:
        """Returns the available bytes, at most as many as may be moved at the moment of the read."""
        while True:
            size = room()
            if not size:
                await self._meter.room_opened()
                continue
            try:
                return source.sock.recv(size)
            except (BlockingIOError, InterruptedError):
                await source.readable()
