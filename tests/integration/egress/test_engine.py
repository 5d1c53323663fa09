"""The proxy engine over real sockets: tunnels, plain requests, records, limits, changes of rules."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_server.guest.egress import reasons
from executor_server.guest.egress.connection import Connection
from executor_server.guest.egress.protocols import Used
from executor_server.guest.egress.refusals import Refusal
from tests.support.certificates import Authority
from tests.support.egress_engine import SESSION, SOON_S, Engine, Handler, Recorder, client_hello, echo, engine
from tests.support.polling import eventually_async

MIB = 2**20


def _status(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def _header(response: bytes, name: bytes) -> bytes:
    for line in response.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]:
        key, _, value = line.partition(b": ")
        if key.lower() == name.lower():
            return value
    return b""


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    async with asyncio.timeout(SOON_S):
        return await reader.readexactly(count)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Reads to the end; a reset is an end too."""
    data = b""
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                data += piece
    return data


# ----------------------------------------------------------------------------------------------------------------------
# Tunnels


async def test_tunnel_copies_both_ways_and_is_reported_from_beginning_to_end() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"echo.example:{port}")
        reader, writer = await running.tunnel(f"Echo.Example.:{port}")
        writer.write(b"hello")
        assert await _exactly(reader, 5) == b"hello"
        assert running.recorder.opened_connections[0]["reason"] == ""
        writer.write_eof()
        assert await _rest(reader) == b""
        closed = await running.recorder.last_closed()
        assert {**closed, "connection_id": "", "duration_s": 0} == {
            "connection_id": "",
            "host": "echo.example",
            "port": port,
            "address": "127.0.0.1",
            "rule": f"echo.example:{port}",
            "sent_bytes": 5,
            "received_bytes": 5,
            "duration_s": 0,
            "reason": reasons.ENDED,
            "secret_used": "",
        }
        assert closed["connection_id"] == running.recorder.opened_connections[0]["connection_id"]
        assert (running.recorder.sent_bytes, running.recorder.received_bytes) == (5, 5)


async def test_bytes_behind_the_head_of_a_connect_are_the_tunnels_first() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"echo.example:{port}")
        reader, _ = await running.tunnel(f"echo.example:{port}", b"early")
        assert await _exactly(reader, 5) == b"early"


async def test_end_of_either_side_is_passed_on_and_the_other_direction_goes_on() -> None:
    seen = asyncio.Event()

    async def ends_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first and last")
        writer.write_eof()
        assert await reader.read(-1) == b"still sending"
        seen.set()

    async def answers_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d bytes" % len(await reader.read(-1)))

    async with engine() as running:
        ports = [await running.start_server(ends_first), await running.start_server(answers_at_the_end)]
        running.allow(*(f"a.example:{port}" for port in ports))
        reader, writer = await running.tunnel(f"a.example:{ports[0]}")
        assert await _rest(reader) == b"first and last"
        writer.write(b"still sending")
        writer.write_eof()
        async with asyncio.timeout(SOON_S):
            await seen.wait()
        reader, writer = await running.tunnel(f"a.example:{ports[1]}")
        writer.write(b"x" * 300_000)
        writer.write_eof()
        assert await _rest(reader) == b"300000 bytes"
        await running.recorder.last_closed(2)
        assert [record["reason"] for record in running.recorder.closed_connections] == [reasons.ENDED] * 2


