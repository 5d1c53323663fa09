"""Servers that lie about their answers or never end them, reached from a session: over plain HTTP, and over TLS that the
proxy terminates, where it reads what they say."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from executor_client import Session
from tests.support.daemon import Daemon
from tests.support.internet.world import SUFFIX, Internet
from tests.support.network import networked_daemon, networked_session, policy, proxies, write_secret

ODD = f"odd.{SUFFIX}"
RECEIVED_BYTES = 50_000_000
GROWTH_BYTES = 64 * 2**20

# The status, the body, and how the answer ended, as a client sees it that reads as far as it gets.
READ = f"""
import http.client, socket, time, urllib.request
def read(scheme, path, timeout_s=5.0):
    try:
        answer = urllib.request.urlopen(f"{{scheme}}://{ODD}{{path}}", timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), "error"
    except OSError as error:
        return 0, "", type(error).__name__
    body, ended = b"", "whole"
    deadline = time.monotonic() + timeout_s
    with answer:
        try:
            while time.monotonic() < deadline and (data := answer.read1(1 << 20)):
                body += data[:100]
            if time.monotonic() >= deadline:
                ended = "open"
            elif answer.length:
                ended = "short"
        except (OSError, http.client.HTTPException) as error:
            ended = type(error).__name__
    return answer.status, body[:100].decode("latin-1"), ended
"""


@pytest.fixture(scope="module")
def running(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Session]]:
    secret = write_secret(tmp_path_factory.mktemp("secret") / "token", "a-token")
    rules = policy(
        secrets=[{"host": ODD, "header": "Authorization", "value": "Bearer ${bot}"}], max_received_bytes=RECEIVED_BYTES
    )
    with (
        networked_daemon(internet, "local", rules, secrets={"bot": str(secret)}) as daemon,
        daemon.client() as client,
        networked_session(client, f"*.{SUFFIX}") as session,
    ):
        session.execute(READ)
        yield daemon, session


schemes = pytest.mark.parametrize("scheme", ["http", "https"])


@schemes
@pytest.mark.parametrize("path", ["/two-lengths", "/no-http", "/nothing", "/endless-head"])
def test_an_answer_that_is_none_is_a_502_that_says_so(running: tuple[Daemon, Session], scheme: str, path: str) -> None:
    _, session = running
    status, body, _ = session.execute(f"read('{scheme}', '{path}')").output
    assert (status, ODD in body) == (502, True), body


@schemes
def test_a_short_answer_is_not_passed_off_as_whole(running: tuple[Daemon, Session], scheme: str) -> None:
    _, session = running
    status, body, ended = session.execute(f"read('{scheme}', '/less-than-said')").output
    assert (status, body) == (200, "only this")
    assert ended in ("short", "IncompleteRead", "ConnectionResetError", "SSLEOFError", "SSLError")


@schemes
@pytest.mark.parametrize(
    ("path", "body"), [("/more-than-said", "only this"), ("/two-answers", "first"), ("/length-and-chunks", "first")]
)
def test_bytes_behind_an_answer_are_not_another_one(
    running: tuple[Daemon, Session], scheme: str, path: str, body: str
) -> None:
    _, session = running
    assert session.execute(f"read('{scheme}', '{path}')").output == (200, body, "whole")


@schemes
def test_an_answer_that_drips_arrives_as_it_comes(running: tuple[Daemon, Session], scheme: str) -> None:
    _, session = running
    status, body, ended = session.execute(f"read('{scheme}', '/drip', timeout_s=2.0)").output
    assert (status, ended) == (200, "open") and len(body) > 5


@schemes
def test_a_server_that_is_silent_holds_up_its_own_connection_alone(
    running: tuple[Daemon, Session], scheme: str
) -> None:
    _, session = running
    code = f"""
import threading
silent = []
thread = threading.Thread(target=lambda: silent.append(read('{scheme}', '/silence', timeout_s=3.0)))
thread.start()
began = time.monotonic()
other = urllib.request.urlopen("https://files.{SUFFIX}/hello.txt", timeout=30).read()
took_s = time.monotonic() - began
thread.join()
[silent[0][2], other, took_s < 2.5]
"""
    assert session.execute(code).output == ["TimeoutError", b"hello from outside\n", True]


@schemes
def test_an_endless_answer_ends_at_the_sessions_bytes_and_costs_the_proxy_no_memory(
    internet: Internet, running: tuple[Daemon, Session], scheme: str
) -> None:
    daemon, _ = running
    with daemon.client() as client, networked_session(client, f"*.{SUFFIX}") as session:
        session.execute(READ)
        (proxy,) = proxies(daemon)
        before = resident_bytes(proxy)
        result = session.execute(f"read('{scheme}', '/endless-body', timeout_s=60.0)")
        assert RECEIVED_BYTES * 0.9 < result.usage.network.received_bytes <= RECEIVED_BYTES + 512 * 1024
        assert resident_bytes(proxy) - before < GROWTH_BYTES
        refused = session.execute(f"read('{scheme}', '/nothing')")
        assert refused.output[0] != 200
        assert "network: " in result.logs + refused.logs


def resident_bytes(process: psutil.Process) -> int:
    found: int = process.memory_info().rss
    return found
