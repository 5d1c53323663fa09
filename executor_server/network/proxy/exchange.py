"""One request and its response between the two sides of a terminated connection.

Theory of operation. There are two h11 machines: one is the sandbox's server, the other the real server's client. Events
pass between them, never bytes, so each side has our own framing: no length, transfer coding or header line of one
connection reaches the other as it was written, and no second request can hide in a body. Request and response are
transferred at the same time, each at the pace of its receiver, with one piece per direction in memory.

The secret's header is set here, on the next request only, after all headers of that name were removed, in all spellings
that a gateway might fold into one.
"""

from __future__ import annotations

import asyncio
import contextlib

import h11

from executor_server.guest.egress import reasons
from executor_server.guest.egress.connection import Connection
from executor_server.guest.egress.endpoint import DeadlinePassed, LoopShare
from executor_server.guest.egress.forward import (
    MAX_INFORMATIONAL_RESPONSES,
    RESPONSE_HEAD_LINES,
    UPGRADE_HEADERS,
    Headers,
    asks_for_websocket,
    end_to_end,
    has_header,
    switching,
)
from executor_server.guest.egress.head import LineLimit, check_framing
from executor_server.guest.egress.host_names import BadName, LiteralAddress, Target, parse_authority
from executor_server.guest.egress.refusals import Ended, Refusal, failure, response_to, shown
from executor_server.network.proxy.request_secrets import Ambiguous, is_spelling_of, secrets_for
from executor_server.network.proxy.secrets import SecretMissing, Secrets
from executor_server.network.proxy.tls import TlsStream
from executor_server.network.proxy.upstream_servers import Server, Servers

HEAD_BYTES = 32_768
HEAD_LINES = 256
HEAD_S = 30.0
LINGER_S = 2.0
_HTTPS_PORT = 443


class Client:
    """The sandbox's side: its TLS stream, and its HTTP machine."""

    def __init__(self, stream: TlsStream) -> None:
        self.stream = stream
        self.machine = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)


