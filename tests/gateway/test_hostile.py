"""Clients that lie, flood, break off, read slowly or guess, and a daemon that dies under streams."""

from __future__ import annotations

import gzip
import json
import select
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from executor_server.gateway.clients import VISITS_MAX
from executor_server.gateway.e2b.metrics import sample
from executor_server.gateway.errors import Refusal
from tests.support.backend_daemon import daemon_on
from tests.support.daemon import running_daemon
from tests.support.gateway import Gateway, running_gateway
from tests.support.leftovers import DAEMON_PREFIX

SERVICE = "/executor_api.v1.ExecutorService"
TIMEOUT_S = 60.0
GROWTH_BYTES = 100 << 20
"""More memory than any of these requests may cost. Each sends twice as much, or unpacks to it."""
FLOOD_BYTES = 200 << 20


@dataclass(frozen=True)
class Target:
    gateway: Gateway
    sandbox: Sandbox

    def headers(self, kind: str) -> dict[str, str]:
        if kind in ("envd", "interpreter"):
            port, token = {"envd": "49983", "interpreter": "49999"}[kind], self.sandbox._envd_access_token
            return {"E2b-Sandbox-Id": self.sandbox.sandbox_id, "E2b-Sandbox-Port": port, "X-Access-Token": token or ""}
        token = self.gateway.token
        return {"X-API-Key": token} if kind == "rest" else {"Authorization": f"Bearer {token}"}

    def post(self, kind: str, path: str, content: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        all_headers = {**self.headers(kind), **named}
        return httpx.post(self.gateway.url + path, content=content, headers=all_headers, timeout=TIMEOUT_S)

    def stream(self, kind: str, path: str, body: bytes, **headers: str) -> socket.socket:
        """Sends a request, and leaves its answer to the caller."""
        lines = {**self.headers(kind), "Host": "gateway", "Content-Length": str(len(body))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        connection = socket.create_connection(("127.0.0.1", int(self.gateway.url.rpartition(":")[2])), TIMEOUT_S)
        connection.sendall(f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return connection

    @property
    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.gateway.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.fixture(scope="module")
def target(e2b: Gateway) -> Iterator[Target]:
    with Sandbox.create() as sandbox:
        yield Target(e2b, sandbox)


def _frame(message: object, flags: int = 0, length: int | None = None) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data) if length is None else length) + data


START = {"process": {"cmd": "/bin/bash", "args": ["-c", "true"]}}
FRAMES = {
    "a length of 4 GiB": _frame(START, length=0xFFFFFFFF),
    "deep JSON": _frame(b"[" * 200_000),
    "a number beyond all": _frame(b'{"pty": {"size": {"cols": 1e400}}}'),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_a_lying_frame_ends_in_an_error(target: Target, frame: bytes) -> None:
    """test_connect.py has more frames: the parser is the same."""
    answer = target.post("envd", "/process.Process/Start", frame, content_type="application/connect+json")
    assert answer.status_code == 200  # of a stream; its last frame tells
    flags, length = struct.unpack_from(">BI", answer.content)
    assert flags == 2
    assert json.loads(answer.content[5 : 5 + length])["error"]["message"]


FLOODED = [
    ("interpreter", "/execute", ""),
    ("rest", "/v2/sandboxes", ""),
    ("connect", "/v1/run", ""),
    ("connect", f"{SERVICE}/Execute", "application/json"),
    ("envd", "/process.Process/List", "application/json"),
    ("envd", "/process.Process/Start", "application/connect+json"),
    ("envd", "/files", "multipart/form-data; boundary=b"),
    ("connect", "/none", ""),
]


@pytest.mark.parametrize(("service", "path", "content_type"), FLOODED, ids=[each[1] for each in FLOODED])
def test_an_endless_line_is_refused_and_not_kept(target: Target, service: str, path: str, content_type: str) -> None:
    def line() -> Iterator[bytes]:
        yield _frame(b'{"code": "', length=1 << 31) if "connect+" in content_type else b'{"code": "'
        for _ in range(FLOOD_BYTES >> 20):
            yield b"x" * (1 << 20)

    before = target.memory_bytes
    try:
        answer = target.post(service, path, line(), content_type=content_type)
    except httpx.TransportError:  # cut off while it floods
        pass
    else:
        assert answer.status_code in (400, 404, 413, 429) or b"resource_exhausted" in answer.content
    assert target.memory_bytes < before + GROWTH_BYTES


@pytest.mark.parametrize(("service", "path"), [("interpreter", "/execute"), ("rest", "/v2/sandboxes")])
def test_a_request_that_breaks_off_is_no_failure_of_ours(target: Target, service: str, path: str) -> None:
    before = target.gateway.log.stat().st_size
    target.stream(service, path, b"{", Content_Length="100").close()
    assert target.post(service, path, b"{").status_code == 400
    assert target.gateway.log.stat().st_size == before, target.gateway.log.read_text()[before:]


def test_a_bomb_is_not_unpacked(target: Target) -> None:
    bomb = gzip.compress(bytes(FLOOD_BYTES))
    before = target.memory_bytes
    packed = {"content_type": "application/json", "content_encoding": "gzip"}
    answers = [
        target.post("connect", f"{SERVICE}/GetPolicy", bomb, **packed),
        target.post("interpreter", "/execute", bomb, **packed),
        target.post("rest", "/v2/sandboxes", bomb, **packed),
        target.post("envd", "/process.Process/List", bomb, **packed),
    ]
    assert {answer.status_code // 100 for answer in answers} == {4} or answers[-1].status_code == 501
    framed = {"content_type": "application/connect+json", "connect_content_encoding": "gzip"}
    answer = target.post("connect", f"{SERVICE}/Execute", _frame(bomb, flags=1), **framed)
    assert b"resource_exhausted" in answer.content
    assert target.memory_bytes < before + GROWTH_BYTES


@pytest.mark.parametrize("name", ["../x", "é", "x" * 41, ""])
def test_what_is_no_sandbox_is_refused(target: Target, name: str) -> None:
    headers = [(b"E2b-Sandbox-Id", name.encode()), (b"E2b-Sandbox-Port", b"49983")]
    assert httpx.get(f"{target.gateway.url}/health", headers=headers).status_code == 400


@pytest.mark.parametrize("port", ["0", "65536", "१", ""])
def test_what_is_no_port_is_refused(target: Target, port: str) -> None:
    headers = [(b"E2b-Sandbox-Id", target.sandbox.sandbox_id.encode()), (b"E2b-Sandbox-Port", port.encode())]
    assert httpx.get(f"{target.gateway.url}/health", headers=headers).status_code == 400


@pytest.mark.parametrize("host", ["", "é", "a" * 9000, "[::1", "x:99999999", "49983-x."])
def test_a_host_that_is_none_leads_nowhere_else(target: Target, host: str) -> None:
    headers = [(b"Host", host.encode()), (b"Connection", b"close")]
    answer = httpx.get(f"{target.gateway.url}/v2/sandboxes", headers=headers)
    assert answer.status_code in (400, 401)  # as without a host: it has no key


@pytest.mark.parametrize("token", ["x", "é", "e2b_" + "0" * 40, "a" * 5000])
def test_a_wrong_token_opens_nothing_and_its_refusal_names_no_address(target: Target, token: str) -> None:
    sandbox = [(b"E2b-Sandbox-Id", target.sandbox.sandbox_id.encode()), (b"E2b-Sandbox-Port", b"49983")]
    url, given = target.gateway.url, token.encode()
    answers = [
        httpx.get(f"{url}/files?path=/etc/passwd", headers=[*sandbox, (b"X-Access-Token", given)]),
        httpx.post(f"{url}/process.Process/List", json={}, headers=[*sandbox, (b"X-Access-Token", given)]),
        httpx.get(f"{url}/v2/sandboxes", headers=[(b"X-API-Key", given)]),
        httpx.post(f"{url}{SERVICE}/GetPolicy", json={}, headers=[(b"Authorization", b"Bearer " + given)]),
        httpx.post(f"{url}/v1/run", json={"code": "1"}, headers=[(b"Authorization", b"Bearer " + given)]),
    ]
    assert {answer.status_code for answer in answers} <= {400, 401}
    assert not [answer.text for answer in answers if "unix:" in answer.text or ".sock" in answer.text]


def test_a_stranger_is_refused_before_the_body_arrives(target: Target) -> None:
    sandbox = f"E2b-Sandbox-Id: {target.sandbox.sandbox_id}\r\nX-Access-Token: wrong\r\nE2b-Sandbox-Port"
    stranger = "Authorization: Bearer wrong\r\nX-API-Key: wrong"
    requests = [
        (f"/sandboxes/{target.sandbox.sandbox_id}/timeout", stranger),
        ("/v2/sandboxes", stranger),
        ("/v1/run", stranger),
        (f"{SERVICE}/Execute", stranger),
        (f"{SERVICE}/GetPolicy", stranger),
        ("/process.Process/List", f"{sandbox}: 49983"),
        ("/process.Process/StreamInput", f"{sandbox}: 49983"),
        ("/files?path=x", f"{sandbox}: 49983"),
        ("/execute", f"{sandbox}: 49999"),
        ("/contexts", f"{sandbox}: 49999"),
    ]
    port = int(target.gateway.url.rpartition(":")[2])
    for path, headers in requests:
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            head = f"Host: gateway\r\nContent-Length: 100\r\nContent-Type: application/json\r\n{headers}"
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
            began = time.monotonic()
            assert b" 401 " in _until(connection, b"\r\n"), path
            assert time.monotonic() - began < 5, path


def test_another_tenants_sandbox_is_one_that_does_not_exist(target: Target) -> None:
    other, url = {"X-API-Key": target.gateway.other_token}, target.gateway.url

    def answers(sandbox_id: str) -> list[tuple[int, str]]:
        found = [
            httpx.get(f"{url}/sandboxes/{sandbox_id}", headers=other),
            httpx.get(f"{url}/sandboxes/{sandbox_id}/metrics", headers=other),
            httpx.delete(f"{url}/sandboxes/{sandbox_id}", headers=other),
            httpx.post(f"{url}/v2/sandboxes/{sandbox_id}/connect", json={}, headers=other),
            httpx.post(f"{url}/sandboxes/{sandbox_id}/timeout", json={"timeout": 1}, headers=other),
        ]
        return [(answer.status_code, answer.text.replace(sandbox_id, "ID")) for answer in found]

    own = target.sandbox.sandbox_id
    assert answers(own) == answers("i" + "0" * (len(own) - 1))
    assert {status for status, _ in answers(own)} == {404}
    assert httpx.get(f"{url}/v2/sandboxes", headers=other).json() == []
    assert target.sandbox.is_running()


class _Printing:
    """A session whose sandbox prints this instead of a measurement."""

    def __init__(self, stdout: str) -> None:
        self._stdout = stdout
        self.processes = self
        self.info = SimpleNamespace(limits=SimpleNamespace(memory_bytes=1, disk_bytes=1))

    async def run(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(stdout=self._stdout)


@pytest.mark.asyncio
@pytest.mark.parametrize("cpu_s", ["1" + "0" * 400, "1e308", "NaN", "-1", "true", "[]"])
async def test_measurement_that_is_no_number_of_ours_is_refused(cpu_s: str) -> None:
    with pytest.raises(Refusal, match="did not answer"):
        await sample(_Printing(f"[{cpu_s}, 1, 1, 1]"), 0.0)  # type: ignore[arg-type]


def test_clients_that_do_not_read_cost_little_and_hold_up_nobody(target: Target) -> None:
    target.sandbox.commands.run("head -c 50000000 /dev/zero > large")
    before = target.memory_bytes
    frame = _frame({"process": {"cmd": "/bin/bash", "args": ["-c", "cat /dev/zero"]}})
    endless = json.dumps({"code": "while True: print('x' * 100_000)"}).encode()
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(target.stream("envd", "/files?path=large", b""))
        started = target.stream("envd", "/process.Process/Start", frame, Content_Type="application/connect+json")
        stack.enter_context(started)
        stack.enter_context(target.stream("interpreter", "/execute", endless))
        for _ in range(3):
            assert target.sandbox.commands.run("echo here").stdout == "here\n"
        assert target.memory_bytes < before + GROWTH_BYTES
    # They have left, and with them their execution; the next one is not behind it.
    code = json.dumps({"code": "1 + 1"}).encode()
    assert b'"text": "2"' in target.post("interpreter", "/execute", code).content


def test_visitors_of_a_port_take_no_place_of_the_owners_requests(target: Target) -> None:
    """Requests that withheld their bodies counted as the owner's, who got 429 for everything while they lasted."""
    head = (
        f"Host: gateway\r\nContent-Length: 1\r\nE2b-Sandbox-Id: {target.sandbox.sandbox_id}\r\nE2b-Sandbox-Port: 8000"
    )
    place = ("127.0.0.1", int(target.gateway.url.rpartition(":")[2]))
    with ExitStack() as stack:
        visitors = [stack.enter_context(socket.create_connection(place, TIMEOUT_S)) for _ in range(VISITS_MAX + 1)]
        for visitor in visitors:
            visitor.sendall(f"POST / HTTP/1.1\r\n{head}\r\n\r\n".encode())
        refused, _, _ = select.select(visitors, (), (), TIMEOUT_S)  # once all the others have arrived
        assert b" 429 " in _until(refused[0], b"\r\n")
        answer = httpx.get(f"{target.gateway.url}/v2/sandboxes", headers=target.headers("rest"), timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text


def test_streams_break_if_gateway_or_daemon_stops_and_never_end_as_if_whole() -> None:
    with daemon_on("local") as daemon, running_gateway(daemon) as gateway, pytest.MonkeyPatch.context() as patch:
        for name, value in gateway.environment().items():
            patch.setenv(name, value)
        target = Target(gateway, Sandbox.create())
        sleep = "print('begun', flush=True)\nimport time\ntime.sleep(600)"
        bodies = [
            ("interpreter", "/execute", json.dumps({"code": sleep}).encode(), "application/json", b"begun"),
            (
                "envd",
                "/process.Process/Start",
                _frame(_bash("echo begun; sleep 600")),
                "application/connect+json",
                b"YmVndW4K",
            ),
            (
                "envd",
                "/filesystem.Filesystem/WatchDir",
                _frame({"path": "/home/user"}),
                "application/connect+json",
                b"start",
            ),
        ]
        with ExitStack() as stack:
            streams = []
            for kind, path, body, content_type, begun in bodies:
                stream = stack.enter_context(target.stream(kind, path, body, Content_Type=content_type))
                assert begun in _until(stream, begun)
                streams.append(stream)
            left = stack.enter_context(target.stream("interpreter", "/execute", bodies[0][2]))
            left.close()
            began = time.monotonic()
            gateway.process.send_signal(signal.SIGTERM)
            for stream in streams:
                assert not _until(stream, None).endswith(b"0\r\n\r\n")  # the end of a whole answer
            assert gateway.process.wait(TIMEOUT_S) == 0
            assert time.monotonic() - began < 20
        # The next gateway knows the sandbox, and the daemon has kept it.
        with running_gateway(daemon) as gateway:
            target = Target(gateway, target.sandbox)
            answer = target.post("envd", "/process.Process/List", b"{}", content_type="application/json")
            assert "sleep 600" in answer.text
            httpx.delete(f"{gateway.url}/sandboxes/{target.sandbox.sandbox_id}", headers={"X-API-Key": gateway.token})


def test_streams_go_on_with_the_next_daemon_or_end_with_an_error() -> None:
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        daemon = stack.enter_context(running_daemon(directory, "--backend", "local"))
        gateway = stack.enter_context(running_gateway(daemon))
        for name, value in gateway.environment().items():
            patch.setenv(name, value)
        target = Target(gateway, Sandbox.create())
        code = "import os, time\nprint('begun')\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('done')"
        bash = _frame(_bash("echo begun; until [ -e go ]; do sleep 0.1; done; echo done"))
        framed = {"Content_Type": "application/connect+json"}
        execution = stack.enter_context(target.stream("interpreter", "/execute", json.dumps({"code": code}).encode()))
        command = stack.enter_context(target.stream("envd", "/process.Process/Start", bash, **framed))
        watch_dir = _frame({"path": "/home/user"})
        watch = stack.enter_context(target.stream("envd", "/filesystem.Filesystem/WatchDir", watch_dir, **framed))
        for stream, begun in ((execution, b"begun"), (command, b"YmVndW4K"), (watch, b"start")):
            assert begun in _until(stream, begun)
        daemon.kill()
        stack.enter_context(running_daemon(directory, "--backend", "local"))
        target.sandbox.files.write("go", "")
        assert b"end_of_execution" in (ended := _until(execution, b"0\r\n\r\n")), ended
        assert b"done" in ended
        assert b'"exited": true' in (ended := _until(command, b"0\r\n\r\n")), ended
        seen = _until(watch, b"}}")
        assert b"EVENT_TYPE_CREATE" in seen or b'"error"' in seen, seen
        target.sandbox.kill()
    shutil.rmtree(directory)


def _bash(command: str) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-c", command]}}


def _until(stream: socket.socket, part: bytes | None) -> bytes:
    """Reads until a part, or to the end."""
    read = b""
    try:
        while part is None or part not in read:
            piece = stream.recv(65_536)
            if not piece:
                break
            read += piece
    except ConnectionResetError:
        pass
    return read
