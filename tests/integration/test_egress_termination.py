"""TLS that the proxy terminates to set a header: which requests get it, how they are framed, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from executor_server.guest.egress import reasons
from tests.integration.egress_termination import (
    HOST,
    TOKEN,
    Client,
    Termination,
    read_request,
    termination,
    values_of,
)
from tests.support.certificates import Authority, Pair, self_signed
from tests.support.egress_engine import SOON_S, client_hello

BEARER = f"Bearer {TOKEN}".encode()
MIB = 2**20
SIGNS = "!#$%&'*+-.^_`|~"


class Server:
    """Answers every request with the same bytes, and keeps what it got."""

    def __init__(
        self, answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", *, closes: bool = False
    ) -> None:
        self.answer = answer
        self.closes = closes
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head, body = await read_request(reader)
            self.heads.append(head)
            self.bodies.append(body)
            writer.write(self.answer)
            await writer.drain()
            if self.closes:
                return

    def values(self, name: bytes) -> list[bytes]:
        return values_of(self.heads[-1], name)


async def _refused(running: Termination, client: Client, status: int, reason: str) -> str:
    """The next answer refuses, and ends the connection; returns its sentence."""
    response = await client.response()
    assert (response.status, response.values(b"x-egress-reason")) == (status, [reason.encode()])
    assert await client.rest() == b""
    denial = running.engine.recorder.denials[-1]
    assert (denial["reason"], denial["host"], denial["port"]) == (reason, HOST, running.port)
    assert denial["message"] + "\n" == response.body.decode()
    return str(denial["message"])


# ----------------------------------------------------------------------------------------------------------------------
# The header


async def test_covered_request_gets_the_header_once_and_the_record_names_it(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        response = await client.get("/x", "User-Agent: t")
        assert (response.status, response.body) == (200, b"ok")
        assert server.values(b"authorization") == [BEARER]
        assert server.values(b"host") == [f"{HOST}:{running.port}".encode()]
        assert server.values(b"user-agent") == [b"t"]
        client.writer.close()
        closed = await running.engine.recorder.last_closed()
        assert closed["secret_used"] == "Authorization"
        assert TOKEN not in str(running.engine.recorder.__dict__)


@pytest.mark.parametrize(
    "headers",
    [
        ["Authorization: mine"],
        ["authorization: mine", "AUTHORIZATION: mine too"],
        ["Connection: authorization"],
        ["Connection: keep-alive, Authorization", "Authorization: mine"],
    ],
    ids=repr,
)
async def test_header_of_the_program_does_not_stay_beside_the_secret(tmp_path: Path, headers: list[str]) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        await (await running.connect()).get("/", *headers)
        assert server.values(b"authorization") == [BEARER]
        assert b"mine" not in server.heads[0]


async def test_spellings_that_gateways_fold_into_the_header_are_removed(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server, secret={"header": "X-Api-Key", "value": "${bot}"}) as running:
        await (await running.connect()).get(
            "/", *(f"X{a}Api{b}Key: mine" for a in SIGNS for b in SIGNS), "X-Api-Keys: other"
        )
        assert server.values(b"x-api-key") == [TOKEN.encode()]
        assert b"mine" not in server.heads[0]
        assert server.values(b"x-api-keys") == [b"other"]


async def test_request_that_is_not_covered_goes_out_as_the_program_made_it(tmp_path: Path) -> None:
    server = Server()
    secret = {"methods": ["GET"], "paths": ["/repos/acme/*"]}
    async with termination(tmp_path, server, secret=secret) as running:
        client = await running.connect()
        await client.get("/repos/acme/x?y=/../z")
        assert server.values(b"authorization") == [BEARER]
        await client.get("/repos/other/x", "Authorization: mine")
        assert server.values(b"authorization") == [b"mine"]
        client.send(f"DELETE /repos/acme/x HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        await client.response()
        assert server.values(b"authorization") == []
        assert [head.split(b" ")[1] for head in server.heads] == [
            b"/repos/acme/x?y=/../z",
            b"/repos/other/x",
            b"/repos/acme/x",
        ]
        assert server.connections == 1


async def test_trace_goes_out_without_the_header(tmp_path: Path) -> None:
    """The server's answer to a TRACE is the request that it got (RFC 9110)."""

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: message/http\r\nContent-Length: %d\r\n\r\n" % len(head) + head)

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"TRACE / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nAuthorization: mine\r\n\r\n")
        response = await client.response()
        assert values_of(response.body, b"authorization") == [b"mine"]
        client.writer.close()
        assert (await running.engine.recorder.last_closed())["secret_used"] == ""


