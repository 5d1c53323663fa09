"""Plain-HTTP requests through the proxy engine: what leaves is framed by us, what comes is passed on as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import h11
import pytest

from executor_server.guest.egress import reasons
from tests.support.egress_engine import SOON_S, Engine, engine

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
async def running() -> AsyncIterator[Engine]:
    async with engine() as ready:
        yield ready


class Server:
    """Answers one request with bytes of the test's, and keeps the request."""

    def __init__(self, response: bytes, *, reads_body: bool = True) -> None:
        self.response = response
        self.reads_body = reads_body
        self.requests: list[h11.Request] = []
        self.bodies: list[bytes] = []
        self.port = 0

    async def start(self, engine: Engine, host: str = "a.example") -> str:
        self.port = await engine.start_server(self)
        engine.allow(f"{host}:{self.port}")
        return f"http://{host}:{self.port}"

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        machine = h11.Connection(h11.SERVER)
        body = b""
        while True:
            event = machine.next_event()
            if event is h11.NEED_DATA:
                machine.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Request):
                self.requests.append(event)
                if not self.reads_body:
                    break
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                break
        self.bodies.append(body)
        writer.write(self.response)
        await writer.drain()


def _request(url: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {url} HTTP/{version}", "Host: lies.example", *headers, "", ""]).encode()


async def test_server_gets_the_checked_name_and_no_header_of_the_connection(running: Engine) -> None:
    server = Server(OK)
    url = await server.start(running)
    answer = await running.ask(
        _request(
            f"{url}/path?q=%2f",
            "Proxy-Authorization: Basic c2VjcmV0",
            "Proxy-Connection: keep-alive",
            "Connection: keep-alive, X-Own, Content-Length",
            "X-Own: 1",
            "Keep-Alive: 5",
            "TE: trailers",
            "Upgrade: h2c",
            "X-Kept: 2",
        )
    )
    assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    (request,) = server.requests
    assert (request.method, request.target) == (b"GET", b"/path?q=%2f")
    assert dict(request.headers) == {
        b"host": f"a.example:{server.port}".encode(),
        b"x-kept": b"2",
        b"connection": b"close",
    }
    closed = await running.recorder.last_closed()
    assert closed["reason"] == reasons.ENDED
    assert closed["received_bytes"] == len(OK)


async def test_body_with_a_length_is_streamed(running: Engine) -> None:
    server = Server(OK)
    url = await server.start(running)
    body = bytes(range(256)) * 4096
    headers = ("Connection: content-length", f"Content-Length: {len(body)}")
    assert (await running.ask(_request(url, *headers, method="POST") + body)).endswith(b"ok")
    assert server.bodies == [body]
    assert (b"content-length", str(len(body)).encode()) in list(server.requests[0].headers)


async def test_chunked_body_is_passed_on_chunked(running: Engine) -> None:
    server = Server(OK)
    url = await server.start(running)
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (size, b"x" * size) for size in (1, 1, 1, 5000, 70_000))
    request = _request(url, "Transfer-Encoding: chunked", method="PUT") + chunks + b"0\r\nTrailer: dropped\r\n\r\n"
    assert (await running.ask(request)).endswith(b"ok")
    assert server.bodies == [b"x" * 75_003]


