"""A corpus of attempts to get past the egress proxy, from inside a session: all are refused, and nothing is reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from executor_client import Session
from tests.support.egress_corpus import ATTEMPTS, DENIED, SITE, TUNNELLED
from tests.support.internet.world import SUFFIX, Internet
from tests.support.network import EVERY_SITE, networked_daemon, networked_session, policy

REFUSALS = {b"400", b"403", b"405", b"408", b"421", b"431", b"501", b"502", b"505"}

ASK = """
import socket
def exchange(connection, data, rest=b""):
    '''The answer to some bytes, as far as there is one: empty when the connection was closed without.'''
    received = b""
    try:
        connection.sendall(data)
        while len(received) < 65536 and (more := connection.recv(65536)):
            received += more
    except OSError as error:
        if isinstance(error, TimeoutError):
            return b"hangs"
    return received

def ask(data):
    with socket.create_connection(("127.0.0.1", 3128), timeout=10) as connection:
        return exchange(connection, data)

def ask_within(target, data):
    with socket.create_connection(("127.0.0.1", 3128), timeout=10) as connection:
        connection.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
        head = b""
        while b"\\r\\n\\r\\n" not in head and (byte := connection.recv(1)):
            head += byte
        if b" 200 " not in head:
            return head
        # The last byte of what a program says may be what the proxy waits for.
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return exchange(connection, b"")
"""


@pytest.fixture(scope="module")
def session(internet: Internet) -> Iterator[Session]:
    rules = policy(denied=[DENIED], max_new_connections_per_minute=100_000)
    with (
        networked_daemon(internet, "local", rules) as daemon,
        daemon.client() as client,
        networked_session(client, *EVERY_SITE) as made,
    ):
        made.execute(ASK)
        yield made


@pytest.fixture
def nothing_is_reached(internet: Internet, session: Session) -> Iterator[None]:
    """No server, and no name server for another name than an allowed one."""
    internet.names.address(DENIED, internet.address)
    internet.names.address(SUFFIX, internet.address)
    before = reached(internet)
    questions = len(internet.names.questions)
    yield
    assert reached(internet) == before
    assert {each.name for each in internet.names.questions[questions:]} <= {SITE, f"raw.{SUFFIX}"}


def reached(internet: Internet) -> list[Any]:
    said = sum(each.received_bytes for each in internet.raw.conversations)
    return [list(internet.handshakes), list(internet.sites.requests), said, list(internet.trap.connections)]


def test_the_corpus_is_large_enough() -> None:
    assert len(ATTEMPTS) + len(TUNNELLED) >= 60


@pytest.mark.usefixtures("nothing_is_reached")
@pytest.mark.parametrize("name", list(ATTEMPTS))
def test_an_attempt_is_refused(session: Session, internet: Internet, name: str) -> None:
    data = ATTEMPTS[name].replace(b"{own}", internet.address.encode())
    data = data.replace(b"{trap}", internet.trap.loopback.encode())
    session.set_variables({"data": data})
    answer = session.execute("ask(data)").output
    assert isinstance(answer, bytes)
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 ") and answer[9:12] in REFUSALS), answer[:200]


@pytest.mark.usefixtures("nothing_is_reached")
@pytest.mark.parametrize("name", list(TUNNELLED))
def test_bytes_in_a_tunnel_are_refused(session: Session, name: str) -> None:
    target, data = TUNNELLED[name]
    session.set_variables({"target": target, "data": data})
    answer = session.execute("ask_within(target, data)").output
    assert isinstance(answer, bytes)
    assert answer == b"" or answer[9:12] in REFUSALS or answer[:1] == b"\x15", answer[:200]


def test_what_follows_a_request_is_no_other_request(session: Session, internet: Internet) -> None:
    """A second one behind the first, which its server might answer under the first one's permission."""
    before = len(internet.sites.requests)
    first = f"GET http://{SITE}/second HTTP/1.1\r\nHost: {SITE}\r\n\r\n"
    second = f"GET http://{DENIED}/ HTTP/1.1\r\nHost: {DENIED}\r\n\r\n"
    session.set_variables({"data": (first + second).encode()})
    answer = session.execute("ask(data)").output
    assert isinstance(answer, bytes)
    assert b"Second page" in answer
    assert [(each.host, each.path) for each in internet.sites.requests[before:]] == [(SITE, "/second")]


def test_the_host_that_a_server_sees_is_the_one_that_was_checked(session: Session, internet: Internet) -> None:
    """The program names others, in its headers; one of them in several lines, which arrives as one."""
    before = len(internet.sites.requests)
    lines = [
        f"GET http://{SITE.upper()}./second HTTP/1.1",
        f"Host: {DENIED}",
        "Proxy-Authorization: x",
        "Proxy-Connection: keep-alive",
        "Connection: X-Mine",
        "X-Mine: y",
        f"X-Folded: y\r\n Host: {DENIED}",
    ]
    session.set_variables({"data": "\r\n".join([*lines, "", ""]).encode()})
    answer = session.execute("ask(data)").output
    assert isinstance(answer, bytes)
    assert b" 200 " in answer
    (seen,) = internet.sites.requests[before:]
    assert (seen.host, seen.values("host")) == (SITE, [SITE])
    assert seen.values("proxy-authorization") == seen.values("proxy-connection") == seen.values("x-mine") == []
    assert seen.values("x-folded") == [f"y Host: {DENIED}"]