async def test_request_whose_secret_is_missing_is_refused(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        running.secrets.replace({})
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        await _refused(running, client, 502, reasons.SECRET_MISSING)
    assert server.heads == []


async def test_mistake_of_ours_is_answered_with_an_id_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        monkeypatch.setattr(running.secrets, "fill", lambda _: next(iter(())))
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        message = await _refused(running, client, 502, reasons.PROXY_FAILED)
        assert [context["message"] in message for context in failures] == [True]
    assert server.heads == []


async def test_secret_that_was_replaced_is_set_in_the_next_request(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        await client.get("/")
        running.secrets.replace({"bot": "another"})
        await client.get("/")
        assert server.values(b"authorization") == [b"Bearer another"]


# ----------------------------------------------------------------------------------------------------------------------
# Requests that are refused before the server hears of them


@pytest.mark.parametrize(
    ("request_head", "status", "reason"),
    [
        ("GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", 421, reasons.MISDIRECTED),
        ("GET / HTTP/1.1\r\nHost: api.example:1\r\n\r\n", 421, reasons.MISDIRECTED),
        ("GET / HTTP/1.1\r\nHost: api.example@other.example\r\n\r\n", 421, reasons.MISDIRECTED),
        ("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 421, reasons.MISDIRECTED),
        ("GET / HTTP/1.1\r\nHost: \r\n\r\n", 421, reasons.MISDIRECTED),
        ("GET / HTTP/1.0\r\n\r\n", 421, reasons.MISDIRECTED),
        ("GET / HTTP/1.1\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET / HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET https://api.example/ HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET http://other.example/ HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("CONNECT other.example:443 HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET x HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET * HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET /repos/../x HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.AMBIGUOUS_PATH),
        ("GET /repos%2fx HTTP/1.1\r\nHost: {host}\r\n\r\n", 400, reasons.AMBIGUOUS_PATH),
        ("GET /repos/x HTTP/1.1\r\nHost: {host}\r\nX-Original-URL: /y\r\n\r\n", 400, reasons.AMBIGUOUS_PATH),
        (
            "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            reasons.BAD_REQUEST,
        ),
        (
            "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            400,
            reasons.BAD_REQUEST,
        ),
        ("POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding : chunked\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: +1\r\n\r\nx", 400, reasons.BAD_REQUEST),
        ("GET / HTTP/1.1\r\nHost: {host}\r\nA: b\r\n c\0d\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET / HTTP/2.0\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET / HTTP/1.2\r\nHost: {host}\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("\x16\x03\x01nonsense\r\n\r\n", 400, reasons.BAD_REQUEST),
        ("GET / HTTP/1.1\r\nHost: {host}\r\nA: " + "x" * 70_000 + "\r\n\r\n", 431, reasons.HEAD_TOO_LARGE),
    ],
    ids=lambda value: repr(value)[:50],
)
async def test_request_that_can_mislead_is_refused_with_the_reason(
    tmp_path: Path, request_head: str, status: int, reason: str
) -> None:
    server = Server()
    async with termination(tmp_path, server, secret={"paths": ["/repos/*"]}) as running:
        client = await running.connect()
        client.send(request_head.replace("{host}", client.authority).encode("latin-1"))
        await _refused(running, client, status, reason)
    assert server.heads == []


async def test_bad_body_ends_the_connection_and_not_the_proxy(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"POST / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n")
        await _refused(running, client, 400, reasons.BAD_REQUEST)
        assert (await (await running.connect()).get("/")).status == 200


async def test_slow_head_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_server.network.proxy.exchange.HEAD_S", 0.05)
    async with termination(tmp_path, Server()) as running:
        client = await running.connect()
        client.send("GET / HT")
        await _refused(running, client, 408, reasons.HEAD_TIMEOUT)


async def test_client_may_be_idle_between_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_server.network.proxy.exchange.HEAD_S", 0.05)
    async with termination(tmp_path, Server()) as running:
        client = await running.connect()
        await client.get("/")
        await asyncio.sleep(0.15)  # three times what a head may take
        assert (await client.get("/")).status == 200


# ----------------------------------------------------------------------------------------------------------------------
# Framing


async def test_second_request_in_a_body_stays_a_body(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        inner = f"GET /admin HTTP/1.1\r\nHost: {HOST}\r\n\r\n"
        host = f"Host: {HOST}:{running.port}"
        client.send(f"POST /a HTTP/1.1\r\n{host}\r\nContent-Length: {len(inner)}\r\n\r\n{inner}")
        await client.response()
        client.send(f"POST /b HTTP/1.1\r\n{host}\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.send(f"{len(inner):x};ext=1\r\n{inner}\r\n0\r\nAuthorization: trailer\r\n\r\n")
        await client.response()
        assert [head.split(b" ")[1] for head in server.heads] == [b"/a", b"/b"]
        assert server.bodies[0] == inner.encode()
        assert server.bodies[1] == f"{len(inner):x}\r\n{inner}\r\n0\r\n\r\n".encode()


async def test_pipelined_requests_are_answered_one_after_the_other(tmp_path: Path) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send("".join(f"GET /{n} HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n" for n in range(3)))
        async with asyncio.timeout(SOON_S):
            received = b""
            while received.count(b"\r\n\r\nok") < 3:
                received += await client.reader.read(65536)
        assert [head.split(b" ")[1] for head in server.heads] == [b"/0", b"/1", b"/2"]
        assert all(values_of(head, b"authorization") == [BEARER] for head in server.heads)


@pytest.mark.parametrize(
    ("answer", "method", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "GET", b"abc"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "GET", b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "GET", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", "GET", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", "HEAD", b""),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", "GET", b"x"),
        (b"HTTP/1.1 404 Not \xe4 Found\r\nContent-Length: 0\r\nX: \xe4\r\n\r\n", "GET", b""),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_response_arrives_as_it_was_meant_and_the_connection_goes_on(
    tmp_path: Path, answer: bytes, method: str, body: bytes
) -> None:
    server = Server(answer)
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        for _ in range(2):
            client.send(f"{method} / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
            response = await client.response(method.encode())
            assert response.body == body
            assert b"HTTP/1.1 %d" % response.status in answer
        assert server.connections == 1


async def test_response_that_ends_with_its_connection_is_passed_on(tmp_path: Path) -> None:
    server = Server(b"HTTP/1.1 200 OK\r\n\r\nto the end", closes=True)
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        assert (await client.get("/")).body == b"to the end"
        assert (await client.get("/")).body == b"to the end"
        assert server.connections == 2


async def test_each_connection_to_the_server_counts_and_is_reported(tmp_path: Path) -> None:
    """A server that closes after each response lets one tunnel make any number of connections."""
    server = Server(b"HTTP/1.1 200 OK\r\n\r\nto the end", closes=True)
    secret = {"paths": ["/with"]}
    async with termination(
        tmp_path, server, secret=secret, max_connections=1, max_new_connections_per_minute=2
    ) as running:
        recorder = running.engine.recorder
        client = await running.connect()
        assert (await client.get("/without")).status == 200
        assert (await client.get("/with")).status == 200
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        assert "may make 2 connections a minute" in await _refused(running, client, 429, reasons.TOO_MANY_NEW)
        assert server.connections == 2
        await recorder.last_closed(2)
        opened, closed = recorder.opened_connections, recorder.closed_connections
        ids = [each["connection_id"] for each in opened]
        assert len(set(ids)) == 2
        assert [each["connection_id"] for each in closed] == ids
        assert [each["secret_used"] for each in closed] == ["", "Authorization"]
        assert sum(each["sent_bytes"] for each in closed) == recorder.sent_bytes
        assert sum(each["received_bytes"] for each in closed) == recorder.received_bytes
        assert all(each["received_bytes"] for each in closed)


async def test_client_of_http_1_0_gets_a_response_without_chunks(tmp_path: Path) -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.0\r\nHost: {HOST}:{running.port}\r\n\r\n")
        answer = await client.rest()
        assert answer.endswith(b"\r\n\r\nabc")
        assert b"ransfer-" not in answer


async def test_continue_is_passed_on_before_the_body(tmp_path: Path) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert values_of(head, b"expect") == [b"100-continue"]
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(4) == b"body"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(
            f"PUT / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        )
        async with asyncio.timeout(SOON_S):
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        client.send("body")
        assert (await client.response()).status == 200


async def test_answer_before_the_end_of_the_body_arrives(tmp_path: Path) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await writer.drain()
        await reader.read(10 * MIB)

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"PUT / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nContent-Length: {10 * MIB}\r\n\r\n")
        client.send(b"x" * 1000)
        response = await client.response()
        assert (response.status, response.body) == (413, b"big")
        assert await client.rest() == b""


# ----------------------------------------------------------------------------------------------------------------------
# Servers that break HTTP


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"",
    ],
    ids=["no HTTP", "two lengths", "endless head", "switch unasked", "nothing"],
)
async def test_answer_that_can_not_be_read_is_a_bad_gateway(tmp_path: Path, answer: bytes) -> None:
    server = Server(answer, closes=True)
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        await _refused(running, client, 502, reasons.UNREACHED)


async def test_response_shorter_than_its_length_is_cut_off_and_not_completed(tmp_path: Path) -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort", closes=True)
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        answer = await client.rest()
        assert b"Content-Length: 100" in answer or answer == b""
        closed = await running.engine.recorder.last_closed()
        assert closed["reason"] == reasons.BROKEN


async def test_bytes_behind_a_response_are_no_part_of_the_next_one(tmp_path: Path) -> None:
    """A server, or an attacker behind it, could otherwise answer a request that was not sent yet."""
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfalse")
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        for number in (1, 2, 3):
            assert (await client.get(f"/{number}")).body == b"ok"
        assert server.connections == 3


async def test_connection_that_ends_while_it_is_reused_ends_without_an_answer(tmp_path: Path) -> None:
    """Only the client knows what may be sent twice; it takes this for the end of a connection that was idle."""
    requests = 0

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""):
            await read_request(reader)
            requests += 1
            writer.write(answer)

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        assert (await client.get("/")).status == 200
        client.send(f"POST / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nContent-Length: 0\r\n\r\n")
        assert await client.rest() == b""
        assert requests == 2
        assert running.engine.recorder.denials == []


def _expired(authority: Authority) -> Pair:
    return authority.site("expired", HOST, expired_since=timedelta(days=1))


def _of_another_host(authority: Authority) -> Pair:
    return authority.site("other", "other.example")


def _of_a_stranger(authority: Authority) -> Pair:
    return Authority(authority.directory / "stranger").site("site", HOST)


def _self_signed(authority: Authority) -> Pair:
    return self_signed(authority.directory, HOST, dns=[HOST])


@pytest.mark.parametrize("pair", [_expired, _of_another_host, _of_a_stranger, _self_signed])
async def test_server_whose_certificate_does_not_verify_gets_no_request(
    tmp_path: Path, pair: Callable[[Authority], Pair]
) -> None:
    server = Server()
    async with termination(tmp_path, server, pair=pair) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        message = await _refused(running, client, 502, reasons.UPSTREAM_CERTIFICATE)
        assert "its certificate does not verify" in message
    assert server.heads == []


async def test_server_of_old_tls_gets_no_request(tmp_path: Path) -> None:
    server = Server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to be old is its purpose
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with termination(tmp_path, server, server=context) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        await _refused(running, client, 502, reasons.UNREACHED)
    assert server.heads == []


# ----------------------------------------------------------------------------------------------------------------------
# Handshakes of the sandbox


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (client_hello("other.example"), reasons.SERVER_NAME),
        (client_hello(None), reasons.SERVER_NAME),
        (client_hello(HOST, versions=(ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1)), reasons.OLD_TLS),
        (b"GET / HTTP/1.1\r\nHost: api.example\r\n\r\n", reasons.SERVER_NAME),
        (b"\0" * 100, reasons.SERVER_NAME),
    ],
    ids=["another name", "no name", "old", "no TLS", "zeros"],
)
async def test_handshake_that_is_not_for_the_host_is_refused(tmp_path: Path, first: bytes, reason: str) -> None:
    server = Server()
    async with termination(tmp_path, server) as running:
        reader, writer = await running.engine.tunnel(f"{HOST}:{running.port}")
        writer.write(first)
        await Client(reader, writer).rest()
        closed = await running.engine.recorder.last_closed()
        assert closed["reason"] == reason
        assert running.engine.recorder.denials[-1]["reason"] == reason
    assert server.connections == 0


async def test_client_hello_behind_the_connect_is_not_lost(tmp_path: Path) -> None:
    async with termination(tmp_path, Server()) as running:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = running.context.wrap_bio(incoming, outgoing, server_hostname=HOST)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        reader, writer = await running.engine.tunnel(f"{HOST}:{running.port}", outgoing.read())
        async with asyncio.timeout(SOON_S):
            while True:
                incoming.write(await reader.read(65536))
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    writer.write(outgoing.read())
        assert client.version() == "TLSv1.3"


async def test_client_that_does_not_trust_the_proxy_breaks_its_connection_only(tmp_path: Path) -> None:
    async with termination(tmp_path, Server()) as running:
        _, writer = await running.engine.tunnel(f"{HOST}:{running.port}")
        with pytest.raises(ssl.SSLCertVerificationError):
            await writer.start_tls(ssl.create_default_context(), server_hostname=HOST)
        closed = await running.engine.recorder.last_closed()
        assert closed["reason"] == reasons.BROKEN
        assert (await (await running.connect()).get("/")).status == 200


# ----------------------------------------------------------------------------------------------------------------------
# Amounts, limits, ends


async def test_server_waits_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    sent = 0
    stalled = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (200 * MIB))
        while sent < 200 * MIB:
            writer.write(bytes(MIB))
            sent += MIB
            try:
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except TimeoutError:
                stalled.set()
                await writer.drain()

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            await stalled.wait()
        assert sent < 40 * MIB
        received = 0
        async with asyncio.timeout(60):
            while received < 100 * MIB:
                received += len(await client.reader.read(MIB))


async def test_large_upload_arrives_whole(tmp_path: Path) -> None:
    block = bytes(range(256)) * 4096

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(8):
            assert await reader.readexactly(len(block)) == block
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"PUT / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nContent-Length: {8 * len(block)}\r\n\r\n")
        for _ in range(8):
            client.send(block)
            await client.writer.drain()
        assert (await client.response()).status == 200
        client.writer.close()
        closed = await running.engine.recorder.last_closed()
        assert 8 * len(block) < closed["sent_bytes"] < 8.2 * len(block)


@pytest.mark.parametrize("limit", ["max_received_bytes", "max_sent_bytes"])
async def test_limit_of_bytes_ends_a_transfer(tmp_path: Path, limit: str) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * MIB))
        for _ in range(64):
            writer.write(bytes(MIB))
            await writer.drain()

    limits: dict[str, Any] = {limit: 2 * MIB}
    async with termination(tmp_path, server, **limits) as running:
        client = await running.connect()
        client.send(f"PUT / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nContent-Length: {64 * MIB}\r\n\r\n")
        sending = asyncio.create_task(_send_until_broken(client))
        await client.rest()
        await sending
        closed = await running.engine.recorder.last_closed()
        reason = {"max_received_bytes": reasons.RECEIVED_BYTES, "max_sent_bytes": reasons.SENT_BYTES}[limit]
        assert closed["reason"] == reason
        assert closed[limit.removeprefix("max_")] <= 2 * MIB + 512 * 1024


