"""Resolves names with the configured DNS servers; host_resolver.py of the guest resolves them as the host does.

The proxy caches names, limits the look-ups of one session, and has a timeout; this module limits the look-ups of all
sessions, and of each domain. Both resolvers return addresses as text, which the proxy classifies before it connects.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from executor_server.guest.egress.host_resolver import MAX_ADDRESSES, DomainTurns
from executor_server.guest.egress.protocols import Unresolved

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.nameserver import Nameserver

# A look-up is repeated after each of these pauses, with the next server first, while the earlier ones go on, since a
# packet may be lost, or a server slow. Their sum is slightly less than the proxy's timeout.
_PAUSES_S = (1.5, 3.0, 5.0)
_MAX_RUNNING = 1024
_MAX_PER_DOMAIN = 64


class DnsResolver:
    """Asks DNS servers for the addresses of both families at once."""

    def __init__(self, servers: Sequence[str]) -> None:
        _import_dns()
        names = [_name_server(server) for server in servers]
        self._resolvers = [_dns_resolver(names[first:] + names[:first]) for first in range(len(names))]
        self._turns = DomainTurns(_MAX_PER_DOMAIN)
        self._running = 0

    async def resolve(self, host: str) -> Sequence[str]:
        domain = await self._turns.take(host)
        try:
            return await self._resolve(host)
        finally:
            self._turns.give_back(domain)

    async def _resolve(self, host: str) -> Sequence[str]:
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
            # "Does not exist" is a better answer than a timeout for one of the families.
            raise next((each for each in failures if isinstance(each, Unresolved)), failures[0])
        return addresses

    async def _ask(self, host: str, kind: str) -> list[str]:
        lookups: set[asyncio.Task[list[str]]] = set()
        try:
            for resolver, pause_s in zip(itertools.cycle(self._resolvers), _PAUSES_S, strict=False):
                lookups.add(asyncio.create_task(_look_up(resolver, host, kind)))
                done, _ = await asyncio.wait(lookups, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return done.pop().result()
            raise TimeoutError("no DNS server answered")
        finally:
            for each in lookups:
                each.cancel()
            await asyncio.gather(*lookups, return_exceptions=True)


async def _look_up(resolver: Resolver, host: str, kind: str) -> list[str]:
    """Returns addresses by the first server that answers without an error."""
    from dns.exception import DNSException
    from dns.resolver import NXDOMAIN

    try:
        answer = await resolver.resolve(f"{host}.", kind, search=False, raise_on_no_answer=False)
    except NXDOMAIN:
        raise Unresolved("does not exist") from None
    except DNSException:
        raise Unresolved("can't be resolved: the DNS servers refuse it or answer wrongly") from None
    return [record.address for record in answer.rrset or ()][: MAX_ADDRESSES // 2]


def _import_dns() -> None:
    """Imports all modules for resolution, since the process may not be able to read their files after confinement."""
    # The package takes 7 MB, and most hosts don't need it; its other transports, if installed, would take 6 MB more.
    # Names come here in ASCII form.
    import dns._features

    for unneeded in ("doh", "doq", "trio", "idna", "dnssec"):
        dns._features.force(unneeded, False)
    import dns.asyncbackend
    import dns.asyncresolver
    import dns.nameserver

    for module in ("ANY.CNAME", "ANY.NS", "ANY.OPT", "ANY.SOA", "IN.A", "IN.AAAA"):
        importlib.import_module(f"dns.rdtypes.{module}")
    dns.asyncbackend.get_backend("asyncio")


def _dns_resolver(servers: list[Nameserver]) -> Resolver:
    import dns.asyncresolver

    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = servers
    resolver.timeout = resolver.lifetime = 2 * sum(_PAUSES_S)  # never reached: `_ask` ends it
    return resolver


def _name_server(server: str) -> Nameserver:
    """ADDRESS:PORT, with brackets around an IPv6 address."""
    import dns.nameserver

    address, _, port = server.rpartition(":")
    return dns.nameserver.Do53Nameserver(address.strip("[]"), int(port))
