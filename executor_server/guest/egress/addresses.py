"""Classes of addresses that the proxy never connects to, whatever name led to them.

The owner of a zone decides what a name resolves to: a service of this host, a router, or a cloud's address that hands
out credentials. It may change between two look-ups. So each address is classified here, and the proxy connects to the
classified address. The classes are those of Stripe's smokescreen and of IANA's registries of special-purpose addresses
(RFC 6890). IPv6 is refused outside the range of global addresses. The tables are written out, because
`ipaddress.is_global` changes with Python's version.
"""

from __future__ import annotations

import ipaddress
from typing import Callable, Collection, List, NamedTuple, Optional, Sequence, Tuple, Union

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]


class _Range(NamedTuple):
    network: Network
    clause: str
    may_be_internal: bool


def _ranges(may_be_internal: bool, texts: Sequence[Tuple[str, str]]) -> List[_Range]:
    return [_Range(ipaddress.ip_network(network), f"is {clause}", may_be_internal) for network, clause in texts]


# The first matching range decides. Ranges that stay closed come first: a metadata service stays closed even if the
# private range around it is open.
_RANGES = _ranges(
    False,
    [
        ("169.254.169.254/32", "the address of a cloud's metadata service"),
        ("100.100.100.200/32", "the address of a cloud's metadata service"),  # Alibaba
        ("168.63.129.16/32", "the address of a cloud's metadata service"),  # Azure
        ("192.0.0.192/32", "the address of a cloud's metadata service"),  # Oracle
        (
            "fd00:ec2::/32",
            "the address of a cloud's metadata service",
        ),  # AWS; DNS and time too
        ("fd20:ce::254/128", "the address of a cloud's metadata service"),  # Google
        ("fd00:c1::a9fe:a9fe/128", "the address of a cloud's metadata service"),  # Oracle
        ("fd00:42::42/128", "the address of a cloud's metadata service"),  # Scaleway
        ("0.0.0.0/8", "an unspecified address"),  # Linux connects 0.0.0.0 to itself
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.0.0/16", "a link-local address"),
        ("192.0.0.0/24", "an address of protocol assignments"),
        ("192.88.99.0/24", "an address of 6to4 relays"),
        ("224.0.0.0/4", "a multicast address"),
        ("255.255.255.255/32", "the broadcast address"),
        ("240.0.0.0/4", "a reserved address"),
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("::/96", "an IPv4-compatible address"),
        ("::ffff:0:0:0/96", "an IPv4-translated address"),
        ("64:ff9b::/96", "an address of NAT64"),
        ("64:ff9b:1::/48", "an address of NAT64"),
        ("100::/64", "an address of the discard prefix"),
        ("2001::/32", "an address of Teredo"),
        ("2001::/23", "an address of protocol assignments"),
        ("2002::/16", "an address of 6to4"),
        ("3fff::/20", "an address for documentation"),
        ("5f00::/16", "an address of segment routing"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a site-local address"),
        ("ff00::/8", "a multicast address"),
    ],
) + _ranges(
    True,
    [
        ("10.0.0.0/8", "a private address"),
        ("172.16.0.0/12", "a private address"),
        ("192.168.0.0/16", "a private address"),
        ("100.64.0.0/10", "an address of carrier-grade NAT"),
        ("198.18.0.0/15", "an address for benchmarks"),
        ("192.0.2.0/24", "an address for documentation"),
        ("198.51.100.0/24", "an address for documentation"),
        ("203.0.113.0/24", "an address for documentation"),
        ("2001:db8::/32", "an address for documentation"),
        ("fc00::/7", "a private address"),
    ],
)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")


def why_never_opened(network: Network) -> Optional[str]:
    """Returns a clause when the whole range stays closed even if it is internal; None for any other range."""
    closed = (each for each in _RANGES if not each.may_be_internal and each.network.version == network.version)
    return next((each.clause for each in closed if network.subnet_of(each.network)), None)  # type: ignore[arg-type]


class AddressRules:
    """Classifies addresses.

    `internal` lists the operator's own ranges, which names may resolve to. It opens private ranges and those for
    benchmarks and documentation, and nothing else. An address of this host is open only if `internal` lists it exactly
    (/32, /128), because services that listen there may trust every client on the host. `own_addresses` is called each
    time, as interfaces come and go; while it raises OSError, everything is refused. Raises ValueError for an invalid
    range.
    """

    def __init__(self, internal: Sequence[str], own_addresses: Callable[[], Collection[Address]]) -> None:
        self._internal = [_network(text) for text in internal]
        self._listed = {network.network_address for network in self._internal if network.num_addresses == 1}
        self._own_addresses = own_addresses

    def why_refused(self, address: str) -> Optional[str]:
        """Returns a clause ("is a private address"), or None when connections to the address may be made."""
        if "%" in address:
            return "has a scope"
        try:
            read = _unwrapped(ipaddress.ip_address(address))
        except ValueError:
            return "is not an IP address"
        clause = self._why_closed(read)
        if clause is not None:
            return clause
        try:
            is_own = read in self._own_addresses()
        except OSError:
            return "can't be compared with those of this host now"
        return "is an address of this host itself" if is_own and read not in self._listed else None

    def _why_closed(self, address: Address) -> Optional[str]:
        for each in _RANGES:
            if address in each.network:
                return None if each.may_be_internal and self._is_internal(address) else each.clause
        if address.version == 6 and address not in _GLOBAL_IPV6:
            return "is not a global unicast address"
        return None

    def _is_internal(self, address: Address) -> bool:
        return any(address in network for network in self._internal)


def _unwrapped(address: Address) -> Address:
    """Returns the IPv4 address of an IPv4-mapped one: the kernel connects to that."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _network(text: str) -> Network:
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text[:100]!r} is not a range of addresses such as 10.20.0.0/16: {error}") from error
    if network.version == 6 and network.subnet_of(ipaddress.IPv6Network("::ffff:0:0/96")):
        raise ValueError(f"{text[:100]!r} is a range of IPv4-mapped addresses; write it as IPv4")
    return network
