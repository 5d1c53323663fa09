"""Resolves names: as the host does, or by DNS servers that the configuration names.

The proxy caches, limits the look-ups of one session, and gives up after a time; here the look-ups of all sessions are
bounded. Both resolvers return addresses as text, which the proxy classifies before it connects to any.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from executor_server.guest.egress.protocols import Unresolved

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.nameserver import Nameserver

MAX_ADDRESSES = 16
HOST_THREADS = 32
HOST_QUEUE = 256
# For libc. It would wait for five seconds, twice, for each server; and a name that does not exist it would try again
# below the domains of the host's search list. The root as the only such domain means the name as it was checked.
_RES_VARIABLES = {"RES_OPTIONS": "timeout:2 attempts:2", "LOCALDOMAIN": "."}
_DNS_TRY_S = 2.0
_DNS_LIFETIME_S = 9.0
_MAX_RUNNING = 256

_NOT_THERE = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class HostResolver:
    """Resolves as the host's programs do: with /etc/hosts and whatever else nsswitch.conf says, but no search list.

    getaddrinfo blocks and can't be interrupted, so it has threads, which are made as they are needed. They are daemon
    threads: a name server that hangs must not keep the process from ending.
    """

    def __init__(self) -> None:
        os.environ.update(_RES_VARIABLES)
        self._jobs: queue.Queue[tuple[str, asyncio.Future[list[str]]]] = queue.Queue(HOST_QUEUE)
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    async def resolve(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[str]] = loop.create_future()
        try:
            self._jobs.put_nowait((host, future))
        except queue.Full:
            raise TimeoutError("too many names are being resolved") from None
        with self._lock:
            grows = self._idle == 0 and self._threads < HOST_THREADS
            self._threads += grows
        if grows:
            threading.Thread(target=self._work, args=(loop,), name="resolver", daemon=True).start()
        return await future

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with self._lock:
                self._idle += 1
            host, future = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if future.cancelled():  # given up while it waited; reading this without the loop can only be late
                continue
            result: list[str] | Exception
            try:
                result = _getaddrinfo(host)
            except Exception as error:  # noqa: BLE001 - whatever it is, the coroutine that waits gets it
                result = error
            try:
                loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:  # the loop is closed
                return


def _getaddrinfo(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NOT_THERE:
            raise Unresolved("does not exist, or has no addresses") from None
        if error.errno == socket.EAI_AGAIN:
            raise TimeoutError(error.strerror) from None
        raise Unresolved("can't be resolved") from None
    except UnicodeError:
        raise Unresolved("is no name that can be resolved") from None
    addresses = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return list(addresses)[:MAX_ADDRESSES]


def _settle(future: asyncio.Future[list[str]], result: list[str] | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class DnsResolver:
    """Asks DNS servers, in their order, for the addresses of both families at once."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._resolver = _dns_resolver(servers)
        self._running = 0

    async def resolve(self, host: str) -> Sequence[str]:
        if self._running >= _MAX_RUNNING:
            raise TimeoutError("too many names are being resolved")
        self._running += 1
        try:
            answers = await asyncio.gather(self._ask(host, "AAAA"), self._ask(host, "A"), return_exceptions=True)
        finally:
            self._running -= 1
        addresses = [address for answer in answers if isinstance(answer, list) for address in answer]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if not addresses and failures:
            # A name that does not exist is a better answer than a server's silence about one of its families.
            raise next((each for each in failures if isinstance(each, Unresolved)), failures[0])
        return addresses

    async def _ask(self, host: str, kind: str) -> list[str]:
        from dns.exception import DNSException, Timeout
        from dns.resolver import NXDOMAIN

        try:
            answer = await self._resolver.resolve(f"{host}.", kind, search=False, raise_on_no_answer=False)
        except NXDOMAIN:
            raise Unresolved("does not exist") from None
        except Timeout:
            raise TimeoutError("no DNS server answered") from None
        except DNSException:
            raise Unresolved("can't be resolved: the DNS servers refuse it or answer wrongly") from None
        return [record.address for record in answer.rrset or ()][: MAX_ADDRESSES // 2]


def _dns_resolver(servers: Sequence[str]) -> Resolver:
    """Imports all that a resolution needs: once the process has dropped its privileges, it may not find its files."""
    # The package is worth 7 MB, and most hosts do without; its other transports would be 6 MB more where they are
    # installed.
    import dns._features

    for transport in ("doh", "doq", "trio"):
        dns._features.force(transport, False)
    import dns.asyncbackend
    import dns.asyncresolver
    import dns.nameserver

    for module in ("ANY.CNAME", "ANY.NS", "ANY.OPT", "ANY.SOA", "IN.A", "IN.AAAA"):
        importlib.import_module(f"dns.rdtypes.{module}")
    dns.asyncbackend.get_backend("asyncio")
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = [_name_server(server) for server in servers]
    resolver.timeout = _DNS_TRY_S
    resolver.lifetime = _DNS_LIFETIME_S
    return resolver


def _name_server(server: str) -> Nameserver:
    """ADDRESS:PORT, with brackets around an IPv6 address."""
    import dns.nameserver

    address, _, port = server.rpartition(":")
    return dns.nameserver.Do53Nameserver(address.strip("[]"), int(port))
