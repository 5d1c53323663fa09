"""ExecutorService over HTTP: by a Connect client, and by those who have none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from connectrpc.client import ConnectClient
from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.compat import google_protobuf_binary_codec, google_protobuf_json_codec
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo
from google.rpc import error_details_pb2

from executor_api.v1 import executor_service_pb2 as pb
from tests.support.daemon import Daemon
from tests.support.gateway import Gateway, running_gateway
from tests.support.polling import eventually

SERVICE = "executor_api.v1.ExecutorService"
PAGE = "https://app.example"
WATCHES_MAX = 8
_ids = (f"id-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def gateway(daemon: Daemon) -> Iterator[Gateway]:
    with running_gateway(daemon, config=f'[gateway]\nallowed_origins = ["{PAGE}"]') as running:
        yield running


class Caller:
    """A Connect client of the gateway. `call` returns the answer, `stream` the answers."""

    def __init__(self, gateway: Gateway, codec: Codec[Any, Any], token: str | None = None) -> None:
        self._client = ConnectClient(gateway.url, codec=codec)
        self._headers = {"authorization": f"Bearer {token or gateway.token}"}

    def _call(self, request: Any) -> dict[str, Any]:
        name = type(request).DESCRIPTOR.name.removesuffix("Request")
        answer = getattr(pb, f"{name}Response")
        method = MethodInfo(
            name=name,
            service_name=SERVICE,
            input=type(request),
            output=answer,
            idempotency_level=IdempotencyLevel.UNKNOWN,
        )
        return {"method": method, "headers": self._headers}

    async def call(self, request: Any, timeout_ms: int | None = None) -> Any:
        return await self._client.execute_unary(request=request, timeout_ms=timeout_ms, **self._call(request))

    def stream(self, request: Any, timeout_ms: int | None = None) -> AsyncIterator[Any]:
        return self._client.execute_server_stream(request=request, timeout_ms=timeout_ms, **self._call(request))

    async def upload(self, *requests: Any) -> Any:
        return await self._client.execute_client_stream(request=_each(requests), **self._call(requests[0]))

    def talk(self, first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return self._client.execute_bidi_stream(request=_behind(first, rest), **self._call(first))

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[str]:
        created = await self.call(pb.CreateSessionRequest(request_id=next(_ids)))
        try:
            yield created.session.session_id
        finally:
            await self.call(pb.DeleteSessionRequest(session_id=created.session.session_id))


async def _each(requests: tuple[Any, ...]) -> AsyncIterator[Any]:
    for request in requests:
        yield request


async def _behind(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for request in rest:
        yield request


@pytest.fixture(params=["proto", "json"])
def caller(request: pytest.FixtureRequest, gateway: Gateway) -> Caller:
    codec = google_protobuf_binary_codec() if request.param == "proto" else google_protobuf_json_codec()
    return Caller(gateway, codec)


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    """An HTTP client without Connect, with a token."""
    with httpx.Client(base_url=gateway.url, headers={"authorization": f"Bearer {gateway.token}"}, timeout=60) as client:
        yield client


def of(method: str) -> str:
    return f"/{SERVICE}/{method}"


# ---------------------------------------------------------------------------------------------------------------------
# Connect


async def test_every_kind_of_method_works_in_both_encodings(caller: Caller) -> None:
    async with caller.session() as session_id:
        execute = pb.ExecuteRequest(session_id=session_id, execution_id="1", code="print('über')\n[1, 'a']")
        *logs, last = [answer.event async for answer in caller.stream(execute)]
        assert "".join(each.log.text for each in logs) == "über\n"
        assert last.result.output.packed.inline.endswith(b'["list",1,"a"]')

        header = pb.PutFileHeader(session_id=session_id, path="d/f", size_bytes=300_000)
        pieces = [pb.PutFileRequest(data=b"\0\xff" * 75_000) for _ in range(2)]
        put = await caller.upload(pb.PutFileRequest(header=header), *pieces)
        assert put.file.size_bytes == 300_000
        got = b"".join(
            [each.data async for each in caller.stream(pb.GetFileRequest(session_id=session_id, path="d/f"))]
        )
        assert got == b"\0\xff" * 150_000


async def test_a_stream_in_both_directions_is_a_conversation(caller: Caller) -> None:
    server = (
        "import socket as s; l = s.create_server(('127.0.0.1', 8123)); print('up', flush=True); c, _ = l.accept()\n"
    )
    echo = "while d := c.recv(99): c.sendall(d.upper())"
    async with caller.session() as session_id:
        start = pb.StartProcessRequest(session_id=session_id, process_id="1", argv=["python3", "-c", server + echo])
        async for answer in caller.stream(start):
            if answer.event.HasField("output"):
                break
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def says() -> AsyncIterator[pb.ForwardPortRequest]:
            for word in (b"one", b"two"):
                yield pb.ForwardPortRequest(data=word)
                assert await heard.get() == word.upper()  # the second is said when the first was answered
            yield pb.ForwardPortRequest(shutdown=pb.Shutdown())

        opened = pb.ForwardPortRequest(open=pb.OpenPort(session_id=session_id, port=8123))
        async for said in caller.talk(opened, says()):
            if said.HasField("data"):
                heard.put_nowait(said.data)
        assert heard.empty()


async def test_refusals_have_the_daemons_code_message_and_reason(caller: Caller, gateway: Gateway) -> None:
    def reason(error: ConnectError) -> str:
        info = error_details_pb2.ErrorInfo()
        (packed,) = [each.message_bytes for each in error.details if each.type_name == "google.rpc.ErrorInfo"]
        info.ParseFromString(packed)
        return str(info.reason)

    async with caller.session() as session_id:
        with pytest.raises(ConnectError) as unary:
            await caller.call(pb.GetSessionRequest(session_id="0" * 32))
        assert (unary.value.code, reason(unary.value)) == (Code.NOT_FOUND, "SESSION_NOT_FOUND")
        with pytest.raises(ConnectError, match="ends after 2 of the 3 bytes") as upload:
            header = pb.PutFileHeader(session_id=session_id, path="f", size_bytes=3)
            await caller.upload(pb.PutFileRequest(header=header), pb.PutFileRequest(data=b"12"))
        assert upload.value.code is Code.INVALID_ARGUMENT
        foreign = Caller(gateway, google_protobuf_binary_codec(), gateway.other_token)
        with pytest.raises(ConnectError) as other:
            _ = [each async for each in foreign.stream(pb.GetFileRequest(session_id=session_id, path="f"))]
        assert (other.value.code, reason(other.value)) == (Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_a_deadline_is_the_daemons_too(caller: Caller) -> None:
    async with caller.session() as session_id:
        execute = pb.ExecuteRequest(session_id=session_id, execution_id="1", code="import time; time.sleep(600)")
        with pytest.raises(ConnectError) as late:
            _ = [each async for each in caller.stream(execute, timeout_ms=300)]
        assert late.value.code is Code.DEADLINE_EXCEEDED
        await caller.call(pb.CancelExecutionRequest(session_id=session_id, execution_id="1"))


async def test_a_client_that_leaves_a_silent_stream_ends_it(gateway: Gateway) -> None:
    """A session has few watches: those of clients that left must not count."""
    caller = Caller(gateway, google_protobuf_binary_codec())
    async with caller.session() as session_id:
        for _ in range(2 * WATCHES_MAX):
            async with asyncio.timeout(30):
                while True:
                    stream = caller.stream(pb.WatchFilesRequest(session_id=session_id))
                    try:
                        await anext(stream)
                        break
                    except ConnectError as error:
                        assert error.code is Code.RESOURCE_EXHAUSTED  # the last one is just being ended
                    finally:
                        await stream.aclose()  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------------------------------
# Without a Connect client


def test_curl_needs_no_envelopes(http: httpx.Client) -> None:
    """`curl -d` sends JSON under the type of a form."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    created = http.post(of("CreateSession"), content=json.dumps({"requestId": next(_ids)}), headers=form).json()
    execute = {"sessionId": created["session"]["sessionId"], "executionId": "1", "code": "print(2)\n1+1"}
    answer = http.post(of("Execute"), content=json.dumps(execute), headers=form)
    assert answer.headers["content-type"] == "application/x-ndjson"
    log, last = map(json.loads, answer.text.splitlines())
    assert log["event"]["log"] == {"stream": "OUTPUT_STREAM_STDOUT", "text": "2\n"}
    assert base64.b64decode(last["event"]["result"]["output"]["packed"]["inline"]).endswith(b"2")

    late = http.post(of("AttachExecution"), json={**execute, "afterEvent": 1} | {"code": None})
    assert late.status_code == 400  # a field that this request does not have
    late = http.post(of("Execute"), json=execute | {"executionId": "2", "sessionId": "0" * 32})
    assert (late.status_code, late.json()["code"]) == (404, "not_found")
    assert late.json()["details"][0]["debug"] == {"reason": "SESSION_NOT_FOUND", "domain": "remote-executor"}

    spinning = execute | {"executionId": "3", "code": "print(1)\nwhile True: pass"}
    cut = http.post(of("Execute"), json=spinning, headers={"connect-timeout-ms": "500"})
    log, last = map(json.loads, cut.text.splitlines())
    assert (cut.status_code, last["error"]["code"]) == (200, "deadline_exceeded")
    http.post(of("DeleteSession"), json={"sessionId": execute["sessionId"]})


