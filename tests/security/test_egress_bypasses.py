"""Attempts to get past the egress proxy, and resolvers that lie to it.

The engine is the real one, with the real classifier of addresses. Names are resolved by the test, and each connection is
made by a seam that remembers the address and leads to the test's server, so that an attempt that succeeded would be seen
wherever it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor_server.guest.egress import reasons
from executor_server.guest.egress.addresses import AddressRules
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Allowed, Rules
from executor_server.guest.egress.protocols import Connector
from tests.support.egress_attempts import NAMES, RULES, SERVER, Attempt, Rewritten, attempts, connect, get, rewritten
from tests.support.egress_engine import SOON_S, Engine, engine
from tests.support.rounds import rounds

PUBLIC = "198.51.99.1"
OWN = "198.51.99.2"  # public too, and an address of the host
CLASSIFIER = AddressRules((), lambda: [ipaddress.ip_address(OWN)])
ATTEMPTS = list(attempts())
HEADS = [
    connect("allowed.example:443"),
    connect("allowed.example:80") + get("/"),
    get("http://allowed.example/"),
    get("http://allowed.example/", more=b"Content-Length: 4\r\n") + b"body",
    get("http://allowed.example/", more=b"Transfer-Encoding: chunked\r\n") + b"4\r\nbody\r\n0\r\n\r\n",
    *(attempt.sent for attempt in ATTEMPTS if len(attempt.sent) < 400 and not attempt.unfinished),
]
PIECES = [
    *(
        b"evil.example",
        b"allowed.example",
        b"127.0.0.1",
        b"[::1]",
        b":443",
        b":80",
        b"http://",
        b"https://",
        b"CONNECT ",
    ),
    *(b"GET ", b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b"@", b"#", b"?", b"/", b"\\", b"%2e", b".", b":", b"//"),
    *(b"Host: evil.example\r\n", b"\r\n\r\n", b" HTTP/1.1\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Content-Length: 4\r\n", b"Connection: host\r\n", "\uff41\u3002".encode()),
]


class Everywhere(Connector):
    """Remembers what it connected to, and connects to the test's server."""

    def __init__(self) -> None:
        self.port = 0
        self.made: list[tuple[Target, str]] = []
        self.failures = 0  # so many of the next attempts fail

    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        self.made.append((target, address))
        if self.failures:
            self.failures -= 1
            raise ConnectionRefusedError("nothing listens")
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except BaseException:
            sock.close()
            raise
        return sock


