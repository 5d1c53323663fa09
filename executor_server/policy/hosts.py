"""Patterns of hosts, compared port by port: one without a port stands for the ports of the web."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from executor_server.guest.egress.names import WEB_PORTS, HostPattern, Target, is_within


@lru_cache(maxsize=4096)
def pattern_of(text: str) -> HostPattern:
    """Returns the pattern of this text. Raises BadName."""
    return HostPattern.parse(text)


def by_port(pattern: HostPattern) -> tuple[HostPattern, ...]:
    """Returns the pattern with each of its ports."""
    return tuple(replace(pattern, port=port) for port in pattern.ports)


def common(one: HostPattern, other: HostPattern) -> tuple[HostPattern, ...]:
    """Returns the patterns of what both cover, one for each port."""
    host = common_host(one, other)
    if host is None:
        return ()
    return tuple(replace(host, port=port) for port in one.ports if port in other.ports)


def common_host(one: HostPattern, other: HostPattern) -> HostPattern | None:
    """Returns the pattern of the hosts of both, whatever their ports; None when they have none in common."""
    one, other = replace(one, port=None), replace(other, port=None)
    return one if is_within(one, other) else other if is_within(other, one) else None


def is_covered_host(pattern: HostPattern, granted: Iterable[str]) -> bool:
    """True when each port of a pattern is covered by one of those granted."""
    patterns = [pattern_of(text) for text in granted]
    return all(any(is_within(each, host) for host in patterns) for each in by_port(pattern))


def is_denied_host(pattern: HostPattern, denied: Iterable[str]) -> bool:
    """True when everything that a pattern stands for is denied; without a port it stands for all ports here."""
    return any(_denies(pattern_of(text), pattern) for text in denied)


def undenied(hosts: Iterable[str], denied: Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns without those that are denied as a whole: no client should read that it has them."""
    return tuple(text for text in hosts if not all(is_denied_host(each, denied) for each in by_port(pattern_of(text))))


def _denies(denied: HostPattern, pattern: HostPattern) -> bool:
    if denied.port not in (None, pattern.port):
        return False
    # A host that is denied by its name is denied with all below it, so this decides for those of a wildcard too.
    if denied.forbids(Target(pattern.host, pattern.port or WEB_PORTS[0])):
        return True
    return denied.wildcard and pattern.wildcard and denied.host == pattern.host
