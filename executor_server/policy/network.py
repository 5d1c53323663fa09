"""The network of a session: granted hosts, violations of a request, and the result of tightening.

Pure functions. A pattern without a port stands for ports 443 and 80, so each port is decided separately.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from executor_server.core import NO_NETWORK, NetworkRules, NetworkSecret, Violation, ViolationKind, secret_names
from executor_server.policy.forms import value_of
from executor_server.policy.hosts import (
    by_port,
    is_covered_host,
    is_denied_host,
    meetings,
    pattern_of,
    reaches,
    undenied,
)
from executor_server.policy.profile import Profile
from executor_server.policy.violations import listed, not_allowed, rule_of, shortened

CONFIGURED_SECRETS = "egress.secrets"
"""The configuration key behind a refusal that no policy can change."""

BACKENDS_WITHOUT_SECRETS = frozenset({"e2b"})
"""Their egress proxy is on another machine: it gets no secrets, and does not ask for approvals."""

_LIMIT_NAMES = tuple(each.name for each in fields(NetworkRules) if each.name.startswith("max_"))


@dataclass(frozen=True)
class NetworkSummary:
    """The default hosts of a profile's sessions, and the hosts that they may request."""

    default: tuple[str, ...]
    allowed: tuple[str, ...]
    rules: NetworkRules  # those of a session that has them all


def network_summary(profile: Profile) -> NetworkSummary:
    table = profile.network
    allowed = undenied(table.allowed, table.denied)
    return NetworkSummary(_hosts(profile, ()), allowed, _rules(profile, _hosts(profile, allowed)))


def network_rules(profile: Profile, asked: Sequence[str]) -> NetworkRules:
    """Returns the rules for the default and the requested hosts; NO_NETWORK if there are none."""
    hosts = [pattern_of(text).text for text in asked]
    if profile.network.ask:  # other hosts are asked for when code connects to them
        granted = (*profile.network.default, *profile.network.allowed)
        hosts = [text for text in hosts if text in granted or is_covered_host(pattern_of(text), granted)]
    return _rules(profile, _hosts(profile, hosts))


def _rules(profile: Profile, hosts: tuple[str, ...]) -> NetworkRules:
    table = profile.network
    if not hosts and not table.ask:
        return NO_NETWORK
    return value_of(
        NetworkRules,
        table,
        allowed=hosts,
        ask=table.undenied_ask,
        denied=tuple(sorted(set(table.denied))),
        secrets=_secrets_for(
            (*hosts, *table.undenied_ask), tuple(value_of(NetworkSecret, each) for each in table.secrets)
        ),
    )


def _hosts(profile: Profile, asked: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*profile.network.undenied_default, *asked}))


def _secrets_for(hosts: tuple[str, ...], secrets: tuple[NetworkSecret, ...]) -> tuple[NetworkSecret, ...]:
    reached = {text for text, _ in reaches(tuple(secret.host for secret in secrets), hosts)}
    return tuple(secret for secret in secrets if secret.host in reached)


# ---------------------------------------------------------------------------------------------------------------------
# Violations. `name` is the profile's.


def network_violations(name: str, profile: Profile, asked: Sequence[str]) -> Iterator[Violation]:
    """Violations for hosts that the profile does not grant. Every port of a pattern has to be granted."""
    table = profile.network
    granted = tuple(dict.fromkeys((*table.default, *table.allowed, *table.ask)))
    for pattern in dict.fromkeys(map(pattern_of, asked)):
        if any(is_denied_host(each, table.denied) for each in by_port(pattern)):
            allowed = shortened(f"nothing of {listed(table.denied, '')}")
            rule = rule_of(name, "network.denied")
            yield Violation("network", ViolationKind.DENIED, shortened(pattern.text), allowed, rule)
        elif pattern.text not in granted and not is_covered_host(pattern, granted):
            yield not_allowed("network", pattern.text, granted, rule_of(name, "network.allowed"), "none")


