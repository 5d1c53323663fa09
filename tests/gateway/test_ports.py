"""HTTP and WebSockets of a port of a sandbox, by host name over TLS and by headers, with HTTP/1.1 and HTTP/2."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import websockets
from e2b import Sandbox
from e2b.api import client_sync

from tests.support.certificates import Authority
from tests.support.daemon import Daemon
from tests.support.gateway import CONFIG, Gateway, running_gateway
from tests.support.polling import eventually

DOMAIN = "boxes.example"
SITE = """
import asyncio, hashlib
from aiohttp import web

async def hello(request):
    body = await request.read()
    seen = {"method": request.method, "path": request.raw_path, "host": request.host, "digest": hashlib.sha256(body).hexdigest(), "headers": sorted(request.headers)}
    return web.json_response(seen, headers={"X-Site": "yes", "Connection": "X-Hop", "X-Hop": "1"})

async def large(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(50):
        await response.write(b"x" * 1_000_000)
    return response

async def cut(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"half")
    request.transport.abort()
    return response

async def echo(request):
    socket = web.WebSocketResponse(protocols=["chat"])
    await socket.prepare(request)
    async for message in socket:
        if message.data == "close":
            await socket.close(code=4001, message=b"as told")
        elif isinstance(message.data, str):
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    return socket

async def elsewhere(request):
    raise web.HTTPFound("ws://127.0.0.1:1/")

async def garbage(reader, writer):
    await reader.read(1)
    writer.write(b"\\x00\\xff no HTTP " * 100_000)
    writer.close()

async def main():
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.get("/large", large), web.get("/cut", cut), web.get("/echo", echo), web.get("/elsewhere", elsewhere), web.route("*", "/{path:.*}", hello)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 8000).start()
    server = await asyncio.start_server(garbage, "127.0.0.1", 8001)
    await server.serve_forever()

asyncio.run(main())
"""


@dataclass(frozen=True)
class Place:
    """A gateway with a domain, and a sandbox with a site."""

    gateway: Gateway
    authority: Authority
    sandbox: Sandbox

    @property
    def port(self) -> int:
        return int(self.gateway.url.rpartition(":")[2])

    def by_name(self, port: int, *, http2: bool = False) -> httpx.Client:
        """A client of a port by its host name, over TLS; no name server knows the name."""
        host = self.sandbox.get_host(port)
        transport = _Resolved(http2, ssl.create_default_context(cafile=str(self.authority.cert)), host)
        return httpx.Client(base_url=self.gateway.url, transport=transport, headers={"Host": host}, timeout=60)

    def by_headers(self, port: int) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}


class _Resolved(httpx.HTTPTransport):
    def __init__(self, http2: bool, verify: ssl.SSLContext, host: str) -> None:
        super().__init__(http1=not http2, http2=http2, verify=verify)
        self._host = host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["sni_hostname"] = self._host.partition(":")[0]
        return super().handle_request(request)


@pytest.fixture(scope="module")
def place(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    pair = authority.site("wildcard", DOMAIN, f"*.{DOMAIN}", "localhost")
    config = f'[gateway]\ndomain = "{DOMAIN}:8443"\ntls_cert = "{pair.cert}"\ntls_key = "{pair.key}"\n{CONFIG}'
    with running_gateway(daemon, config=config) as gateway, pytest.MonkeyPatch.context() as patch:
        for name, value in {**gateway.environment(), "SSL_CERT_FILE": str(authority.cert)}.items():
            patch.setenv(name, value.replace("127.0.0.1", "localhost"))
        # The SDK reads the authorities once in a process, with the first of its transports.
        patch.setattr(client_sync, "_transports", {})
        patch.setattr(client_sync, "_httpx_transports", {})
        with Sandbox.create() as sandbox:
            sandbox.files.write("site.py", SITE)
            sandbox.commands.run("python3 site.py", background=True)
            found = Place(gateway, authority, sandbox)
            with found.by_name(8001) as client:
                assert eventually(lambda: "port is not open" not in client.get("/").text)
            yield found


@pytest.mark.parametrize("http2", [False, True])
def test_a_request_reaches_a_port_by_its_name(place: Place, http2: bool) -> None:
    with place.by_name(8000, http2=http2) as client:
        body = bytes(range(256)) * 20_000
        answer = client.put("/a%20b/c?d=%2F&e", content=body, headers={"X-Mine": "1", "Connection": "X-Mine"})
        assert (answer.http_version, answer.headers["x-site"]) == ("HTTP/2" if http2 else "HTTP/1.1", "yes")
        assert "x-hop" not in answer.headers
        seen = answer.json()
        assert (seen["method"], seen["path"]) == ("PUT", "/a%20b/c?d=%2F&e")
        assert seen["host"] == f"8000-{place.sandbox.sandbox_id}.{DOMAIN}:8443"
        assert seen["digest"] == hashlib.sha256(body).hexdigest()
        assert "X-Mine" not in seen["headers"]
        assert sum(map(len, client.get("/large").iter_bytes())) == 50_000_000


def test_a_request_reaches_a_port_by_headers_which_the_program_does_not_see(place: Place) -> None:
    verify = ssl.create_default_context(cafile=str(place.authority.cert))
    answer = httpx.get(
        place.gateway.url.replace("127.0.0.1", "localhost"), headers=place.by_headers(8000), verify=verify
    )
    assert answer.json()["method"] == "GET"
    assert not [name for name in answer.json()["headers"] if name.lower().startswith("e2b")]


def test_a_websocket_reaches_a_port(place: Place) -> None:
    async def talk() -> None:
        host = place.sandbox.get_host(8000)
        options: dict[str, Any] = {
            "ssl": ssl.create_default_context(cafile=str(place.authority.cert)),
            "host": "127.0.0.1",
            "port": place.port,
            "proxy": None,
        }
        async with websockets.connect(
            f"wss://{host}/echo", subprotocols=[websockets.Subprotocol("chat")], **options
        ) as connection:
            assert connection.subprotocol == "chat"
            await connection.send("text")
            assert await connection.recv() == "text"
            await connection.send(b"\0" * 1_000_000)
            assert await connection.recv() == b"\0" * 1_000_000
            await connection.send("close")
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd is not None
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4001, "as told")
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"wss://{host}/elsewhere", **options)
        assert refused.value.response.status_code == 302

    asyncio.run(talk())


def test_what_the_program_breaks_is_broken_for_the_client(place: Place) -> None:
    with place.by_name(8000) as client, pytest.raises(httpx.RemoteProtocolError):
        client.get("/cut")
    with place.by_name(8001) as client:
        assert client.get("/").status_code == 502
    with place.by_name(8002) as client:
        assert (client.get("/").status_code, client.get("/").json()["message"]) == (
            502,
            "The sandbox is running but port is not open",
        )


def test_a_private_sandbox_takes_traffic_with_its_token_only(place: Place) -> None:
    with Sandbox.create(network={"allow_public_traffic": False}) as private:
        headers = {"E2b-Sandbox-Id": private.sandbox_id, "E2b-Sandbox-Port": "8000"}
        with place.by_name(8000) as client:
            assert client.get("/", headers=headers).status_code == 403
            assert (
                client.get(
                    "/", headers={**headers, "E2b-Traffic-Access-Token": place.sandbox.traffic_access_token or "x"}
                ).status_code
                == 403
            )
            token = private.traffic_access_token
            assert token is not None
            assert (
                client.get("/", headers={**headers, "E2b-Traffic-Access-Token": token}).status_code == 502
            )  # no program