def test_a_run_has_all_results(http: httpx.Client) -> None:
    code = (
        "import matplotlib.pyplot as plt, sys\nplt.plot([1, 2]); plt.show()\n"
        "print('out'); print('err', file=sys.stderr)\nopen('f.bin', 'wb').write(b'\\0\\1')\n{'a': (1, None, 'ü')}"
    )
    request = {
        "code": code,
        "authorized_imports": ["matplotlib.*", "sys"],
        "env": {"A": "b"},
        "limits": {"wall_time_s": 30},
    }
    answer = http.post("/v1/run", json=request)
    run = answer.json()
    assert (answer.status_code, run["outcome"], run["error"]) == (200, "succeeded", None), run
    assert (run["output"], run["output_text"]) == ({"a": [1, None, "ü"]}, "{'a': (1, None, 'ü')}")
    assert (run["stdout"], run["stderr"], run["logs"]) == ("out\n", "err\n", "out\nerr\n")
    (image,) = run["images"]
    assert base64.b64decode(image["data"]).startswith(b"\x89PNG")
    (file,) = run["files"]
    assert (file["path"], file["size_bytes"], base64.b64decode(file["data"])) == ("f.bin", 2, b"\0\1")
    assert run["usage"]["wall_time_s"] > 0

    failed = http.post("/v1/run", json={"code": "print(1)\n1/0"}).json()
    assert (failed["outcome"], failed["logs"], failed["output_text"]) == ("exception", "1\n", None)
    assert (failed["error"]["type"], failed["error"]["line"]) == ("ZeroDivisionError", 2)
    assert http.post(of("ListSessions"), json={}).json() == {}