async def test_nothing_is_lost_or_changed_in_a_large_transfer_with_slow_readers() -> None:
    """Back-pressure in both directions at once: what a peer does not take waits, in order."""
    block = bytes(range(256)) * 4096

    async def source(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send() -> None:
            for _ in range(16):
                writer.write(block)
                await writer.drain()

        sending = asyncio.create_task(send())
        received = await reader.readexactly(len(block) * 16)
        assert received == block * 16
        await sending

    async with engine() as running:
        port = await running.start_server(source)
        running.allow(f"a.example:{port}")
        reader, writer = await running.tunnel(f"a.example:{port}")
        sending = asyncio.create_task(_send_blocks(writer, block, 16))
        assert await _exactly(reader, len(block) * 16) == block * 16
        await sending
        writer.write_eof()
        closed = await running.recorder.last_closed()
        assert (closed["sent_bytes"], closed["received_bytes"]) == (len(block) * 16, len(block) * 16)
        assert (running.recorder.sent_bytes, running.recorder.received_bytes) == (len(block) * 16, len(block) * 16)


async def _send_blocks(writer: asyncio.StreamWriter, block: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(block)
        await writer.drain()


async def test_a_reset_of_the_server_is_a_broken_connection() -> None:
    async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with engine() as running:
        port = await running.start_server(resets)
        running.allow(f"a.example:{port}")
        reader, writer = await running.tunnel(f"a.example:{port}")
        writer.write(b"x")
        await _rest(reader)
        assert (await running.recorder.last_closed())["reason"] == reasons.BROKEN


# ----------------------------------------------------------------------------------------------------------------------
# TLS in tunnels. The dialled address is a server on another port: tests can't listen on 443.


class PortConnector:
    """Connects to 127.0.0.1 at another port than the target's, and notes what it was asked for."""

    def __init__(self) -> None:
        self.ports: dict[int, int] = {}
        self.connected: list[tuple[str, str]] = []

    async def connect(self, target: Any, address: str, deadline: float) -> socket.socket:
        self.connected.append((str(target), address))
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.ports[target.port]))
        return sock


def _contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority(directory)
    pair = authority.server()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair.cert, pair.key)
    return server, ssl.create_default_context(cafile=authority.cert)


async def test_tls_goes_through_when_its_server_name_is_the_connects(tmp_path: Path) -> None:
    server, client = _contexts(tmp_path)
    connector = PortConnector()
    async with engine(connector=connector) as running:
        connector.ports[443] = await running.start_server(echo, server)
        running.allow("localhost:443")
        reader, writer = await running.tunnel("localhost:443")
        async with asyncio.timeout(SOON_S):
            await writer.start_tls(client, server_hostname="localhost")
        writer.write(b"secret words")
        assert await _exactly(reader, 12) == b"secret words"
        assert running.recorder.denials == []


async def test_a_server_that_asks_for_another_clienthello_gets_none_for_another_name(tmp_path: Path) -> None:
    """The client has no key for the server's only curve, so OpenSSL asks it to try again."""
    server, client = _contexts(tmp_path)
    server.set_ecdh_curve("secp384r1")
    asked: list[str | None] = []
    server.sni_callback = lambda _, name, __: asked.append(name)
    connector = PortConnector()
    async with engine(connector=connector) as running:
        connector.ports[443] = await running.start_server(echo, server)
        running.allow("localhost:443")
        reader, writer = await running.tunnel("localhost:443")
        async with asyncio.timeout(SOON_S):
            await writer.start_tls(client, server_hostname="localhost")
        writer.write(b"secret words")
        assert await _exactly(reader, 12) == b"secret words"
        assert asked == ["localhost", "localhost"]

        asked.clear()
        reader, writer = await running.tunnel("localhost:443", client_hello("localhost"))
        async with asyncio.timeout(SOON_S):
            assert (await reader.readexactly(6))[5] == 2  # a ServerHello: the request to try again
        writer.write(client_hello("other.example", curve="secp384r1"))
        await _rest(reader)
        assert (await running.recorder.last_closed())["reason"] == reasons.SERVER_NAME
        (denial,) = running.recorder.denials
        assert "names other.example instead" in denial["message"]
        assert asked == ["localhost"]


