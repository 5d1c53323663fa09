"""The egress service with its real process, and sessions whose listeners are sockets of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from executor_server.core import NO_NETWORK_USE, EgressConnection, EgressDenial, NetworkRules, NetworkUsage
from executor_server.network.egress import EgressService, EgressSettings
from executor_server.network.egress.proxy_process import PROXY_COMMAND
from executor_server.network.proxy.authority import ensure_authority
from tests.support.internet.world import Internet

# The real process, in which imports fail from its confinement on.
COMMAND = (*PROXY_COMMAND[:-2], str(Path(__file__).with_name("egress_programs") / "no_imports.py"))
# Seconds for what takes milliseconds on an idle machine.
SOON_S = 60.0
_clients: WeakKeyDictionary[EgressService, list[asyncio.StreamWriter]] = WeakKeyDictionary()


@dataclass
class RecordingSink:
    """Remembers what was reported to it, in order."""

    opened: list[EgressConnection] = field(default_factory=list)
    closed: list[EgressConnection] = field(default_factory=list)
    denied: list[EgressDenial] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)
    rulings: dict[tuple[str, int], asyncio.Future[str]] = field(default_factory=dict)
    uncounted: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    reports: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def connection_opened(self, connection: EgressConnection) -> None:
        self.opened.append(connection)
        self._note("opened")

    def connection_closed(self, connection: EgressConnection) -> None:
        self.closed.append(connection)
        self._note("closed")

    def connection_denied(self, denial: EgressDenial) -> None:
        self.denied.append(denial)
        self._note("denied")

    def denials_uncounted(self, count: int) -> None:
        self.uncounted += count
        self._note("uncounted")

    async def host_asked(self, host: str, port: int) -> str:
        self.asked.append((host, port))
        self._note("asked")
        return await self.rulings.setdefault((host, port), asyncio.get_running_loop().create_future())

    def listener_misused(self) -> None:
        self._note("misused")

    def moved(self, sent_bytes: int, received_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        self.received_bytes += received_bytes
        self._note("moved")

    def _note(self, kind: str) -> None:
        self.reports.append(kind)
        self._news.set()

    async def until(self, condition: Any) -> None:
        """Returns when the condition holds, which is asked again after each report."""
        async with asyncio.timeout(SOON_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@dataclass
class BoundSession:
    """A session of the service, with the address at which its programs would find the proxy."""

    session_id: str
    address: tuple[str, int]
    sink: RecordingSink
    service: EgressService

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        _clients.setdefault(self.service, []).append(writer)
        return reader, writer

    async def tunnel(self, target: str) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Asks for a tunnel; returns the status and the connection."""
        reader, writer = await self.connect()
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        async with asyncio.timeout(SOON_S):
            head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1]), reader, writer

    async def tls(
        self, target: str, context: ssl.SSLContext, server_name: str | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens TLS in a tunnel."""
        status, reader, writer = await self.tunnel(target)
        assert status == 200
        await writer.start_tls(context, server_hostname=server_name or target.partition(":")[0])
        return reader, writer


def place_authority(directory: Path) -> None:
    """Makes the directory of a proxy with the authority that this process has made once, in place of one of its own."""
    directory.mkdir(mode=0o700)
    for name, content in _authority().items():
        (directory / name).write_bytes(content)
        (directory / name).chmod(0o600)


@functools.cache
def _authority() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="authority-") as made:
        ensure_authority(Path(made))
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}


@contextlib.asynccontextmanager
async def egress_service(
    settings: EgressSettings | None = None, command: Sequence[str] = COMMAND
) -> AsyncIterator[EgressService]:
    """A service with a directory of its own. Its process is started by the first session."""
    with tempfile.TemporaryDirectory(prefix="egress-") as directory:
        place_authority(Path(directory) / "egress")
        service = EgressService(settings or EgressSettings(), Path(directory) / "egress", command=command)
        try:
            yield service
        finally:
            for writer in _clients.pop(service, ()):
                writer.transport.abort()
            await service.close()


def settings_for(internet: Internet, **more: Any) -> EgressSettings:
    """Settings with which names of the world resolve, and its address may be reached."""
    keys: dict[str, Any] = {
        "internal": (f"{internet.address}/32",),
        "resolver": (internet.resolver,),
        "ca_file": internet.ca_file,
    }
    return EgressSettings(**{**keys, **more})


async def bind(
    service: EgressService,
    rules: NetworkRules,
    session_id: str = "s",
    used: NetworkUsage = NO_NETWORK_USE,
    total_bytes: int | None = None,
) -> BoundSession:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    address = listener.getsockname()
    sink = RecordingSink()
    await service.bind(session_id, rules, listener, sink, used, total_bytes)
    return BoundSession(session_id, address, sink, service)


async def sandbox_context(service: EgressService) -> ssl.SSLContext:
    """A client's context that trusts what sandboxes trust."""
    path = await asyncio.to_thread(lambda: service.ca_bundle)
    return ssl.create_default_context(cafile=str(path))