@pytest.mark.parametrize(
    "code",
    [
        "float('nan')",
        "10 ** 5000",
        "object()",
        "'\\ud800'",
        "x = []\nx.append(x)\nx",
        "x = 'a'\nfor _ in range(6): x = [x] * 9\nx",
        "'x' * (5 << 20)",
    ],
)
def test_a_value_that_json_can_not_hold_is_text(http: httpx.Client, code: str) -> None:
    answer = http.post("/v1/run", json={"code": code})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"] is None or code.startswith("'\\ud")
    assert answer.json()["output_text"]
    assert len(answer.content) < 8 << 20


def test_a_run_is_refused_with_a_reason(http: httpx.Client) -> None:
    for request, code, message in [
        ({"code": 1}, "invalid_argument", "code: Input should be a valid string"),
        ({"code": "1", "imports": []}, "invalid_argument", "imports: Extra inputs are not permitted"),
        ({"code": "1", "image": "dta"}, "invalid_argument", "no image 'dta'"),
        ({"code": "1", "limits": {"wall_time": 1}}, "invalid_argument", "did you mean wall_time_s?"),
        ({"code": "1", "network": ["evil.example"]}, "permission_denied", "network: asked for evil.example"),
    ]:
        answer = http.post("/v1/run", json=request)
        assert (answer.status_code, answer.json()["code"]) == (403 if code == "permission_denied" else 400, code)
        assert message in answer.json()["message"]
    assert http.post("/v1/run", content=b"x" * (3 << 20)).status_code == 429
    assert http.post("/v1/run", content="[" * 100_000).status_code == 400
    many = http.post("/v1/run", content='{"code": "", "packages": [' + "1," * 900_000 + "1]}")
    assert (many.status_code, many.elapsed.total_seconds() < 5) == (400, True)
    commas = http.post("/v1/run", json={"code": f"'{',' * 900_000}'[:1] + '\\\\\"'"})
    assert commas.json()["output"] == ',\\"'