@pytest.mark.parametrize(
    ("first_bytes", "reason", "said"),
    [
        (client_hello("other.example"), reasons.SERVER_NAME, "names other.example instead"),
        (client_hello(None), reasons.SERVER_NAME, "has no server name"),
        (client_hello("a.example").replace(b"a.example", b"a.\xffxample"), reasons.SERVER_NAME, "can't be read"),
        (client_hello("b.a.example"), reasons.SERVER_NAME, "names b.a.example instead"),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", reasons.SERVER_NAME, "expects TLS"),
        (b"\x80\x2e\x01\x00\x02", reasons.SERVER_NAME, "expects TLS"),
        (b"\x16\x03\x01\x00\x05garbage", reasons.SERVER_NAME, "can't be read"),
        (client_hello("a.example", versions=(ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1)), reasons.OLD_TLS, "1.2"),
    ],
    ids=["other", "none", "not-ascii", "below", "plain-http", "sslv2", "garbage", "tls1.1"],
)
async def test_tunnel_to_443_is_closed_when_its_first_bytes_are_not_for_the_name(
    first_bytes: bytes, reason: str, said: str
) -> None:
    received = asyncio.get_running_loop().create_future()

    async def notes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.read(-1))

    connector = PortConnector()
    async with engine(connector=connector) as running:
        connector.ports[443] = await running.start_server(notes)
        running.allow("a.example:443")
        reader, _ = await running.tunnel("a.example:443", first_bytes)
        answer = await _rest(reader)
        assert answer == b"" or answer.startswith(b"\x15\x03")  # an alert
        closed = await running.recorder.last_closed()
        assert closed["reason"] == reason
        (denial,) = running.recorder.denials
        assert (denial["host"], denial["port"], denial["reason"]) == ("a.example", 443, reason)
        assert said in denial["message"]
        async with asyncio.timeout(SOON_S):
            assert await received == b"", "not one byte of it reached the server"


async def test_a_clienthello_in_pieces_is_held_until_it_is_complete() -> None:
    connector = PortConnector()
    async with engine(connector=connector) as running:
        connector.ports[443] = await running.start_server(echo)
        running.allow("a.example:443")
        reader, writer = await running.tunnel("a.example:443")
        hello = client_hello("A.Example")
        for at in range(len(hello)):
            writer.write(hello[at : at + 1])
            await writer.drain()
        assert await _exactly(reader, len(hello)) == hello


async def test_other_ports_take_any_protocol_and_check_a_clienthello_all_the_same() -> None:
    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        writer.write(await reader.readexactly(4))

    async with engine() as running:
        port = await running.start_server(greets)
        running.allow(f"mail.example:{port}")
        reader, writer = await running.tunnel(f"mail.example:{port}")
        assert await _exactly(reader, 11) == b"220 ready\r\n"
        writer.write(b"EHLO")
        assert await _rest(reader) == b"EHLO"
        await running.tunnel(f"mail.example:{port}", client_hello("other.example"))
        await running.recorder.until(lambda: running.recorder.denials)
        assert running.recorder.denials[0]["reason"] == reasons.SERVER_NAME