async def _send_until_broken(client: Client) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        for _ in range(64):
            client.send(bytes(MIB))
            await client.writer.drain()


async def test_change_of_rules_ends_a_connection_whose_secret_is_gone(tmp_path: Path) -> None:
    async with termination(tmp_path, Server()) as running:
        client = await running.connect()
        await client.get("/")
        running.engine.change({**running.engine.rules, "secrets": []})
        assert await client.rest() == b""
        assert (await running.engine.recorder.last_closed())["reason"] == reasons.RULE_GONE


async def test_client_that_leaves_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)  # the above does not wait where there is room, and a lost connection has room

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(f"GET / HTTP/1.1\r\nHost: {HOST}:{running.port}\r\n\r\n")
        await client.reader.readexactly(100_000)
        client.writer.transport.abort()
        closed = await running.engine.recorder.last_closed()
        assert closed["reason"] == reasons.BROKEN


# ----------------------------------------------------------------------------------------------------------------------
# Upgrades


async def test_websocket_passes_through_with_the_secret_on_its_request(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: abc\r\n\r\nfirst"
        )
        while data := await reader.read(65536):
            writer.write(b"<" + data + b">")

    async with termination(tmp_path, server) as running:
        client = await running.connect()
        client.send(
            f"GET /chat HTTP/1.1\r\nHost: {HOST}:{running.port}\r\nConnection: keep-alive, Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n"
        )
        async with asyncio.timeout(SOON_S):
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 ")
            assert values_of(head, b"sec-websocket-accept") == [b"abc"]
            assert values_of(head, b"upgrade") == [b"websocket"]
            assert await client.reader.readexactly(5) == b"first"
            client.send(b"one")
            assert await client.reader.readexactly(5) == b"<one>"
        assert values_of(heads[0], b"authorization") == [BEARER]
        assert values_of(heads[0], b"upgrade") == [b"websocket"]
        client.writer.close()
        await running.engine.recorder.last_closed()


@pytest.mark.parametrize("upgrade", ["h2c", "TLS/1.3", "websocket, h2c"])
async def test_other_upgrades_are_not_passed_on(tmp_path: Path, upgrade: str) -> None:
    """Requests inside another protocol could not be checked."""
    server = Server()
    async with termination(tmp_path, server) as running:
        client = await running.connect()
        response = await client.get("/", "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}")
        assert response.status == 200
        assert server.values(b"upgrade") == []
        assert server.values(b"connection") == []
