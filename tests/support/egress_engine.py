"""The proxy engine of guest/egress on loopback, with a resolver, a classifier and servers of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Rules
from executor_server.guest.egress.protocols import (
    AddressClassifier,
    Connector,
    Limits,
    Reporter,
    Resolver,
    Terminator,
    Unresolved,
    Used,
)
from executor_server.guest.egress.proxy import Proxy

SESSION = "session-1"
# Seconds for what takes milliseconds.
SOON_S = 20.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Recorder(Reporter):
    """Keeps what the proxy reports, and lets a test wait for it."""

    def __init__(self) -> None:
        self.opened_connections: list[dict[str, Any]] = []
        self.closed_connections: list[dict[str, Any]] = []
        self.denials: list[dict[str, Any]] = []
        self.misused_sessions: list[str] = []
        self.asked: list[Target] = []
        self.rulings: dict[Target, asyncio.Future[str]] = {}  # of those that wait
        self.sent_bytes = self.received_bytes = 0
        self.reports: list[tuple[int, int]] = []
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        self._changed = asyncio.Event()

    def opened(self, session_id: str, connection: dict[str, Any]) -> None:
        self.opened_connections.append(connection)
        self._changed.set()

    def closed(self, session_id: str, connection: dict[str, Any]) -> None:
        self.closed_connections.append(connection)
        self._changed.set()

    async def denied(self, session_id: str, denial: dict[str, Any]) -> None:
        self.denials.append(denial)
        self._changed.set()
        if self.before_answer is not None:
            await self.before_answer()

    def moved(self, session_id: str, sent_bytes: int, received_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self.reports.append((sent_bytes, received_bytes))
        self._changed.set()

    async def ask(self, session_id: str, target: Target) -> str:
        self.asked.append(target)
        ruling: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.rulings[target] = ruling
        self._changed.set()
        try:
            return await ruling
        finally:
            del self.rulings[target]
            self._changed.set()

    def misused(self, session_id: str) -> None:
        self.misused_sessions.append(session_id)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def last_closed(self, count: int = 1) -> dict[str, Any]:
        await self.until(lambda: len(self.closed_connections) >= count)
        return self.closed_connections[count - 1]


class Names(Resolver):
    """Resolves the names that it was given; several answers for a name are given one after the other."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Sequence[str]]] = {}
        self.asked: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.hanging: set[str] = set()
        self.hung = asyncio.Event()

    async def resolve(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if host in self.hanging:
                self.hung.set()
                await asyncio.get_running_loop().create_future()
            answers = self.answers.get(host)
            if answers is None:
                raise Unresolved("does not exist")
            return answers.pop(0) if len(answers) > 1 else answers[0]
        finally:
            self.in_flight -= 1


class Addresses:
    """Refuses what it was given, and what is no address at all."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def why_refused(self, address: str) -> str | None:
        return self.refused.get(address)


@dataclass
class Engine:
    """A proxy that serves one session."""

    proxy: Proxy
    recorder: Recorder
    names: Names
    addresses: Addresses
    address: tuple[str, int]
    rules: dict[str, Any]
    _servers: list[asyncio.Server] = field(default_factory=list)
    _clients: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self._clients.append(writer)
        return reader, writer

    async def ask(self, request: bytes) -> bytes:
        """All that one connection is answered with, which the proxy ends."""
        reader, writer = await self.connect()
        writer.write(request)
        async with asyncio.timeout(SOON_S):
            return await reader.read(-1)

    async def tunnel(self, authority: str, rest: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        writer.write(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode() + rest)
        async with asyncio.timeout(SOON_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        return reader, writer

    async def start_server(self, handler: Handler, tls: ssl.SSLContext | None = None) -> int:
        """A server on 127.0.0.1; returns its port."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._clients.append(writer)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await handler(reader, writer)
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def name(self, host: str, *answers: Sequence[str]) -> None:
        self.names.answers[host] = list(answers) or [("127.0.0.1",)]

    def allow(self, *patterns: str, **limits: Any) -> None:
        """Adds patterns to the session's rules, and resolves their hosts to 127.0.0.1 where nothing else was said."""
        self.rules = {**self.rules, "allowed": [*self.rules.get("allowed", ()), *patterns], **limits}
        for pattern in patterns:
            self.names.answers.setdefault(pattern.removeprefix("*.").partition(":")[0], [("127.0.0.1",)])
        self.change(self.rules)

    def change(self, rules: dict[str, Any]) -> None:
        self.proxy.change(SESSION, Rules.read(rules))


@asynccontextmanager
async def engine(
    limits: Limits | None = None,
    *,
    terminator: Terminator | None = None,
    connector: Connector | None = None,
    classifier: AddressClassifier | None = None,
    used: Used | None = None,
    **changed_limits: Any,
) -> AsyncIterator[Engine]:
    """A proxy on this loop. Keyword arguments change single limits."""
    recorder, names, addresses = Recorder(), Names(), Addresses()
    proxy = Proxy(
        resolver=names,
        classifier=classifier or addresses,
        reporter=recorder,
        connector=connector,
        terminator=terminator,
        limits=replace(limits or Limits(), **changed_limits),
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = listener.getsockname()
    proxy.serve(SESSION, listener, Rules.read({}), used=used or Used())
    running = Engine(proxy, recorder, names, addresses, address, {})
    try:
        yield running
    finally:
        await proxy.close()
        for writer in running._clients:
            writer.transport.abort()
        for server in running._servers:
            server.close()
        async with asyncio.timeout(SOON_S):
            for server in running._servers:
                await server.wait_closed()
        for writer in running._clients:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def client_hello(
    server_name: str | None, *, versions: tuple[ssl.TLSVersion, ssl.TLSVersion] | None = None, curve: str = ""
) -> bytes:
    """The ClientHello of Python's own TLS; with a curve, the only one for which it has a key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if versions is not None:
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # old versions are what is tried
            context.minimum_version, context.maximum_version = versions
    if curve:
        context.set_ecdh_curve(curve)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=server_name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()
