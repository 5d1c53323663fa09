"""No session reaches a host that its profile does not grant, whatever it asks for and however its policy changes.

Reach is decided by the test's own reading of the patterns, by brute force over hosts and ports, and compared with that
of the policy and with that of the rules which the proxy makes of a spec.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from executor_server.core import NetworkRules
from executor_server.core.errors import PolicyViolation
from executor_server.core.model import Principal, SessionSpec
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Allowed, Rules
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile
from executor_server.policy.profile import Profile
from executor_server.policy.requested import RequestedSession

ALICE = Principal("alice", "token")
NAMED = ["x.test", "a.x.test", "b.x.test", "y.test"]
HOSTS = [f"{below}{name}" for below in ("", "z.") for name in NAMED]  # and one below each that no pattern names
PORTS = [443, 80, 8443]
TARGETS = list(itertools.product(HOSTS, PORTS))

patterns = st.builds(
    lambda star, host, port: f"{star}{host}{port}",
    st.sampled_from(["", "*."]),
    st.sampled_from(NAMED),
    st.sampled_from(["", ":443", ":80", ":8443"]),
)
some_patterns = st.lists(patterns, max_size=3)
limits = st.integers(1, 9)
networks = st.fixed_dictionaries(
    {
        "default": some_patterns,
        "allowed": some_patterns,
        "denied": st.lists(patterns, max_size=2),
        "max_connections": limits,
        "max_new_connections_per_minute": limits,
        "max_sent_bytes": limits,
        "max_received_bytes": limits,
        "max_connection_s": limits.map(float),
    }
)


def policy_of(network: dict[str, Any]) -> Policy:
    file = PolicyFile(default="p", profiles={"p": Profile.model_validate({"network": network})})
    return Policy(file, images=["base"], backend="local", orphan_time_s=600.0)


def split(pattern: str) -> tuple[bool, str, int | None]:
    host, _, port = pattern.partition(":")
    return host.startswith("*."), host.removeprefix("*."), int(port) if port else None


def covers(pattern: str, host: str, port: int) -> bool:
    star, name, at = split(pattern)
    return port in ([at] if at else [443, 80]) and (host.endswith(f".{name}") if star else host == name)


def denies(pattern: str, host: str, port: int) -> bool:
    star, name, at = split(pattern)
    return at in (None, port) and (host.endswith(f".{name}") or (host == name and not star))


def reach(allowed: list[str] | tuple[str, ...], denied: list[str] | tuple[str, ...]) -> set[tuple[str, int]]:
    return {
        target
        for target in TARGETS
        if any(covers(each, *target) for each in allowed) and not any(denies(each, *target) for each in denied)
    }


def reached(rules: NetworkRules) -> set[tuple[str, int]]:
    """The reach of a spec, by its own words and by the rules that the proxy reads in them."""
    by_words = reach(rules.allowed, rules.denied)
    read = Rules.read(json.loads(json.dumps(asdict(rules))))
    assert by_words == {target for target in TARGETS if isinstance(read.decide(Target(*target)), Allowed)}
    return by_words


def granted(network: dict[str, Any], asked: list[str]) -> SessionSpec | None:
    try:
        return policy_of(network).decide(ALICE, RequestedSession(network=tuple(asked)))
    except PolicyViolation:
        return None


@given(network=networks, asked=some_patterns)
def test_a_session_reaches_the_default_hosts_and_those_granted_and_no_others(
    network: dict[str, Any], asked: list[str]
) -> None:
    spec = granted(network, asked)
    most = reach([*network["default"], *network["allowed"]], network["denied"])
    if spec is None:
        # It was right: something that was asked for is out of reach.
        assert not all(reach([each], []) <= most for each in asked)
        return
    assert reached(spec.network) == reach([*network["default"], *asked], network["denied"]) <= most
    assert spec.sandbox.egress == bool(spec.network.allowed)


@given(old=networks, new=networks, asked=some_patterns)
def test_a_tightened_session_reaches_what_both_policies_grant(
    old: dict[str, Any], new: dict[str, Any], asked: list[str]
) -> None:
    spec = granted(old, asked)
    assume(spec is not None)
    assert spec is not None
    after = policy_of(new).tightened(ALICE, spec, "local")
    assert isinstance(after, SessionSpec)
    now = reach([*new["default"], *new["allowed"]], new["denied"])
    assert reached(after.network) == reached(spec.network) & now
    if spec.network.any:
        for name in ("max_connections", "max_sent_bytes", "max_connection_s"):
            assert getattr(after.network, name) == min(getattr(spec.network, name), new[name])


@given(network=networks, asked=some_patterns)
def test_tightening_to_the_same_profile_changes_nothing(network: dict[str, Any], asked: list[str]) -> None:
    spec = granted(network, asked)
    assume(spec is not None)
    assert spec is not None
    after = policy_of(network).tightened(ALICE, spec, "local")
    assert isinstance(after, SessionSpec)
    assert reached(after.network) == reached(spec.network)


@given(network=networks)
def test_a_client_is_told_what_it_can_have(network: dict[str, Any]) -> None:
    summary = policy_of(network).describe(ALICE).network
    everything = reach([*summary.default, *summary.allowed], network["denied"])
    assert everything == reach([*network["default"], *network["allowed"]], network["denied"])
    assert reach(summary.rules.allowed, summary.rules.denied) == everything
