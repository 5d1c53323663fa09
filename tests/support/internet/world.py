"""One world: an address, its authority, its name server and its servers, in a thread of the tests' process."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import ssl
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from tests.support.certificates import Authority, Pair, self_signed
from tests.support.internet import names
from tests.support.internet.goods import make_repository
from tests.support.internet.raw import RawServer
from tests.support.internet.sites import Sites
from tests.support.own_addresses import reserved_address, why_no_addresses
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel

T = TypeVar("T")

SUFFIX = "test-internet.example"
HTTPS_PORT = 443
HTTP_PORT = 80
RAW_PORT = 9000
"""The raw server (raw.py), without TLS."""
RAW_TLS_PORT = 9443
"""The same within TLS."""
OLD_TLS_PORT = 8443
"""The web sites with TLS 1.0 and 1.1 only."""

BAD_CERTIFICATES = ("expired", "selfsigned", "stranger", "unknown")
"""Sites whose certificate does not verify: it has ended, is its own authority, is for another name, or is signed by an
authority that no client knows. Names before them are theirs too."""

_SITES = ("api", "files", "git", "odd", "pypi", "raw", "ws", "www", *BAD_CERTIFICATES)
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_SHUTDOWN_S = 0.1  # for handlers of requests whose clients are still there
_numbers = itertools.count(1)


@dataclass
class Trap:
    """Servers at addresses to which no proxy may connect; each connection to them is remembered."""

    own: str  # an address of this host that `internal` does not list
    loopback: str
    connections: list[str] = field(default_factory=list)  # "ADDRESS:PORT" at which it was accepted

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append("{}:{}".format(*writer.get_extra_info("sockname")))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntrap")
        writer.close()


@dataclass(frozen=True)
class Handshake:
    """A ClientHello that reached a server of the world."""

    server_name: str | None


@dataclass
class Internet:
    """A world that runs."""

    address: str
    directory: Path
    trap: Trap
    authority: Authority
    names: names.NameServer
    sites: Sites
    raw: RawServer
    handshakes: list[Handshake] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Failures in a server that its client did not cause; must be empty when the world closes."""

    def name(self, site: str) -> str:
        """A new name of a site, at the world's address. No other test has it."""
        name = f"n{next(_numbers)}.{site}.{SUFFIX}"
        self.names.address(name, self.address)
        return name

    def package_index(self) -> PackageIndex:
        """A new and empty package index, at names of its own."""
        index = PackageIndex(self.name("pypi"), self.name("files"))
        self.sites.indexes.append(index)
        return index

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of its sites, by their names."""
        return {f"{site}.{SUFFIX}": self.address for site in _SITES}

    @property
    def ca_file(self) -> Path:
        """The certificate that servers of this world are verified with."""
        return self.authority.cert

    @property
    def resolver(self) -> str:
        return f"{self.address}:{names.PORT}"

    def config(self, **more: Any) -> str:
        """The section of executor.toml with which a daemon lives in this world, with more keys of it."""
        keys = {"resolver": self.resolver, "internal": [f"{self.address}/32"], "ca_file": str(self.ca_file), **more}
        return "[egress]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in keys.items())

    def context(self) -> ssl.SSLContext:
        """A client's context that trusts this world."""
        return ssl.create_default_context(cafile=str(self.ca_file))


