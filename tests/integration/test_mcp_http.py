"""`executor mcp --http`: hosts of several tenants, through the official client and by plain requests, at a real daemon."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from executor_client import ExecutorClient
from executor_client.mcp.sdk import MAJOR
from tests.integration.mcp_http import HttpServer, http_host, http_server, run_python
from tests.support.certificates import Authority
from tests.support.daemon import Daemon, is_known, running_daemon
from tests.support.leftovers import DAEMON_PREFIX
from tests.support.mcp_host import environment, text_of
from tests.support.mcp_sdk import McpError
from tests.support.polling import eventually

ENDLESS = "print('running', flush=True)\nwhile True: pass"
MODES = ("auto", "legacy") if MAJOR == 2 else ("auto",)


@pytest.fixture(scope="module")
def tokens(daemon: Daemon) -> tuple[str, str]:
    """Tokens of two tenants, which the daemon knows."""
    made = daemon.new_token("alpha"), daemon.new_token("beta")
    for token in made:
        with ExecutorClient(daemon.address, token=token) as client:
            assert eventually(lambda: is_known(client))
    return made


@pytest.fixture(scope="module")
def server(daemon: Daemon) -> Iterator[HttpServer]:
    with http_server(environment(daemon), "--authorization-server", "https://login.example.org") as running:
        yield running
        assert running.stop() == ""


@pytest.fixture
def alpha(daemon: Daemon, tokens: tuple[str, str]) -> Iterator[ExecutorClient]:
    """A client of the first tenant, which has no sessions after the test."""
    with ExecutorClient(daemon.address, token=tokens[0]) as client:
        yield client
        for info in client.list_sessions():
            client.get_session(info.session_id).close()


def state_of(client: ExecutorClient) -> str:
    (info,) = client.list_sessions()
    return info.state.value


@pytest.mark.parametrize("mode", MODES)
def test_tenants_have_their_own_sessions_which_every_server_finds(
    daemon: Daemon, server: HttpServer, tokens: tuple[str, str], alpha: ExecutorClient, mode: str
) -> None:
    with http_host(server.url, tokens[0], mode) as host, http_host(server.url, tokens[1], mode) as other:
        assert "[the session 'work' is new and empty]" in host.run("x = 41", session="work")
        assert "is new" not in host.run("print(x)", session="work")
        assert "NameError" in other.refusal("run_python", code="x", session="work")
        other.call("close_session", session="work")
        host.call("write_file", path="a.txt", content="kept", session="work")
        assert text_of(other.call("list_sessions")) == "no sessions yet; run_python creates one"
        assert "there is no session 'work'; there are none" in other.refusal("shell_kill", process="p", session="work")
        with pytest.raises(McpError):
            other.portal.call(other.client.read_resource, "sandbox://work/a.txt")
        assert "session" in host.refusal("run_python", code="x")  # it must be named
    with http_server(environment(daemon)) as second, http_host(second.url, tokens[0], mode) as host:
        assert "NameError" in host.refusal("run_python", code="y", session="work")
        assert "Value: 42" in host.run("x + 1", session="work")
        assert "kept" in text_of(host.call("shell", command="cat a.txt", session="work"))
        assert [line.split()[:2] for line in text_of(host.call("list_sessions")).splitlines()[1:]] == [["work", "idle"]]
        (info,) = alpha.list_sessions()
        assert info.detached and info.labels == {"client": "executor-mcp", "name": "work"}
        assert "is new and empty" in text_of(host.call("reset_session", session="work"))
        assert "NameError" in host.refusal("run_python", code="x", session="work")
        assert second.stop() == ""
    # Servers with other options must not find a session that may do less or more.
    with http_server(environment(daemon), "--imports", "os") as third, http_host(third.url, tokens[0], mode) as host:
        assert text_of(host.call("list_sessions")) == "no sessions yet; run_python creates one"


@pytest.mark.parametrize("mode", MODES)
def test_a_host_that_leaves_a_call_ends_its_code(
    server: HttpServer, tokens: tuple[str, str], alpha: ExecutorClient, mode: str
) -> None:
    if MAJOR == 2 and mode == "auto":
        with http_host(server.url, tokens[0], mode) as host:
            running = host.start("run_python", code=ENDLESS, session="s")
            assert eventually(lambda: host.logs)
            running.cancel()
            assert eventually(lambda: state_of(alpha) == "idle")
    with httpx.stream("POST", server.url, json=run_python(ENDLESS), headers=server.headers(tokens[0])) as stream:
        next(stream.iter_raw())
        assert state_of(alpha) == "busy"
    assert eventually(lambda: state_of(alpha) == "idle")


@pytest.mark.parametrize(
    ("token", "headers", "body", "status", "said"),
    [
        (None, {}, {}, 401, "a token of the executor's daemon is needed"),
        ("wrong", {}, {}, 401, "the daemon does not accept this token"),
        ("a b", {}, {}, 401, "a token of the executor's daemon is needed"),
        ("a" * 5_000, {}, {}, 401, "a token of the executor's daemon is needed"),
        ("tenant", {"Origin": "https://page.example"}, run_python("1"), 403, "Invalid Origin"),
        ("tenant", {"Host": "rebound.example"}, run_python("1"), 421, "Invalid Host"),
        ("tenant", {}, b"\xff\xfe\0", 400, "the request is not JSON"),
        ("tenant", {}, b"[" * 100_000, 400, "the request is not JSON"),
        ("tenant", {}, [run_python("1")], 400, ""),
        ("tenant", {}, [[]] * 20_002, 400, "the request has more than 20,000 values; send data as text or in a file"),
        ("tenant", {}, json.dumps(['"', *[[]] * 20_002]).encode("utf-16-le"), 400, "the request is not JSON"),
        ("tenant", {"Content-Type": "text/plain"}, run_python("1"), 400, "Invalid Content-Type"),
        ("tenant", {}, b" " * (13 << 20), 413, "the request has more than 12,582,912 bytes"),
        ("tenant", {"Transfer-Encoding": "chunked"}, b" " * (13 << 20), 413, "the request has more than 12,582,912"),
    ],
)
def test_requests_that_are_not_for_us_are_refused_in_words(
    server: HttpServer,
    tokens: tuple[str, str],
    token: str | None,
    headers: dict[str, str],
    body: object,
    status: int,
    said: str,
) -> None:
    answer = server.post(body, tokens[0] if token == "tenant" else token, **headers)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    where = urlsplit(server.url)
    metadata = f"{where.scheme}://{where.netloc}/.well-known/oauth-protected-resource/mcp"
    challenge = answer.headers.get("WWW-Authenticate", "")
    assert (f'Bearer resource_metadata="{metadata}"' in challenge) == (status == 401)
    assert ('error="invalid_token"' in challenge) == (token == "wrong")
    if status == 401:
        for url in (metadata, metadata.removesuffix("/mcp")):
            described = httpx.get(url).json()
            assert described["resource"] == server.url
            assert described["authorization_servers"] == ["https://login.example.org/"]


def test_code_may_have_any_number_of_commas(server: HttpServer, tokens: tuple[str, str], alpha: ExecutorClient) -> None:
    answer = server.post(run_python(f"len([{'1,' * 30_000}])"), tokens[0])
    assert "Value: 30000" in answer.text


def test_there_is_no_stream_or_session_of_the_transport(server: HttpServer, tokens: tuple[str, str]) -> None:
    for method in ("GET", "DELETE"):
        answer = httpx.request(method, server.url, headers=server.headers(tokens[0]))
        assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    assert "Mcp-Session-Id" not in server.post(run_python("1", "../x"), tokens[0]).headers
    assert httpx.post(f"{server.url}/", headers=server.headers(tokens[0])).status_code == 404  # nothing redirects


def test_a_tenant_has_only_so_many_sessions_and_calls(
    daemon: Daemon, tokens: tuple[str, str], alpha: ExecutorClient, tmp_path: Path
) -> None:
    """The server has a certificate and a public name, which requests to it may have as their host."""
    authority = Authority(tmp_path)
    own = authority.server()
    options = ("--max-sessions", "2", "--http-cert", str(own.cert), "--http-key", str(own.key))
    public = ("--public-url", "https://sandboxes.example.org/mcp")
    with (
        http_server(environment(daemon), *options, *public, patch="callers.CALLS_OF_CALLER_MAX = 4") as server,
        ThreadPoolExecutor(12) as pool,
    ):
        server.verify = ssl.create_default_context(cafile=authority.cert)
        calls = [pool.submit(server.post, run_python("1", f"s{number}"), tokens[0]) for number in range(12)]
        answers = [each.result() for each in calls]
        for answer in answers:
            if answer.status_code == 429:
                assert "this server serves 4 calls of a token at a time" in answer.text
                assert answer.headers["Retry-After"] == "1"
        assert "at most 2 sessions" in server.post(run_python("1", "another"), tokens[0]).text
        assert len(alpha.list_sessions()) == 2
        assert "Value: 1" in server.post(run_python("1"), tokens[1], Host="sandboxes.example.org").text


def test_slow_hosts_are_cut_off(daemon: Daemon, tokens: tuple[str, str]) -> None:
    patch = "http.HEAD_TIME_S = http.BODY_TIME_S = 0.3"
    with http_server(environment(daemon), patch=patch) as server:
        where = urlsplit(server.url)
        head = f"POST /mcp HTTP/1.1\r\nHost: {where.netloc}\r\n"
        body = f"Authorization: Bearer {tokens[0]}\r\nContent-Length: 100\r\n\r\n" + "{"
        for sent, said in (("", b""), (head, b""), (head + body, b"HTTP/1.1 408 ")):
            with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as connection:
                connection.sendall(sent.encode())
                assert connection.recv(13) == said


def test_a_stopped_server_cancels_calls_and_leaves_the_sessions(
    daemon: Daemon, tokens: tuple[str, str], alpha: ExecutorClient
) -> None:
    with http_server(environment(daemon), patch="http.STOP_GRACE_S = 1") as server:
        server.post(run_python("x = 1"), tokens[0])
        with httpx.stream("POST", server.url, json=run_python(ENDLESS), headers=server.headers(tokens[0])) as stream:
            lines = stream.iter_raw()
            next(lines)
            assert "Traceback" not in server.stop()
        assert state_of(alpha) == "idle"
    with http_server(environment(daemon)) as server:
        assert "Value: 1" in server.post(run_python("x"), tokens[0]).text


def test_a_daemon_that_restarts_keeps_the_sessions_and_is_missed_in_words() -> None:
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    with running_daemon(directory) as daemon:
        token = daemon.new_token("alpha")
        with ExecutorClient(daemon.address, token=token) as client:
            assert eventually(lambda: is_known(client))
        options = {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}
        with http_server(options) as server, ThreadPoolExecutor(1) as pool:
            server.post(run_python("import time\nx = 41"), token)
            slow = pool.submit(server.post, run_python("time.sleep(3)\nx + 1"), token)
            with ExecutorClient(daemon.address, token=token) as client:
                assert eventually(lambda: state_of(client) == "busy")
            daemon.kill()
            with running_daemon(directory):
                assert "Value: 42" in slow.result().text
                assert "Value: 41" in server.post(run_python("x"), token).text
            assert server.stop() == ""
    with http_server(options) as server:
        answer = server.post(run_python("x"), token)
        assert (answer.status_code, "the executor's daemon does not answer" in answer.text) == (503, True)
        assert str(directory) not in answer.text
    shutil.rmtree(directory)