@pytest.mark.parametrize(
    ("request_head", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", ""),
        (b"GET / HTTP/1.1\r\nHost: A.EXAMPLE.:80\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", ""),
        (b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", reasons.MISDIRECTED),
        (b"GET / HTTP/1.1\r\nHost: a.example:8080\r\n\r\n", reasons.MISDIRECTED),
        (b"GET http://other.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", reasons.MISDIRECTED),
        (b"CONNECT other.example:80 HTTP/1.1\r\nHost: a.example\r\n\r\n", reasons.MISDIRECTED),
        (b"GET / HTTP/1.0\r\n\r\n", reasons.MISDIRECTED),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\nHost: other.example\r\n\r\n", reasons.BAD_REQUEST),
        (b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
         reasons.BAD_REQUEST),
        (b"SSH-2.0-client\r\n\r\n", reasons.BAD_REQUEST),
    ],
)  # fmt: skip
async def test_request_in_a_tunnel_to_80_is_for_the_name(request_head: bytes, reason: str) -> None:
    async with web_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as (running, heads):
        reader, _ = await running.tunnel("a.example:80", request_head)
        answer = await _rest(reader)
        if not reason:
            assert (_status(answer), answer[-2:]) == (200, b"ok")
            assert [_header(head, b"Host") for head in heads] == [b"a.example"]
            return
        assert _status(answer) == (421 if reason == reasons.MISDIRECTED else 400)
        assert running.recorder.denials[0]["reason"] == reason
        assert heads == []


@asynccontextmanager
async def web_server(response: bytes, then: Handler = echo) -> AsyncIterator[tuple[Engine, list[bytes]]]:
    """An engine with a server at port 80 of a.example: it notes each head, answers the first, and serves the rest."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(response)
        if b" 101 " in response:
            await then(reader, writer)
        elif more := await reader.read(65536):
            heads.append(more)

    connector = PortConnector()
    async with engine(connector=connector) as running:
        connector.ports[80] = await running.start_server(serve)
        running.allow("a.example:80")
        yield running, heads


_GET = b"GET / HTTP/1.1\r\nHost: a.example\r\n"
_EVIL = b"GET /evil HTTP/1.1\r\nHost: other.example\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive\r\n\r\nok"
_WEBSOCKET = _GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: key\r\n\r\n"
_SWITCHING = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: a\r\n\r\n"


@pytest.mark.parametrize(
    "first",
    [
        _GET + b"\r\n",
        _GET + b"Connection: keep-alive\r\n\r\n",
        _GET + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n\r\n",
        _GET + b"Upgrade: websocket, h2c\r\nConnection: Upgrade\r\n\r\n",
        _WEBSOCKET,
        b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_a_request_for_another_host_can_not_follow_in_a_tunnel_to_80(first: bytes) -> None:
    """At once, behind the first, and later, when it was answered as one that leaves the connection open."""
    async with web_server(_OK) as (running, heads):
        reader, _ = await running.tunnel("a.example:80", first + _EVIL)
        assert b"\r\nConnection: close" in (answer := await _rest(reader)) and _status(answer) == 200
        reader, writer = await running.tunnel("a.example:80", first)
        async with asyncio.timeout(SOON_S):
            assert _status(await reader.readuntil(b"ok")) == 200
        writer.write(_EVIL)
        assert await _rest(reader) == b""
        await running.recorder.last_closed(2)
        assert len(heads) == 2
        assert not any(b"evil" in head or b"other.example" in head or b"h2c" in head for head in heads)


async def test_a_tunnel_to_80_may_switch_to_websocket() -> None:
    """All that came behind the two heads is passed on and counted, and what follows is copied."""
    early, late = b"early frame", b"late frame"
    async with web_server(_SWITCHING + b"greeting") as (running, heads):
        reader, writer = await running.tunnel("a.example:80", _WEBSOCKET + early)
        async with asyncio.timeout(SOON_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert _status(head) == 101
        assert (_header(head, b"Upgrade"), _header(head, b"Sec-WebSocket-Accept")) == (b"websocket", b"a")
        assert (_header(heads[0], b"Upgrade"), _header(heads[0], b"Sec-WebSocket-Key")) == (b"websocket", b"key")
        assert await _exactly(reader, len(b"greeting" + early)) == b"greeting" + early
        writer.write(late)
        assert await _exactly(reader, len(late)) == late
        writer.write_eof()
        assert await _rest(reader) == b""
        closed = await running.recorder.last_closed()
        assert closed["sent_bytes"] == len(heads[0] + early + late)
        assert closed["received_bytes"] == len(_SWITCHING + b"greeting" + early + late)


async def test_a_server_that_switches_unasked_is_not_followed() -> None:
    async with web_server(_SWITCHING) as (running, heads):
        for first in (_GET + b"\r\n", _GET + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"):
            reader, _ = await running.tunnel("a.example:80", first + _EVIL)
            assert _status(await _rest(reader)) == 502
        assert len(heads) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Names and addresses


async def test_name_is_resolved_once_and_the_address_that_was_classified_is_connected_to() -> None:
    """The second answer is what a rebinding server would give: it is not asked for before the cache has gone."""
    connector = PortConnector()
    async with engine(connector=connector, cache_s=3600) as running:
        connector.ports[8443] = await running.start_server(echo)
        running.allow("a.example:8443")
        running.name("a.example", ["203.0.113.7"], ["10.0.0.1"])
        running.addresses.refused["10.0.0.1"] = "is a private address"
        await running.tunnel("a.example:8443")
        await running.tunnel("a.example:8443")
        assert running.names.asked == ["a.example"]
        assert connector.connected == [("a.example:8443", "203.0.113.7")] * 2


async def test_no_address_that_is_refused_is_connected_to_and_the_sandbox_does_not_learn_it() -> None:
    connector = PortConnector()
    async with engine(connector=connector, cache_s=0) as running:
        connector.ports[8443] = await running.start_server(echo)
        running.allow("a.example:8443")
        running.name("a.example", ["10.0.0.1", "203.0.113.7"], ["10.0.0.1", "10.0.0.2"])
        running.addresses.refused = {"10.0.0.1": "is a private address", "10.0.0.2": "is a private address"}
        await running.tunnel("a.example:8443")
        answer = await running.ask(b"CONNECT a.example:8443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert _status(answer) == 403
        assert b"a.example:8443 is refused: its address is a private address" in answer
        assert b"10.0.0" not in answer
        assert connector.connected == [("a.example:8443", "203.0.113.7")]
        assert running.recorder.denials[0]["address"] == "10.0.0.1"
        assert running.recorder.denials[0]["reason"] == reasons.REFUSED_ADDRESS


async def test_address_that_rules_list_is_classified_and_not_resolved() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"127.0.0.1:{port}")
        reader, writer = await running.tunnel(f"127.0.0.1:{port}")
        writer.write(b"x")
        assert await _exactly(reader, 1) == b"x"
        assert running.names.asked == []
        running.addresses.refused["127.0.0.1"] = "is a loopback address"
        answer = await running.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert _header(answer, b"X-Egress-Reason") == b"refused_address"


async def test_addresses_are_tried_in_their_order() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}")
        running.name("a.example", ["127.0.0.2", "127.0.0.1"])  # nothing listens on the first
        reader, writer = await running.tunnel(f"a.example:{port}")
        writer.write(b"x")
        assert await _exactly(reader, 1) == b"x"
        assert running.recorder.opened_connections[0]["address"] == "127.0.0.1"


async def test_a_name_that_can_not_be_reached_says_why() -> None:
    async with engine(resolve_s=0.01) as running:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        running.allow(f"closed.example:{port}", "*.none.example", "*.hangs.example", "*.empty.example")
        running.names.hanging.add("x.hangs.example")
        running.names.answers["x.empty.example"] = [()]
        for host, status, reason, said in (
            (f"closed.example:{port}", 502, "unreached", b"Connection refused"),
            ("x.none.example:443", 502, "unresolved", b"x.none.example does not exist"),
            ("x.empty.example:443", 502, "unresolved", b"has no addresses"),
            ("x.hangs.example:443", 504, "resolver_timeout", b"could not be resolved in time"),
        ):
            answer = await running.ask(f"CONNECT {host} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (_status(answer), _header(answer, b"X-Egress-Reason")) == (status, reason.encode())
            assert said in answer.partition(b"\r\n")[0]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


async def test_refusal_is_in_the_reason_phrase_and_the_body_and_reported_before_the_answer() -> None:
    answered = asyncio.Event()
    async with engine() as running:
        running.allow("pypi.org", "*.pythonhosted.org")

        async def not_yet_answered() -> None:
            assert not answered.is_set()

        running.recorder.before_answer = not_yet_answered
        answer = await running.ask(b"CONNECT api.x.com:443 HTTP/1.1\r\nHost: api.x.com:443\r\n\r\n")
        answered.set()
        sentence = b"api.x.com:443 is not allowed for this session; allowed: pypi.org, *.pythonhosted.org"
        assert answer.startswith(b"HTTP/1.1 403 " + sentence + b"\r\n")
        assert answer.endswith(b"\r\n\r\n" + sentence + b"\n")
        assert _header(answer, b"X-Egress-Reason") == b"not_allowed"
        assert _header(answer, b"Connection") == b"close"
        assert running.recorder.denials == [
            {"host": "api.x.com", "port": 443, "reason": "not_allowed", "message": sentence.decode(), "address": ""}
        ]
        assert running.names.asked == []


async def test_answer_does_not_wait_for_a_report_that_does_not_arrive() -> None:
    async with engine(notice_s=0.01) as running:

        async def never() -> None:
            await asyncio.get_running_loop().create_future()

        running.recorder.before_answer = never
        assert _status(await running.ask(b"CONNECT a.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")) == 403


# ----------------------------------------------------------------------------------------------------------------------
# Changes, quotas, ends


async def test_connections_whose_rule_is_gone_end_at_once_and_others_go_on() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}", f"b.example:{port}")
        gone, _ = await running.tunnel(f"a.example:{port}")
        kept, writer = await running.tunnel(f"b.example:{port}")
        running.change({"allowed": [f"b.example:{port}"]})
        assert await _rest(gone) == b""
        assert (await running.recorder.last_closed())["reason"] == reasons.RULE_GONE
        writer.write(b"x")
        assert await _exactly(kept, 1) == b"x"


async def test_connection_that_is_being_made_ends_with_its_rule() -> None:
    async with engine() as running:
        running.allow("slow.example:443")
        running.names.hanging.add("slow.example")
        reader, writer = await running.connect()
        writer.write(b"CONNECT slow.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            await running.names.hung.wait()
        running.change({"allowed": ["b.example"]})
        assert await _rest(reader) == b""
        assert await eventually_async(lambda: running.names.in_flight == 0)


async def test_exhausted_quota_ends_what_runs_refuses_what_comes_and_is_lifted_again() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}")
        reader, _ = await running.tunnel(f"a.example:{port}")
        running.proxy.set_exhausted(SESSION, reasons.TENANT_QUOTA)
        assert await _rest(reader) == b""
        assert (await running.recorder.last_closed())["reason"] == reasons.TENANT_QUOTA
        answer = await running.ask(f"CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert _header(answer, b"X-Egress-Reason") == b"tenant_quota"
        running.proxy.set_exhausted(SESSION, None)
        await running.tunnel(f"a.example:{port}")


async def test_connection_ends_when_its_time_is_over() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}", max_connection_s=0.02)
        reader, _ = await running.tunnel(f"a.example:{port}")
        assert await _rest(reader) == b""
        assert (await running.recorder.last_closed())["reason"] == reasons.TIME_LIMIT


async def _pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An upstream that sends without end, once it is asked."""
    await reader.readexactly(1)
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def test_received_bytes_end_at_their_limit_for_all_connections_together() -> None:
    async with engine(used=Used(sent_bytes=0, received_bytes=MIB)) as running:
        port = await running.start_server(_pours)
        running.allow(f"a.example:{port}", max_received_bytes=3 * MIB)
        tunnels = [await running.tunnel(f"a.example:{port}") for _ in range(4)]
        for _, writer in tunnels:
            writer.write(b"x")
        received = await asyncio.gather(*(_rest(reader) for reader, _ in tunnels))
        await running.recorder.last_closed(4)
        assert running.recorder.received_bytes == 2 * MIB
        assert sum(len(data) for data in received) <= 2 * MIB
        assert {record["reason"] for record in running.recorder.closed_connections} == {reasons.RECEIVED_BYTES}
        answer = await running.ask(f"CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert _header(answer, b"X-Egress-Reason") == b"received_bytes"
        assert b"has received its 3145728 bytes" in answer


async def test_sent_bytes_end_at_their_limit() -> None:
    async def swallows(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            pass

    async with engine() as running:
        port = await running.start_server(swallows)
        running.allow(f"a.example:{port}", max_sent_bytes=MIB)
        reader, writer = await running.tunnel(f"a.example:{port}")
        with contextlib.suppress(ConnectionError):
            await _send_blocks(writer, b"x" * MIB, 64)
        await _rest(reader)
        assert (await running.recorder.last_closed())["reason"] == reasons.SENT_BYTES
        assert running.recorder.sent_bytes == MIB


async def test_at_the_bound_of_both_directions_connections_wait_until_it_is_raised() -> None:
    async with engine() as running:
        port = await running.start_server(_pours)
        running.allow(f"a.example:{port}")
        running.proxy.allow(SESSION, MIB + 1)
        reader, _ = await running.tunnel(f"a.example:{port}", b"x")
        assert len(await _exactly(reader, MIB)) == MIB
        await running.recorder.until(lambda: running.recorder.received_bytes == MIB)
        # Half of the window is reported at once, so that it can be raised before it is used up.
        assert MIB // 2 <= running.recorder.reports[0][1] <= MIB // 2 + 65536
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.readexactly(1)
        assert running.recorder.closed_connections == []
        running.proxy.allow(SESSION, 2 * MIB + 1)
        assert len(await _exactly(reader, MIB)) == MIB
        await running.recorder.until(lambda: running.recorder.received_bytes == 2 * MIB)
        running.proxy.allow(SESSION, None)
        await _exactly(reader, 4 * MIB)


async def test_plain_requests_wait_at_the_bound_too() -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n" + b"y" * 500_000)
        await writer.drain()

    async with engine() as running:
        port = await running.start_server(answers)
        running.allow(f"a.example:{port}")
        running.proxy.allow(SESSION, 100_000)
        reader, writer = await running.connect()
        writer.write(f"GET http://a.example:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await running.recorder.until(lambda: running.recorder.sent_bytes + running.recorder.received_bytes >= 100_000)
        assert running.recorder.sent_bytes + running.recorder.received_bytes == 100_000
        running.proxy.allow(SESSION, 1_000_000)
        body = (await _rest(reader)).partition(b"\r\n\r\n")[2]
        assert body == b"y" * 500_000


async def test_more_connections_at_one_time_than_the_rules_allow_are_refused() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}", max_connections=2)
        connect = f"CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        first, _ = await running.tunnel(f"a.example:{port}"), await running.tunnel(f"a.example:{port}")
        answer = await running.ask(connect)
        assert (_status(answer), _header(answer, b"X-Egress-Reason")) == (429, b"too_many_connections")
        first[1].write_eof()
        await running.recorder.last_closed()
        await running.tunnel(f"a.example:{port}")


async def test_more_new_connections_in_a_minute_than_the_rules_allow_are_refused() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}", max_new_connections_per_minute=3)
        connect = f"CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        for _ in range(3):
            await running.tunnel(f"a.example:{port}")
        answer = await running.ask(connect)
        assert (_status(answer), _header(answer, b"X-Egress-Reason")) == (429, b"too_many_new_connections")


async def test_end_of_a_session_closes_its_listener_and_its_connections() -> None:
    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}")
        reader, _ = await running.tunnel(f"a.example:{port}")
        idle, _ = await running.connect()
        await running.proxy.end(SESSION)
        assert running.recorder.closed_connections[0]["reason"] == reasons.SESSION_ENDED
        assert await _rest(reader) == await _rest(idle) == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*running.address)
        await running.proxy.end(SESSION)
        running.change({})  # orders for a session that has ended are ignored
        running.proxy.allow(SESSION, 1)
        running.proxy.set_exhausted(SESSION, reasons.TENANT_QUOTA)