@dataclass
class World:
    engine: Engine
    connector: Everywhere
    received: list[bytearray] = field(default_factory=list)  # by the server, one for each connection

    @property
    def made(self) -> list[tuple[Target, str]]:
        return self.connector.made

    async def send(self, data: bytes, *, end: bool = False) -> bytes:
        """Sends over a connection of its own, and returns what came back until the proxy ended it."""
        reader, writer = await self.engine.connect()
        answer = bytearray()
        # A client that is refused in the middle of a megabyte is cut off.
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            if end:
                writer.write_eof()
            async with asyncio.timeout(SOON_S):
                while piece := await reader.read(65536):
                    answer += piece
        writer.close()
        return bytes(answer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = bytearray()
        self.received.append(received)
        answered = False
        while data := await reader.read(65536):
            received += data
            if b"\r\n\r\n" in received and not answered:
                answered = True
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nserver")
                writer.write_eof()


@asynccontextmanager
async def world(**limits: Any) -> AsyncIterator[World]:
    connector = Everywhere()
    async with engine(connector=connector, classifier=CLASSIFIER, linger_s=0.2, **limits) as running:
        whole = World(running, connector)
        connector.port = await running.start_server(whole.serve)
        for name, addresses in NAMES.items():
            running.name(name, [PUBLIC if address == SERVER else address for address in addresses])
        running.change(RULES)
        yield whole


def test_the_corpus_is_large_and_its_names_say_which_attempt_is_which() -> None:
    assert len(ATTEMPTS) >= 80
    assert [name for name, count in Counter(attempt.name for attempt in ATTEMPTS).items() if count > 1] == []
    assert {attempt.reason for attempt in ATTEMPTS} >= {
        reasons.BAD_REQUEST,
        reasons.BAD_NAME,
        reasons.ADDRESS_LITERAL,
        reasons.NOT_ALLOWED,
        reasons.DENIED,
        reasons.HEAD_TIMEOUT,
        reasons.HEAD_TOO_LARGE,
        reasons.REFUSED_ADDRESS,
        reasons.SERVER_NAME,
        reasons.OLD_TLS,
        reasons.MISDIRECTED,
    }


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
async def test_attempt_is_refused_with_its_reason_and_nothing_leaves(attempt: Attempt) -> None:
    async with world(**{"head_s": 0.2} if attempt.unfinished else {}) as there:
        answer = await there.send(attempt.sent)
        denials = there.engine.recorder.denials
        await there.engine.recorder.until(lambda: denials)
        assert [denial["reason"] for denial in denials] == [attempt.reason], denials
        assert denials[0]["message"].isprintable()
        assert len(denials[0]["message"]) <= 600
        assert len(denials[0]["host"]) <= 260
        if attempt.tunnelled:
            assert [address for _, address in there.made] == [PUBLIC]
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert (await there.engine.recorder.last_closed())["reason"] == attempt.reason
        else:
            assert there.made == []
            head = answer.partition(b"\r\n\r\n")[0]
            # A client that is still sending may be cut off before it has read the answer.
            if head or len(attempt.sent) < 65536:
                assert 400 <= int(head.split(b" ", 2)[1]) < 600
                assert f"\r\nX-Egress-Reason: {attempt.reason}".encode() in head
        assert not answer.endswith(b"server")
        assert b"".join(there.received) == b""


async def test_attempts_one_after_the_other_leave_the_session_as_it_was() -> None:
    async with world(accept_burst=10_000, head_s=0.2) as there:
        for attempt in ATTEMPTS:
            await there.send(attempt.sent)
        await there.engine.recorder.until(lambda: len(there.engine.recorder.denials) >= len(ATTEMPTS))
        assert Counter(denial["reason"] for denial in there.engine.recorder.denials) == Counter(
            attempt.reason for attempt in ATTEMPTS
        )
        assert b"".join(there.received) == b""
        answer = await there.send(get("http://allowed.example/"))
        assert answer.endswith(b"\r\n\r\nserver")


@pytest.mark.parametrize("request_", list(rewritten()), ids=lambda request: request.name)
async def test_a_request_that_passes_is_the_one_that_was_checked(request_: Rewritten) -> None:
    async with world() as there:
        answer = await there.send(request_.sent)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert there.engine.recorder.denials == []
        assert there.made == [(Target("allowed.example", 80), PUBLIC)]
        (received,) = there.received
        for must_have in request_.must_have:
            assert must_have in received
        for must_lack in request_.must_lack:
            assert must_lack not in received


# -- attempts that the corpus does not have


@st.composite
def _mutations(draw: st.DrawFn) -> bytes:
    """The head of an attempt or of a request that passes, changed in a few places."""
    sent = bytearray(draw(st.sampled_from(HEADS)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(sent)))
        end = min(len(sent), start + draw(st.integers(0, 3)))
        sent[start:end] = draw(st.sampled_from(PIECES) | st.binary(max_size=3))
    return bytes(sent)


async def _try_head(sent: bytes) -> None:
    async with world(head_s=0.2) as there:
        await there.send(sent, end=True)
        for target, address in there.made:
            assert address == PUBLIC
            assert isinstance(Rules.read(RULES).decide(target), Allowed)
        if not sent.startswith(b"CONNECT "):
            for (target, _), received in zip(there.made, there.received, strict=True):
                lines = bytes(received).partition(b"\r\n\r\n")[0].replace(b"\r", b"\n").split(b"\n")
                hosts = [line for line in lines if line.lower().lstrip().startswith(b"host")]
                assert hosts == [b"Host: " + (target.host if target.port == 80 else str(target)).encode()]


@settings(max_examples=rounds(2000, 100))
@given(_mutations())
def test_no_change_of_an_attempt_leads_to_a_host_that_is_not_allowed(sent: bytes) -> None:
    asyncio.run(_try_head(sent))


# -- resolvers that lie

HOSTILE = [
    *("127.0.0.1", "127.255.0.1", "0.0.0.0", "10.0.0.1", "172.16.5.4", "192.168.0.1", "100.64.0.1", "169.254.169.254"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "168.63.129.16", "100.100.100.200", OWN),
    *("::", "::1", "::127.0.0.1", "fe80::1", "fe80::1%lo", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1", "2001::1"),
    *("2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b:1::1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::ffff:0:7f00:1"),
    *("fd00:ec2::254", "4000::1", "100::1", "5f00::1", "3fff::1", f"::ffff:{OWN}"),
    *("127.1", "0x7f.1", "2130706433", "010.0.0.1", "localhost", "", " ", "127.0.0.1 ", f"{PUBLIC} ", f"{PUBLIC}\n"),
    *(
        "[::1]",
        f"{PUBLIC}:80",
        f"{PUBLIC}/32",
        f"{PUBLIC}%lo",
        "2606:4700::1111%lo",
        "evil.example",
        "\0",
        "\uff11.1.1.1",
    ),
]
GOOD = [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"]


def _may_be_reached(text: str) -> bool:
    """The test's own check, from Python's tables: they have fewer ranges than the classifier's, and no others."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    if str(address) in (OWN, "168.63.129.16", "100.100.100.200", "fd00:ec2::254") or "%" in text:
        return False
    if getattr(address, "sixtofour", None) or getattr(address, "teredo", None):
        return False
    if address.version == 6 and address not in ipaddress.ip_network("2000::/3"):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


_ANSWERS = st.lists(
    st.sampled_from(HOSTILE) | st.sampled_from(GOOD) | st.ip_addresses().map(str) | st.text(max_size=20),
    min_size=1,
    max_size=6,
)


async def _try_answers(answers: list[tuple[list[str], int]]) -> None:
    async with world(cache_s=0.0) as there:
        there.engine.name("allowed.example", *(addresses for addresses, _ in answers))
        for turn, (addresses, failures) in enumerate(answers, 1):
            made, reached = len(there.made), len(there.received)
            there.connector.failures = failures
            tunnel = turn % 2 == 0
            sent = connect("allowed.example:80") + get("/") if tunnel else get("http://allowed.example/")
            answer = await there.send(sent)
            assert there.engine.names.asked == ["allowed.example"] * turn, "a connection takes one look-up"
            tried = [address for _, address in there.made[made:]]
            assert all(CLASSIFIER.why_refused(address) is None for address in tried)
            assert all(_may_be_reached(address) for address in tried)
            assert set(tried) <= set(addresses)
            assert len(there.received) - reached <= 1
            if len(tried) > failures:
                assert answer.endswith(b"server")
                continue
            assert len(there.received) == reached
            usable = [address for address in addresses if CLASSIFIER.why_refused(address) is None]
            assert len(tried) == min(len(usable), 4)
            reason = b"unreached" if usable else b"refused_address"
            assert b"\r\nX-Egress-Reason: %s\r\n" % reason in answer


@settings(max_examples=rounds(1000, 30))
@given(st.lists(st.tuples(_ANSWERS, st.integers(0, 4)), min_size=1, max_size=4))
@example([([PUBLIC], 0), (["127.0.0.1"], 0), ([PUBLIC], 0)])
@example([(["127.0.0.1", PUBLIC], 0), ([PUBLIC, "127.0.0.1"], 1), (["8.8.8.8", "::1", PUBLIC], 2)])
@example([([PUBLIC, "169.254.169.254"], 4), (["169.254.169.254"], 0)])
@example([([address], 0) for address in HOSTILE])
@example([(HOSTILE, 0), ([*HOSTILE[:8], *GOOD], 2), ([*GOOD, *HOSTILE[-8:]], 4)])
def test_no_byte_reaches_an_address_that_the_classifier_refuses_whatever_a_resolver_says(
    answers: list[tuple[list[str], int]],
) -> None:
    """Answers of one name, look-up by look-up, each with the number of addresses that refuse the connection."""
    asyncio.run(_try_answers(answers))
