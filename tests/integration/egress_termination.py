"""Terminated TLS on loopback: the proxy's engine with its terminator, servers of the test's own, and a raw client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11

from executor_server.network.proxy.authority import CERTIFICATE_NAME
from executor_server.network.proxy.authority import Authority as ProxyAuthority
from executor_server.network.proxy.secrets import Secrets
from executor_server.network.proxy.terminator import TlsTerminator, upstream_context
from tests.support.certificates import Authority, Pair
from tests.support.egress_engine import SOON_S, Engine, Handler, engine

HOST = "api.example"
TOKEN = "t0ken-of-the-test"
SECRET = {"host": HOST, "header": "Authorization", "value": "Bearer ${bot}"}


@dataclass
class Response:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


@dataclass
class Client:
    """A client inside the sandbox that sends what it likes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    authority: str = HOST

    def send(self, data: bytes | str) -> None:
        self.writer.write(data.encode() if isinstance(data, str) else data)

    async def response(self, method: bytes = b"GET") -> Response:
        """Reads one response, and not a byte more than h11 needs."""
        machine = h11.Connection(h11.CLIENT)
        machine.send(h11.Request(method=method, target="/", headers=[("Host", "x")]))
        machine.send(h11.EndOfMessage())
        head: h11.Response | None = None
        body = b""
        async with asyncio.timeout(SOON_S):
            while True:
                event = machine.next_event()
                if event is h11.NEED_DATA:
                    machine.receive_data(await self.reader.read(65536))
                elif isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    break
        assert head is not None
        return Response(head.status_code, list(head.headers), body)

    async def get(self, path: str, *headers: str) -> Response:
        lines = (f"GET {path} HTTP/1.1", f"Host: {self.authority}", *headers, "")
        self.send("".join(f"{line}\r\n" for line in lines))
        return await self.response()

    async def rest(self) -> bytes:
        async with asyncio.timeout(SOON_S):
            try:
                return await self.reader.read(-1)
            except (ConnectionError, ssl.SSLError):
                return b""


@dataclass
class Termination:
    """An engine whose session may reach HOST, with the secret."""

    engine: Engine
    port: int
    secrets: Secrets
    context: ssl.SSLContext  # for clients: it trusts the proxy's authority

    async def connect(self, **changes: Any) -> Client:
        reader, writer = await self.engine.tunnel(f"{HOST}:{self.port}")
        await writer.start_tls(self.context, **{"server_hostname": HOST, **changes})
        return Client(reader, writer, f"{HOST}:{self.port}")


@asynccontextmanager
async def termination(
    directory: Path,
    handler: Handler,
    *,
    secret: dict[str, Any] | None = None,
    pair: Callable[[Authority], Pair] | None = None,
    server: ssl.SSLContext | None = None,
    **limits: Any,
) -> AsyncIterator[Termination]:
    """Serves HOST by `handler`, with a certificate that verifies unless `pair` makes another."""
    authority = Authority(directory / "world")
    made = pair(authority) if pair is not None else authority.site("site", HOST)
    context = server or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    secrets = Secrets()
    secrets.replace({"bot": TOKEN})
    own = ProxyAuthority.read(directory / "egress")
    terminator = TlsTerminator(own, upstream_context(str(authority.cert)), secrets)
    async with engine(terminator=terminator) as running:
        port = await running.start_server(handler, context)
        running.allow(f"{HOST}:{port}", secrets=[{**SECRET, **(secret or {})}], **limits)
        client = ssl.create_default_context(cafile=str(directory / "egress" / CERTIFICATE_NAME))
        yield Termination(running, port, secrets, client)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Reads one request of a server as raw bytes: its head, and the body that its framing announces."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    body = b""
    if b"\r\ntransfer-encoding: chunked" in lower:
        while not body.endswith(b"0\r\n\r\n"):
            body += await reader.readuntil(b"\r\n")
    elif b"\r\ncontent-length:" in lower:
        body = await reader.readexactly(int(lower.split(b"\r\ncontent-length:")[1].split(b"\r\n")[0]))
    return head, body


def values_of(head: bytes, name: bytes) -> list[bytes]:
    """Every value of a header, each as often as it was sent."""
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:] if line]
    return [value.strip() for key, _, value in lines if key.lower() == name.lower()]