async def test_session_that_is_served_again_has_the_new_listener_and_keeps_what_its_rules_allow() -> None:
    from executor_server.guest.egress.host_rules import Rules

    async with engine() as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}")
        reader, writer = await running.tunnel(f"a.example:{port}")
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        running.proxy.serve(SESSION, listener, Rules.read(running.rules), used=Used(1, 2))
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*running.address)
        running.address = address
        await running.tunnel(f"a.example:{port}")
        writer.write(b"x")
        assert await _exactly(reader, 1) == b"x"


# ----------------------------------------------------------------------------------------------------------------------
# The seam of a terminator


class Terminating:
    """Ends each tunnel as the test wants it, and notes what it was given."""

    def __init__(self, error: Exception | None = None, waits: bool = False) -> None:
        self.error, self.waits = error, waits
        self.tunnels: list[Connection] = []

    async def terminate(self, tunnel: Connection) -> None:
        self.tunnels.append(tunnel)
        tunnel.count_sent(3)
        tunnel.count_received(4)
        tunnel.secret_used = "Authorization"
        if self.waits:
            await asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise self.error
        tunnel.client.send(b"terminated")


SECRET = {"host": "a.example", "header": "Authorization", "value": "Bearer ${x}"}


async def _terminated(running: Engine, terminator: Terminating) -> tuple[bytes, Recorder]:
    port = await running.start_server(echo)
    running.allow(f"a.example:{port}", secrets=[SECRET])
    reader, _ = await running.tunnel(f"a.example:{port}", b"hello")
    return await _rest(reader), running.recorder


