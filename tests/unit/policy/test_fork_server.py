"""The key `sandbox.fork_server` decides who shares the process that sandboxes are forked from."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.core.config.config import PoolSection
from executor_server.core.model import Principal, SessionSpec
from executor_server.policy.decide import Policy
from executor_server.policy.file import parse_policy
from executor_server.policy.requested import RequestedSession

ALICE, BOB = Principal("alice", "ci"), Principal("bob", "ci")


def policy_of(value: str | None, preset: str = "guarded") -> Policy:
    line = "" if value is None else f'sandbox.fork_server = "{value}"\n'
    text = f'default = "any"\n[profiles.any]\nlanguage.preset = "{preset}"\n{line}'
    file = parse_policy(text.encode(), Path("p.toml"))
    return Policy(file, images=["base"], backend="local", orphan_time_s=600.0)


def granted(value: str | None, who: Principal = ALICE) -> SessionSpec:
    return policy_of(value).decide(who, RequestedSession())


@pytest.mark.parametrize(("value", "expected"), [(None, "shared"), ("off", "off"), ("shared", "shared")])
def test_a_sandbox_is_forked_unless_the_policy_says_otherwise(value: str | None, expected: str) -> None:
    assert granted(value).sandbox.fork_server == expected


@pytest.mark.parametrize(("value", "expected"), [(None, "off"), ("shared", "shared"), ("tenant", "tenant:alice")])
def test_a_strict_profile_forks_only_where_it_says_so(value: str | None, expected: str) -> None:
    assert policy_of(value, "strict").decide(ALICE, RequestedSession()).sandbox.fork_server == expected


def test_tenants_with_fork_servers_of_their_own_have_different_ones() -> None:
    assert granted("tenant").sandbox.fork_server == "tenant:alice"
    assert granted("tenant", BOB).sandbox.fingerprint != granted("tenant").sandbox.fingerprint


def test_a_warm_sandbox_comes_from_the_fork_server_of_no_tenant() -> None:
    for value, expected in (("tenant", "off"), ("shared", "shared")):
        (warm,) = policy_of(value).warm_sandboxes(PoolSection())
        assert warm.spec.fork_server == expected


@pytest.mark.parametrize(
    ("had", "now", "ends"),
    [
        ("shared", "off", True),
        ("shared", "tenant", True),
        ("tenant", "off", True),
        ("tenant", "shared", False),
        ("off", "shared", False),
        ("shared", "shared", False),
    ],
)
def test_a_forked_session_ends_where_a_tightened_policy_forbids_that(had: str, now: str, ends: bool) -> None:
    held = policy_of(now).tightened(ALICE, granted(had), "local")
    assert isinstance(held, str) == ends