def secret_violations(
    name: str, secrets: Sequence[NetworkSecret], known: Collection[str] | None, backends: Sequence[str]
) -> Iterator[Violation]:
    """Violations for granted hosts whose secrets are unavailable: not configured, or on none of these backends.

    `known` names the secrets that the daemon has; None stands for all.
    """
    for secret in secrets:
        for each in secret_names(secret.value):
            if known is not None and each not in known:
                text = f"{secret.host} with {secret.header} of ${{{each}}}"
                allowed = "hosts whose secrets the daemon is configured with"
                yield Violation("network", ViolationKind.UNSUPPORTED, text, allowed, CONFIGURED_SECRETS)
    if secrets and BACKENDS_WITHOUT_SECRETS.issuperset(backends) and backends:
        hosts = shortened(", ".join(dict.fromkeys(secret.host for secret in secrets)))
        allowed = f"hosts without secrets on the {' and '.join(backends)} backend"
        yield Violation("network", ViolationKind.UNSUPPORTED, hosts, allowed, rule_of(name, "network.secrets"))


def asking_violations(name: str, rules: NetworkRules, backends: Sequence[str]) -> Iterator[Violation]:
    """Violations for hosts that need an approval, if none of these backends can hold connections."""
    if rules.ask and BACKENDS_WITHOUT_SECRETS.issuperset(backends) and backends:
        allowed = f"hosts without an approval on the {' and '.join(backends)} backend"
        rule = rule_of(name, "network.ask")
        yield Violation("network", ViolationKind.UNSUPPORTED, shortened(", ".join(rules.ask)), allowed, rule)


def able_to_serve(rules: NetworkRules, backends: Sequence[str]) -> tuple[str, ...]:
    """The backends, in their order, that can enforce these rules."""
    return tuple(each for each in backends if not (rules.secrets or rules.ask) or each not in BACKENDS_WITHOUT_SECRETS)


# ---------------------------------------------------------------------------------------------------------------------
# Tightening


def tightened_network(profile: Profile, rules: NetworkRules) -> NetworkRules:
    """The rules of a running session held to a profile: what both grant. A session without a network gets none."""
    if not rules.any:
        return rules
    table = profile.network
    denied = tuple(sorted({*rules.denied, *table.denied}))
    granted = (*table.default, *table.allowed)
    both = covered_by_both(rules.allowed, granted)
    allowed = undenied(both, denied)
    ask: tuple[str, ...] = ()
    if rules.ask or table.ask:
        either = covered_by_both((*rules.allowed, *rules.ask), (*granted, *table.ask))
        ask = tuple(text for text in undenied(either, denied) if not is_covered_host(pattern_of(text), allowed))
    kept = (narrowed(had, value_of(NetworkSecret, each)) for had in rules.secrets for each in table.secrets)
    return replace(
        rules,
        allowed=allowed,
        ask=ask,
        denied=denied,
        secrets=_secrets_for((*allowed, *ask), tuple(dict.fromkeys(secret for secret in kept if secret is not None))),
        audit=table.audit,
        **{name: min(getattr(rules, name), getattr(table, name)) for name in _LIMIT_NAMES},
    )


def covered_by_both(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    """Returns patterns that cover what both sides cover."""
    both = set(left) & set(right)
    rest = tuple(text for text in left if text not in both)
    found: dict[str, set[str]] = {text: set() for text in rest}
    for one, other, host in meetings(rest, right):
        found[one.text] |= {replace(host, port=port).text for port in one.ports if port in other.ports}
    for text, parts in found.items():
        both |= {text} if parts == {each.text for each in by_port(pattern_of(text))} else parts
    return tuple(sorted(both))


def narrowed(had: NetworkSecret, now: NetworkSecret) -> NetworkSecret | None:
    """The secret for the requests that both rules cover; None when they are not the same header of the same host."""
    if (had.host, had.header.lower(), had.value) != (now.host, now.header.lower(), now.value):
        return None
    methods = _both(had.methods, now.methods, lambda one, other: one == other)
    paths = _both(had.paths, now.paths, _is_path_within)
    if methods is None or paths is None:
        return None
    return replace(now, methods=methods, paths=paths)


def _both(
    some: tuple[str, ...], others: tuple[str, ...], is_part: Callable[[str, str], bool]
) -> tuple[str, ...] | None:
    """The entries that both lists cover, where an empty list stands for everything; None when there are none."""
    if not some or not others:
        return some or others
    found = {one for one in some if any(is_part(one, other) for other in others)}
    found |= {other for other in others if any(is_part(other, one) for one in some)}
    return tuple(sorted(found)) or None


def _is_path_within(path: str, wider: str) -> bool:
    return path == wider or (wider.endswith("/*") and path.startswith(wider[:-1]))