async def test_tunnel_of_a_rule_with_secrets_goes_to_the_terminator() -> None:
    terminator = Terminating()
    async with engine(terminator=terminator) as running:
        answer, recorder = await _terminated(running, terminator)
        assert answer == b"terminated"
        (tunnel,) = terminator.tunnels
        assert (tunnel.buffered, tunnel.address, tunnel.target.host) == (b"hello", "127.0.0.1", "a.example")
        assert tunnel.allowed.secrets[0].header == "Authorization"
        closed = await recorder.last_closed()
        assert (closed["reason"], closed["secret_used"]) == (reasons.ENDED, "Authorization")
        assert (closed["sent_bytes"], closed["received_bytes"]) == (3, 4)


@pytest.mark.parametrize(
    ("error", "reason", "denials"),
    [
        (Refusal(reasons.UPSTREAM_CERTIFICATE, "its certificate has expired"), reasons.UPSTREAM_CERTIFICATE, 1),
        (ssl.SSLError("bad record"), reasons.BROKEN, 0),
        (ConnectionResetError(), reasons.BROKEN, 0),
    ],
    ids=["refusal", "ssl", "reset"],
)
async def test_what_a_terminator_raises_is_the_reason_of_the_end(error: Exception, reason: str, denials: int) -> None:
    async with engine(terminator=(terminator := Terminating(error))) as running:
        answer, recorder = await _terminated(running, terminator)
        assert answer == b""
        assert (await recorder.last_closed())["reason"] == reason
        assert len(recorder.denials) == denials


async def test_terminator_is_cancelled_when_the_secret_of_its_rule_changes() -> None:
    async with engine(terminator=(terminator := Terminating(waits=True))) as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}", secrets=[SECRET])
        reader, _ = await running.tunnel(f"a.example:{port}")
        running.change({**running.rules, "secrets": [{**SECRET, "value": "Bearer ${y}"}]})
        assert await _rest(reader) == b""
        assert (await running.recorder.last_closed())["reason"] == reasons.RULE_GONE
        assert terminator.tunnels
