"""Patterns of hosts, compared port by port: a pattern without a port stands for ports 443 and 80.

A policy may have hundreds of patterns, and the daemon does nothing else while a request is compared with them. So they
are found by their host: only a pattern of the same host, or of one above it, can cover or deny another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from executor_server.guest.egress.host_names import WEB_PORTS, HostPattern, Target, is_within


@lru_cache(maxsize=4096)
def pattern_of(text: str) -> HostPattern:
    """Returns the pattern of this text. Raises BadName."""
    return HostPattern.parse(text)


def by_port(pattern: HostPattern) -> tuple[HostPattern, ...]:
    """Returns the pattern with each of its ports."""
    return tuple(replace(pattern, port=port) for port in pattern.ports)


class Hosts:
    """The patterns of a list, by their hosts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._by_host: dict[str, list[HostPattern]] = {}
        for text in texts:
            pattern = pattern_of(text)
            self._by_host.setdefault(pattern.host, []).append(pattern)

    def near(self, host: str) -> Iterator[HostPattern]:
        """The patterns of this host and of those above it."""
        while host:
            yield from self._by_host.get(host, ())
            host = host.partition(".")[2]


hosts_of = lru_cache(maxsize=64)(Hosts)


def is_covered_host(pattern: HostPattern, granted: tuple[str, ...]) -> bool:
    """True when each port of a pattern is covered by one of those granted."""
    near = tuple(hosts_of(granted).near(pattern.host))
    return all(any(is_within(each, host) for host in near) for each in by_port(pattern))


def is_denied_host(pattern: HostPattern, denied: tuple[str, ...]) -> bool:
    """True when everything that a pattern stands for is denied; without a port it stands for all ports here."""
    return any(_denies(each, pattern) for each in hosts_of(denied).near(pattern.host))


def undenied(hosts: tuple[str, ...], denied: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the patterns without those that are denied as a whole: clients should not see them as granted."""
    return tuple(text for text in hosts if not all(is_denied_host(each, denied) for each in by_port(pattern_of(text))))


def meetings(some: tuple[str, ...], others: tuple[str, ...]) -> Iterator[tuple[HostPattern, HostPattern, HostPattern]]:
    """Yields the pairs of patterns that have hosts in common, whatever their ports, and the pattern of these hosts."""
    pairs = ((one, other) for one in map(pattern_of, some) for other in hosts_of(others).near(one.host))
    above = ((one, other) for other in map(pattern_of, others) for one in hosts_of(some).near(other.host))
    for one, other in (*pairs, *((one, other) for one, other in above if one.host != other.host)):
        host = _common_host(replace(one, port=None), replace(other, port=None))
        if host is not None:
            yield one, other, host


def reaches(secret_hosts: tuple[str, ...], granted: tuple[str, ...]) -> Iterator[tuple[str, HostPattern]]:
    """Yields the hosts of secrets with each granted host that they cover, by port. Without a port they cover all."""
    for one, other, host in meetings(secret_hosts, granted):
        for port in other.ports:
            if one.port in (None, port):
                yield one.text, replace(host, port=port)


def _common_host(one: HostPattern, other: HostPattern) -> HostPattern | None:
    return one if is_within(one, other) else other if is_within(other, one) else None


def _denies(denied: HostPattern, pattern: HostPattern) -> bool:
    if denied.port not in (None, pattern.port):
        return False
    # Denying a host by name denies all hosts below it, so this decides for the hosts of a wildcard, too.
    if denied.forbids(Target(pattern.host, pattern.port or WEB_PORTS[0])):
        return True
    return denied.wildcard and pattern.wildcard and denied.host == pattern.host