def _toml(value: Any) -> str:
    """Returns a text, a list or a flat table as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


@contextmanager
def open_internet() -> Iterator[Internet]:
    """A world, until the end of the block. Raises OSError when an address or a port is not to be had."""
    with ExitStack() as stack:
        address, own = (stack.enter_context(reserved_address()) for _ in range(2))
        directory = Path(tempfile.mkdtemp(prefix="internet-"))
        stack.callback(shutil.rmtree, directory)
        trap = Trap(own, address.replace("10.", "127.", 1))
        sites = Sites(SUFFIX, directory / "git")
        world = Internet(
            address,
            directory,
            trap,
            Authority(directory / "ca", "Authority of the test internet"),
            names.NameServer(),
            sites,
            RawServer(),
        )
        _furnish(world)
        stack.enter_context(_served(world))
        yield world
    assert not world.errors, world.errors


def require_internet() -> Iterator[Internet]:
    """Yields a world to a fixture, or skips the test with the reason."""
    if reason := why_no_addresses():
        pytest.skip(reason)
    with open_internet() as world:
        yield world


def _furnish(world: Internet) -> None:
    for name, address in world.addresses.items():
        world.names.address(name, address)
    world.sites.files["/hello.txt"] = b"hello from outside\n"
    index = PackageIndex(f"pypi.{SUFFIX}", f"files.{SUFFIX}")
    hello = "import egress_words\nprint(egress_words.GREETING)\n"
    index.add(make_wheel("egress_hello", files={"egress_hello.py": hello}, requires=["egress_words"]))
    index.add(make_wheel("egress_words", files={"egress_words.py": "GREETING = 'hello from a wheel'\n"}))
    world.sites.indexes.append(index)
    make_repository(
        world.sites.repositories / "hello.git", {"README": "hello from a repository\n", "lib/a.py": "A = 1\n"}
    )


@contextmanager
def _served(world: Internet) -> Iterator[None]:
    """Runs the servers in a thread with an event loop of its own, so that tests may block."""
    running: _Running = _Running(world)
    thread = threading.Thread(target=running.run, name="internet", daemon=True)
    thread.start()
    assert running.ready.wait(_START_TIMEOUT_S), "the test internet did not start"
    try:
        if running.failure is not None:
            raise running.failure
        yield
    finally:
        running.stop()
        thread.join(_STOP_TIMEOUT_S)
        assert not thread.is_alive(), "the test internet did not stop"


class _Running:
    """The thread's side: everything is started, then awaits the end."""

    def __init__(self, world: Internet) -> None:
        self._world = world
        self.ready = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        asyncio.run(self._main())

    def stop(self) -> None:
        if self.failure is None:
            self._loop.call_soon_threadsafe(self._end.set)

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._note)
        async with AsyncExitStack() as stack:
            try:
                await self._start(stack)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
                self.failure = error
                return
            finally:
                self.ready.set()
            await self._end.wait()
            # The servers' own connections: clients may be in the middle of one.
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _start(self, stack: AsyncExitStack) -> None:
        world = self._world
        stack.callback((await world.names.start(world.address)).close)
        runner = web.ServerRunner(
            web.Server(world.sites.answer, handler_cancellation=True), shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        tls, old = _tls(world), _old_tls(world)
        for port, context in ((HTTPS_PORT, tls), (HTTP_PORT, None), (OLD_TLS_PORT, old)):
            await web.TCPSite(runner, world.address, port, ssl_context=context).start()
        for port, raw_context in ((RAW_PORT, None), (RAW_TLS_PORT, tls)):
            server = await asyncio.start_server(world.raw.serve, world.address, port, ssl=raw_context)
            stack.callback(server.close)
        for address in (world.trap.own, world.trap.loopback):
            for port in (HTTPS_PORT, HTTP_PORT, RAW_PORT):
                trap = await asyncio.start_server(world.trap.serve, address, port)
                stack.callback(trap.close)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Clients that break off are what tests do, and the servers' own tasks are cancelled at the end. A transport of
        # asyncio that is reset while it ends a TLS connection is closed a second time, which is an AttributeError within
        # asyncio.
        error, message = context.get("exception"), context.get("message", "")
        closed_twice = isinstance(error, AttributeError) and "_call_connection_lost" in message
        expected = (ConnectionError, ssl.SSLError, TimeoutError, asyncio.CancelledError)
        if not closed_twice and not isinstance(error, expected):
            self._world.errors.append(context)


def _tls(world: Internet) -> ssl.SSLContext:
    """A server's context with a certificate for each name of the world, made when the name is first asked for."""
    contexts: dict[str, ssl.SSLContext] = {}
    strangers = Authority(world.directory / "unknown-ca", "Authority that nobody knows")

    def certificate(name: str) -> Pair:
        directory = world.directory / f"certificate-{len(contexts)}"
        directory.mkdir(exist_ok=True)
        kind = name.removesuffix(f".{SUFFIX}").rpartition(".")[2]
        if kind == "expired":
            return world.authority.site(directory.name, name, expired_since=timedelta(days=1))
        if kind == "selfsigned":
            return self_signed(directory, name, dns=[name])
        if kind == "stranger":
            return world.authority.site(directory.name, f"not-{name}")
        return (strangers if kind == "unknown" else world.authority).site(directory.name, name)

    def choose(tls: ssl.SSLObject | ssl.SSLSocket, server_name: str | None, _: ssl.SSLContext) -> None:
        world.handshakes.append(Handshake(server_name))
        name = (server_name or SUFFIX).lower()
        if name not in contexts:
            contexts[name] = _server_context(certificate(name))
        tls.context = contexts[name]

    first = _server_context(certificate(SUFFIX))
    first.sni_callback = choose
    return first


def _old_tls(world: Internet) -> ssl.SSLContext:
    context = _server_context(world.authority.site("old", *(f"{site}.{SUFFIX}" for site in ("api", "files", "www"))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to be old is its purpose
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


def _server_context(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    context.set_alpn_protocols(["http/1.1"])
    return context
