"""The wall around one machine: what the cloud lets out of it, as E2B's own firewall does.

A machine's network leads nowhere: each IPv4 address is local in it, and the double listens there, from outside of the
machine, on the two ports on which a connection names its host. So every connection of the machine, to whatever address,
ends here. The double reads the name (the server name of a ClientHello, or the Host of a request), applies the rules as
E2B does, and connects to that name's own address: the one that the machine chose counts for nothing. A connection that
is not let out was accepted and is closed, as there. Other ports are closed, and so is UDP: E2B knows no names on them,
and lets out no address that the rules do not list.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import socket
import ssl
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import h11

HTTP_PORT, HTTPS_PORT = 80, 443
_BACKLOG = 128
_HEAD_BYTES = 2**16
_HEAD_S = 30.0
_CONNECT_S = 10.0
_CHUNK_BYTES = 2**16
_COMMAND_S = 20.0
_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Passage:
    """A connection that a machine tried to make."""

    host: str  # the name in its first bytes; empty without one
    address: str  # to which the machine connected
    port: int
    let_out: bool


@dataclass
class Wall:
    """Opened once the machine runs. Belongs to the event loop that opens it."""

    outside: Mapping[str, str]
    """The addresses of all hosts that there are, by their names."""
    network: Mapping[str, Any] | None = None
    """The rules in force, as the body of a request has them; None: everything is let out."""
    passages: list[Passage] = field(default_factory=list)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self, pid: int) -> None:
        """Takes in all that leaves the network of this process. Raises OSError."""
        loop = asyncio.get_running_loop()
        # A thread of its own, since it is in the machine's network from then on.
        with ThreadPoolExecutor(1) as entered:
            listeners = await loop.run_in_executor(entered, _listen, pid)
        for listener in listeners:
            self._servers.append(await asyncio.start_server(self._serve, sock=listener))

    async def close(self) -> None:
        """Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def lets_out(self, host: str, address: str) -> bool:
        """True when the rules let a connection to this host, or else to this address, out.

        As E2B: what is allowed goes before what is denied, and the rest is let out.
        """
        rules = self.network or {}
        denied = list(rules.get("denyOut") or [])
        if rules.get("allow_internet_access") is False:
            denied.append("0.0.0.0/0")
        if any(_covers(pattern, host, address) for pattern in rules.get("allowOut") or []):
            return True
        return not any(_covers(pattern, "", address) for pattern in denied)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._relay(reader, writer)
        except (OSError, TimeoutError):
            pass  # one of both is gone
        finally:
            writer.transport.abort()
            self._serving.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("sockname")[:2]
        async with asyncio.timeout(_HEAD_S):
            host, head = await _read_head(reader, port)
        to = self.outside.get(host) if host else address
        let_out = self.lets_out(host, address) and to in self.outside.values()
        self.passages.append(Passage(host, address, port, let_out))
        if not let_out:
            return
        async with asyncio.timeout(_CONNECT_S):
            answers, requests = await asyncio.open_connection(to, port)
        try:
            requests.write(head)
            await asyncio.gather(_copy(reader, requests), _copy(answers, writer))
        finally:
            requests.transport.abort()


def _covers(pattern: str, host: str, address: str) -> bool:
    """True when an entry of the rules, a name or a range of addresses, covers the host or the address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address) in ipaddress.ip_network(pattern, strict=False)
    if pattern.startswith("*."):
        return host.endswith(pattern[1:])
    return host == pattern


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK_BYTES):
        sink.write(data)
        await sink.drain()
    sink.write_eof()


async def _read_head(reader: asyncio.StreamReader, port: int) -> tuple[str, bytes]:
    """Returns the name of the host, empty without one, and all that was read. Raises OSError."""
    find = _Hello() if port == HTTPS_PORT else _Request()
    head = b""
    while not find.is_complete:
        data = await reader.read(_CHUNK_BYTES)
        head += data
        if not data or len(head) > _HEAD_BYTES:
            raise ConnectionError("there is no head")
        find.feed(data)
    return find.host.lower().rstrip("."), head


class _Request:
    """The Host of an HTTP request."""

    def __init__(self) -> None:
        self.host, self.is_complete = "", False
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)

    def feed(self, data: bytes) -> None:
        self._machine.receive_data(data)
        try:
            event = self._machine.next_event()
        except h11.RemoteProtocolError:
            self.is_complete = True
            return
        if isinstance(event, h11.Request):
            hosts = [value.decode("latin-1") for name, value in event.headers if name == b"host"]
            self.host, self.is_complete = hosts[0].partition(":")[0], True


class _Hello:
    """The server name of a ClientHello, as OpenSSL reads it."""

    def __init__(self) -> None:
        self.host, self.is_complete = "", False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._note
        self._incoming = ssl.MemoryBIO()
        self._server = context.wrap_bio(self._incoming, ssl.MemoryBIO(), server_side=True)

    def _note(self, _server: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> int:
        self.host = name or ""
        return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE

    def feed(self, data: bytes) -> None:
        self._incoming.write(data)
        try:
            self._server.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError:
            pass  # the callback ends each handshake that gets so far
        self.is_complete = True


def _listen(pid: int) -> list[socket.socket]:
    """Makes every address local in the network of the process, and listens there. Raises OSError."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(namespace, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
    finally:
        os.close(namespace)
    command = ["ip", "route", "add", "local", "0.0.0.0/0", "dev", "lo"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if made.returncode != 0:
        raise OSError(0, f"no route in the machine's network: {made.stderr.strip()}")
    listeners = []
    for port in (HTTP_PORT, HTTPS_PORT):
        listener = socket.create_server(("0.0.0.0", port), backlog=_BACKLOG)  # the machine's only
        listener.setblocking(False)
        listeners.append(listener)
    return listeners