class Exchange:
    def __init__(self, tunnel: Connection, client: Client, servers: Servers, secrets: Secrets) -> None:
        self._tunnel = tunnel
        self._client = client
        self._servers = servers
        self._secrets = secrets
        self._share = LoopShare()
        self._informed = 0
        self._answered = False  # the response has begun
        self._heard = False  # the server has sent something

    async def run(self) -> bool:
        """Returns True if the connection can take another request. Raises OSError, Ended, DeadlinePassed."""
        request: h11.Request | None = None
        try:
            request = await self._read_head()
            if request is None:
                return False
            outgoing, secret_header = self._outgoing(request)
            server = await self._servers.connect()
            if secret_header:
                self._tunnel.secret_used = secret_header
            return await self._relay(request, outgoing, server)
        except (Ended, OSError, DeadlinePassed):
            raise
        except Exception as error:
            refusal = error if isinstance(error, Refusal) else failure(error)
            await self._tunnel.deny(refusal)
            if self._answered:
                raise OSError(0, refusal.message) from error
            with_body = request is None or request.method != b"HEAD"
            await self._client.stream.send(response_to(refusal, with_body=with_body))
            await self._finish()
            return False

    # ------------------------------------------------------------------------------------------------------------------
    # The request

    async def _read_head(self) -> h11.Request | None:
        """Returns the next request; None at the end. A client may idle between requests, but not within a head."""
        machine = self._client.machine
        deadline: float | None = None
        lines = LineLimit(HEAD_LINES)
        data = machine.trailing_data[0]  # clients may send their next request before the response
        while True:
            if not lines.allows(data):
                raise Refusal(reasons.HEAD_TOO_LARGE, "the head of the request has more lines than the proxy reads")
            try:
                event = machine.next_event()
            except h11.RemoteProtocolError as error:
                raise _unreadable(error) from error
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            try:
                data = await self._client.stream.receive(deadline)
            except DeadlinePassed:
                raise Refusal(reasons.HEAD_TIMEOUT, "the head of the request was not complete in time") from None
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + HEAD_S
            machine.receive_data(data)

    def _outgoing(self, request: h11.Request) -> tuple[h11.Request, str]:
        """Returns the request for the server, and the name of the header with the secret. Raises Refusal."""
        check_framing(request)
        self._check_target(request)
        rules = self._tunnel.allowed.secrets
        try:
            chosen = secrets_for(rules, bytes(request.method), bytes(request.target), request.headers)
            filled = [(rule.header.encode("ascii"), self._secrets.fill(rule.value)) for rule in chosen]
        except Ambiguous as error:
            message = f"the request to {self._tunnel.target} {error}; send it in its plain form"
            raise Refusal(reasons.AMBIGUOUS_PATH, message) from error
        except SecretMissing as error:
            message = f"requests to {self._tunnel.target} need a secret that the proxy does not have"
            raise Refusal(reasons.SECRET_MISSING, message) from error
        kept = [
            (name, value)
            for name, value in end_to_end(request.headers)
            if not any(is_spelling_of(name, rule.header) for rule in chosen)
        ]
        headers: Headers = [(b"Host", _host_of(self._tunnel.target)), *kept, *filled]
        if has_header(request.headers, b"transfer-encoding"):
            headers.append((b"Transfer-Encoding", b"chunked"))
        if asks_for_websocket(request):
            headers += UPGRADE_HEADERS
        outgoing = h11.Request(method=request.method, target=request.target, headers=headers)
        return outgoing, chosen[0].header if chosen else ""

    def _check_target(self, request: h11.Request) -> None:
        """The request must be for the name that the tunnel was made to: a certificate may be good for many."""
        target = self._tunnel.target
        if not (request.target.startswith(b"/") or (request.target == b"*" and request.method == b"OPTIONS")):
            raise Refusal(reasons.BAD_REQUEST, f"the target of a request to {target} must be a path")
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if len(hosts) != 1 or not _is_for(hosts[0], target):
            other = shown(hosts[0]) if any(hosts) else "no host"
            message = f"the tunnel was asked for {target}, and the request in it is for {other}"
            raise Refusal(reasons.MISDIRECTED, message)

    # ------------------------------------------------------------------------------------------------------------------
    # Both directions

    async def _relay(self, request: h11.Request, outgoing: h11.Request, server: Server) -> bool:
        upload = self._tunnel.create_task(self._upload(outgoing, server))
        download = self._tunnel.create_task(self._download(request, server))
        try:
            # A server may answer before it has read the whole request; then the rest is not awaited.
            await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
            if not download.done():
                upload.result()
                await download
            switched = download.result()
            if upload.done():
                upload.result()
        except _Unheard:
            await self._finish()
            return False
        finally:
            for task in (upload, download):
                task.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)
        if switched:
            await self._switch(server)
            return False
        machine = self._client.machine
        if machine.our_state is h11.DONE and machine.their_state is h11.DONE:
            machine.start_next_cycle()
            return True
        await self._finish()
        return False

    async def _upload(self, outgoing: h11.Request, server: Server) -> None:
        machine = self._client.machine
        await self._send_up(server, outgoing)
        while True:
            await self._share.step()
            try:
                event = machine.next_event()
            except h11.RemoteProtocolError as error:
                raise Refusal(
                    reasons.BAD_REQUEST, f"the body of the request can't be read: {shown(str(error))}"
                ) from error
            if event is h11.NEED_DATA:
                machine.receive_data(await self._client.stream.receive())
            elif isinstance(event, h11.Data):
                await self._send_up(server, h11.Data(data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                # Without the trailers, which were not checked: a server may treat them as headers.
                await self._send_up(server, h11.EndOfMessage())
                return
            else:
                raise Ended(reasons.BROKEN)

    async def _send_up(self, server: Server, event: h11.Event) -> None:
        data = server.machine.send(event)
        assert data is not None
        # A server that stops reading may have answered anyway; the download finds out.
        with contextlib.suppress(OSError):
            await server.stream.send(data)

    async def _download(self, request: h11.Request, server: Server) -> bool:
        """Returns True if the server has switched to another protocol."""
        lines = LineLimit(RESPONSE_HEAD_LINES)
        while True:
            await self._share.step()
            event = self._next_of(server)
            if event is h11.NEED_DATA:
                data = await self._receive_down(server)
                self._check_lines(server, lines, data)
                server.machine.receive_data(data)
            elif isinstance(event, h11.InformationalResponse):
                lines = LineLimit(RESPONSE_HEAD_LINES)
                self._check_lines(server, lines, server.machine.trailing_data[0])
                self._informed += 1
                if self._informed > MAX_INFORMATIONAL_RESPONSES:
                    raise self._broken(server, "it sends informational responses without end")
                if event.status_code == 101:
                    await self._send_down(switching(event))
                    return True
                # An HTTP/1.0 client would take it for the response.
                if request.http_version == b"1.1":
                    headers = end_to_end(event.headers)
                    await self._send_down(h11.InformationalResponse(status_code=event.status_code, headers=headers))
            elif isinstance(event, h11.Response):
                self._answered = True
                await self._send_down(_response(event))
            elif isinstance(event, h11.Data):
                await self._send_down(h11.Data(data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self._send_down(h11.EndOfMessage())
                return False
            else:
                raise self._broken(server, "it ended the connection")

    def _check_lines(self, server: Server, lines: LineLimit, data: bytes) -> None:
        if not lines.allows(data):
            raise self._broken(server, "its head has too many lines")

    def _next_of(self, server: Server) -> object:
        try:
            return server.machine.next_event()
        except h11.RemoteProtocolError as error:
            raise self._broken(server, shown(str(error))) from error

    async def _receive_down(self, server: Server) -> bytes:
        try:
            data = await server.stream.receive()
        except OSError as error:  # errors of TLS are among them
            raise self._broken(server, "it broke the connection") from error
        self._heard = self._heard or bool(data)
        return data

    async def _send_down(self, event: h11.Event) -> None:
        try:
            data = self._client.machine.send(event)
        except h11.LocalProtocolError as error:
            raise Ended(reasons.BROKEN) from error  # a response that can't be written in HTTP/1.1
        if data:
            await self._client.stream.send(data)

    def _broken(self, server: Server, clause: str) -> Exception:
        if self._answered:
            return Ended(reasons.BROKEN)
        if server.was_used and not self._heard:
            return _Unheard()
        return Refusal(reasons.UNREACHED, f"{self._tunnel.target} gave no response that can be read: {clause}")

    # ------------------------------------------------------------------------------------------------------------------
    # The end

    async def _switch(self, server: Server) -> None:
        """Copies bytes in both directions until one side has ended."""
        client = self._client
        await server.stream.send(client.machine.trailing_data[0])
        await client.stream.send(server.machine.trailing_data[0])
        directions = {
            self._tunnel.create_task(_copy(client.stream, server.stream)),
            self._tunnel.create_task(_copy(server.stream, client.stream)),
        }
        try:
            done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in done:
                direction.result()
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _finish(self) -> None:
        """Ends the client's side so that the client can still read the response while it sends."""
        stream = self._client.stream
        await stream.close(asyncio.get_running_loop().time() + LINGER_S)
        await stream.endpoint.linger(LINGER_S)


class _Unheard(Exception):
    """A reused connection ended without a response, since the server closed it while the request was sent.

    The client's connection ends in the same way, since only the client knows which requests may be repeated.
    """


async def _copy(source: TlsStream, target: TlsStream) -> None:
    while data := await source.receive():
        await target.send(data)


def _response(response: h11.Response) -> h11.Response:
    headers = end_to_end(response.headers)
    if has_header(response.headers, b"transfer-encoding"):
        # The server's coding goes before its length (RFC 9112, section 6.3), so the length says nothing.
        headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return h11.Response(status_code=response.status_code, headers=headers, reason=response.reason)


def _is_for(host: str, target: Target) -> bool:
    try:
        return parse_authority(host, default_port=_HTTPS_PORT) == target
    except LiteralAddress as error:
        return error.target == target
    except BadName:
        return False


def _host_of(target: Target) -> bytes:
    text = str(target)
    return (text.rpartition(":")[0] if target.port == _HTTPS_PORT else text).encode("ascii")


def _unreadable(error: h11.RemoteProtocolError) -> Refusal:
    if error.error_status_hint == 431:
        return Refusal(reasons.HEAD_TOO_LARGE, "the head of the request is larger than the proxy reads")
    return Refusal(reasons.BAD_REQUEST, f"the request can't be read: {shown(str(error))}")