async def test_a_caller_that_leaves_ends_its_run(http: httpx.Client, gateway: Gateway) -> None:
    def sessions() -> int:
        return len(http.post(of("ListSessions"), json={}).json().get("sessions", []))

    async with httpx.AsyncClient(base_url=gateway.url, headers=http.headers) as client:
        running = asyncio.create_task(client.post("/v1/run", json={"code": "while True: pass"}))
        assert await asyncio.to_thread(eventually, lambda: sessions() == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert await asyncio.to_thread(eventually, lambda: sessions() == 0)


# ---------------------------------------------------------------------------------------------------------------------
# Who may call, and what


def test_no_call_without_the_callers_own_token(gateway: Gateway) -> None:
    """The gateway's own user is known to the daemon's socket. That must open nothing to others."""
    for path, body in [(of("GetPolicy"), {}), (of("Execute"), {}), ("/v1/run", {"code": "1"})]:
        for headers in [
            {},
            {"authorization": "Bearer x"},
            {"authorization": "Basic eDp5"},
            {"x-api-key": gateway.token},
        ]:
            answer = httpx.post(gateway.url + path, json=body, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), answer.text
            assert "unix:" not in answer.text


def test_what_is_not_offered_says_so(http: httpx.Client) -> None:
    for path in ("/executor_api.v1.AdminService/ListAllSessions", of("Nope"), "/nope", "/"):
        answer = http.post(path, json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "unimplemented")
    for method, content_type in [
        ("Execute", "application/grpc"),
        ("GetPolicy", "text/xml"),
        ("PutFile", "application/json"),
    ]:
        answer = http.post(of(method), content=b"{}", headers={"content-type": content_type})
        assert (answer.status_code, method in answer.json()["message"]) == (415, True)
    assert http.get(of("GetPolicy")).status_code == 405


def envelope(content: bytes, *, flags: int = 0, length: int | None = None) -> bytes:
    return struct.pack(">BI", flags, len(content) if length is None else length) + content


MEMBERS = gzip.compress(b"") * 100_000


@pytest.mark.parametrize(
    ("method", "content_type", "body", "headers"),
    [
        ("GetPolicy", "application/proto", b"\xff" * 100, {}),
        ("GetPolicy", "application/json", b"\xff", {}),
        ("GetPolicy", "application/json", b"[" * 100_000, {}),
        ("GetPolicy", "application/json", b'{"x": 1}', {}),
        ("GetPolicy", "application/json", b"1" * 10_000, {}),
        ("GetPolicy", "application/json", b"x" * (5 << 20), {}),
        ("CreateSession", "application/json", b'{"authorizedImports": [' + b'"",' * 1_300_000 + b'""]}', {}),
        ("RegisterTools", "application/json", b'{"x":"\\\\\\"","tools": [' + b"{}," * 1_300_000 + b"{}]}", {}),
        ("GetPolicy", "application/json", MEMBERS, {"content-encoding": "gzip"}),
        ("GetPolicy", "application/json", b"{}", {"content-encoding": "gzip"}),
        ("GetPolicy", "application/json", b"{}", {"content-encoding": "br"}),
        ("GetPolicy", "application/json", b"{}", {"connect-timeout-ms": "99999999999"}),
        ("GetPolicy", "application/json", b"{}", {"connect-timeout-ms": "0"}),
        ("GetPolicy", "application/json", b"{}", {"connect-protocol-version": "2"}),
        ("GetPolicy", "application/json", b"{}", {"x": "\xff"}),
        ("Execute", "application/json", b"x" * (5 << 20), {}),
        ("Execute", "application/json", b"", {}),
        ("Execute", "application/connect+json", b"", {}),
        ("Execute", "application/connect+json", envelope(b"{}", length=1 << 31), {}),
        ("Execute", "application/connect+json", envelope(b"{}", length=100), {}),
        ("Execute", "application/connect+json", envelope(b"{}", length=1), {}),
        ("Execute", "application/connect+json", b"\0\0", {}),
        ("Execute", "application/connect+json", envelope(b"", flags=2), {}),
        ("Execute", "application/connect+json", envelope(b"{}") * 2, {}),
        ("Execute", "application/connect+json", envelope(b"{}", flags=1), {}),
        ("Execute", "application/connect+proto", envelope(b"\xff", flags=0xFE), {}),
        ("Execute", "application/connect+json", envelope(MEMBERS, flags=1), {"connect-content-encoding": "gzip"}),
        ("PutFile", "application/connect+json", envelope(b"{}") + b"\0", {}),
        ("PutFile", "application/connect+proto", envelope(b"") * 10_000, {}),
        ("ForwardPort", "application/connect+proto", envelope(b"\xff"), {}),
        ("UploadBlob", "application/connect+proto", b"\0\0\0", {}),
    ],
)
def test_hostile_input_is_the_clients_error(
    http: httpx.Client, gateway: Gateway, method: str, content_type: str, body: bytes, headers: dict[str, str]
) -> None:
    before = gateway.log.stat().st_size
    raw = {name.encode(): value.encode("latin-1") for name, value in {"content-type": content_type, **headers}.items()}
    answer = http.post(of(method), content=body, headers=raw)
    assert answer.elapsed.total_seconds() < 5
    if answer.status_code == 200:
        flags, length = struct.unpack(">BI", answer.content[:5])
        assert (flags, length) == (2, len(answer.content) - 5)
        error = json.loads(answer.content[5:])["error"]
    else:
        error = answer.json()
    assert error["code"] not in ("unknown", "unavailable", "data_loss"), error
    assert "incident" not in error["message"]
    assert gateway.log.stat().st_size == before, gateway.log.read_text()[before:]
    assert http.post(of("GetPolicy"), json={}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/run", of("GetPolicy"), of("Execute"), of("PutFile")])
def test_a_request_that_breaks_off_is_no_failure_of_ours(http: httpx.Client, gateway: Gateway, path: str) -> None:
    before = gateway.log.stat().st_size
    address = httpx.URL(gateway.url)
    kind = "application/connect+json" if path.endswith("PutFile") else "application/json"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.token}\r\ncontent-type: {kind}\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
    assert http.post(of("GetPolicy"), json={}).status_code == 200
    assert gateway.log.stat().st_size == before, gateway.log.read_text()[before:]


def test_pages_of_the_list_may_call_and_no_others(gateway: Gateway) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for origin, allowed in [
        (PAGE, True),
        ("https://evil.example", False),
        (f"{PAGE}.evil.example", False),
        ("null", False),
    ]:
        headers = {"origin": origin, "authorization": f"Bearer {gateway.token}"}
        preflight = httpx.options(gateway.url + of("GetPolicy"), headers={"origin": origin, **ask})
        call = httpx.post(gateway.url + of("GetPolicy"), json={}, headers=headers)
        named = [each.headers.get("access-control-allow-origin") for each in (preflight, call)]
        assert named == ([origin, origin] if allowed else [None, None])
        assert preflight.is_success is allowed


def test_the_description_has_every_method_and_the_page_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    description = httpx.get(f"{gateway.url}/openapi.json").json()
    methods = pb.DESCRIPTOR.services_by_name["ExecutorService"].methods
    assert set(description["paths"]) == {"/v1/run", *(of(each.name) for each in methods)}
    assert all(item["post"].get("description") for item in description["paths"].values())
    page = httpx.get(f"{gateway.url}/try")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe" not in policy
    assert "://" not in page.text
    for path in ("/try.js", "/try.css"):
        assert httpx.get(gateway.url + path).is_success
        assert path in page.text
