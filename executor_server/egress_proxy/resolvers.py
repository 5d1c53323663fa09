"""Resolves names by DNS servers that the configuration names; host_resolver.py of the guest does it as the host does.

The proxy caches, limits the look-ups of one session, and gives up after a time; here the look-ups of all sessions are
bounded. Both resolvers return addresses as text, which the proxy classifies before it connects to any.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from executor_server.guest.egress.host_resolver import MAX_ADDRESSES
from executor_server.guest.egress.protocols import Unresolved

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.nameserver import Nameserver

_DNS_TRY_S = 2.0
_DNS_LIFETIME_S = 9.0
_MAX_RUNNING = 256


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
    # installed. Names come here in their ASCII form.
    import dns._features

    for unneeded in ("doh", "doq", "trio", "idna", "dnssec"):
        dns._features.force(unneeded, False)
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