async def test_client_that_expects_100_gets_it_from_the_server_before_it_sends(running: Engine) -> None:
    async def continues(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"expect: 100-continue" in head.lower()
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(4) == b"body"
        writer.write(OK)
        await writer.drain()

    port = await running.start_server(continues)
    running.allow(f"a.example:{port}")
    reader, writer = await running.connect()
    url = f"http://a.example:{port}/"
    writer.write(_request(url, "Expect: 100-continue", "Content-Length: 4", method="POST"))
    async with asyncio.timeout(SOON_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        assert (await reader.read(-1)).endswith(b"ok")


async def test_server_may_answer_before_it_has_read_the_body(running: Engine) -> None:
    server = Server(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n", reads_body=False)
    url = await server.start(running)
    reader, writer = await running.connect()
    writer.write(_request(url, "Expect: 100-continue", "Content-Length: 1000000", method="POST"))
    async with asyncio.timeout(SOON_S):
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 413 Too Large\r\n")


@pytest.mark.parametrize(
    ("method", "response"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n"),
        ("GET", b"HTTP/1.1 204 No Content\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 500\r\n"),
    ],
    ids=["head", "204", "304"],
)
async def test_response_without_a_body_ends_with_its_head(running: Engine, method: str, response: bytes) -> None:
    server = Server(response + b"\r\n")
    url = await server.start(running)
    answer = await running.ask(_request(url, method=method))
    assert answer == response + b"Connection: close\r\n\r\n"


async def test_chunks_of_a_response_are_passed_on_as_they_come(running: Engine) -> None:
    more = asyncio.Event()

    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 7\r\n\r\n5\r\nfirst\r\n")
        async with asyncio.timeout(SOON_S):
            await more.wait()
        writer.write(b"6\r\nsecond\r\n0\r\n\r\n")
        await writer.drain()

    port = await running.start_server(streams)
    running.allow(f"a.example:{port}")
    reader, writer = await running.connect()
    writer.write(_request(f"http://a.example:{port}/"))
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length" not in head.lower(), "a length beside a coding says nothing"
        assert await reader.readuntil(b"first\r\n") == b"5\r\nfirst\r\n"
        more.set()
        assert await reader.read(-1) == b"6\r\nsecond\r\n0\r\n\r\n"


async def test_client_of_http_1_0_gets_no_chunks_and_no_informational_response(running: Engine) -> None:
    server = Server(
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nok\r\n0\r\n\r\n"
    )
    url = await server.start(running)
    assert await running.ask(_request(url, version="1.0")) == b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok"


async def test_response_that_ends_with_its_connection_is_whole(running: Engine) -> None:
    server = Server(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 200_000)
    url = await server.start(running)
    answer = await running.ask(_request(url))
    machine = h11.Connection(h11.CLIENT)
    machine.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    machine.send(h11.EndOfMessage())
    machine.receive_data(answer)
    machine.receive_data(b"")
    body = b""
    while not isinstance(event := machine.next_event(), h11.EndOfMessage):
        body += bytes(event.data) if isinstance(event, h11.Data) else b""
    assert body == b"x" * 200_000


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a:\r\n" * 2000 + b"\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 20 + OK,
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n" + b"a:\r\n" * 2000 + b"\r\n",
    ],
    ids=["nothing", "ssh", "two lengths", "gzip", "101", "large", "lines", "1xx", "lines behind 1xx"],
)
async def test_what_is_no_response_is_a_502_that_says_so(running: Engine, response: bytes) -> None:
    server = Server(response)
    url = await server.start(running)
    answer = await running.ask(_request(url, version="1.0"))
    assert answer.startswith(b"HTTP/1.1 502 "), answer
    assert b"gave no response that can be read" in answer
    assert (await running.recorder.last_closed())["reason"] == reasons.UNREACHED


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfir",
    ],
    ids=["length", "chunks"],
)
async def test_response_shorter_than_it_said_is_not_passed_off_as_whole(running: Engine, response: bytes) -> None:
    server = Server(response)
    url = await server.start(running)
    answer = await running.ask(_request(url))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not answer.endswith(b"0\r\n\r\n")
    assert (await running.recorder.last_closed())["reason"] == reasons.BROKEN
    assert running.recorder.denials == []


async def test_response_longer_than_it_said_ends_at_its_length(running: Engine) -> None:
    server = Server(OK + b"HTTP/1.1 200 OK\r\nX-Second: response\r\n\r\n")
    url = await server.start(running)
    assert (await running.ask(_request(url))).endswith(b"\r\n\r\nok")


async def test_one_request_per_connection(running: Engine) -> None:
    server = Server(OK)
    url = await server.start(running)
    answer = await running.ask(_request(url) + _request(f"{url}/second"))
    assert answer.count(b"HTTP/1.1") == 1
    assert len(server.requests) == 1


async def test_body_that_can_not_be_read_is_refused(running: Engine) -> None:
    server = Server(OK)
    url = await server.start(running)
    answer = await running.ask(_request(url, "Transfer-Encoding: chunked", method="POST") + b"-5\r\nx\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.bodies == []


async def test_plain_http_to_the_port_of_tls_is_refused(running: Engine) -> None:
    running.allow("a.example")
    answer = await running.ask(_request("http://a.example:443/"))
    assert answer.startswith(b"HTTP/1.1 400 a.example:443 expects TLS")


async def test_refusal_of_a_head_request_has_no_body(running: Engine) -> None:
    answer = await running.ask(_request("http://b.example/", method="HEAD"))
    assert answer.startswith(b"HTTP/1.1 403 b.example:80 is not allowed")
    assert answer.endswith(b"\r\n\r\n")


async def test_answer_reaches_a_client_that_is_still_sending_its_body(running: Engine) -> None:
    """A proxy that closes with bytes unread resets the connection, and the program never learns the reason."""
    body = b"x" * 1_500_000
    request = _request("http://b.example/", f"Content-Length: {len(body)}", method="POST")
    answer = await running.ask(request + body)
    assert answer.startswith(b"HTTP/1.1 403 b.example:80 is not allowed")


async def test_client_that_leaves_in_mid_request_leaves_nothing_open(running: Engine) -> None:
    server = Server(OK)
    url = await server.start(running)
    _, writer = await running.connect()
    writer.write(_request(url, "Content-Length: 100", method="POST") + b"part")
    await running.recorder.until(lambda: running.recorder.opened_connections)
    writer.transport.abort()
    assert (await running.recorder.last_closed())["reason"] in {reasons.BROKEN, reasons.BAD_REQUEST}
