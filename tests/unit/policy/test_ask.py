"""The third answer of a policy: what needs an approval, and what that leaves of allowed and denied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_server.api.to_wire import policy_to
from executor_server.core.config.key_types import ConfigError
from executor_server.core.errors import PolicyViolation
from executor_server.core.model import Principal, SessionSpec, ShippedTool, ToolSpec
from executor_server.core.network import NO_NETWORK
from executor_server.policy.approvals import ApprovalKind, ApprovalRequired, Wanted
from executor_server.policy.decide import Policy
from executor_server.policy.explain.explanation import PolicyText, explain
from executor_server.policy.explain.question import Question
from executor_server.policy.file import parse_policy
from executor_server.policy.requested import RequestedSession
from executor_server.policy.session_rules import check_tools, tool_to_ask

ALICE = Principal("alice", "token")


def policy(profile: str, **options: Any) -> Policy:
    text = f'default = "p"\n[profiles.p]\non_reload = "tighten"\n{profile}\n'
    file = parse_policy(text.encode(), Path("policy.toml"))
    return Policy(file, images=["base"], backend="local", orphan_time_s=600.0, **options)


def outcome(found: Policy, request: RequestedSession) -> tuple[str, ...]:
    """The things to ask for; or "granted" or "refused"."""
    try:
        found.decide(ALICE, request)
    except ApprovalRequired as required:
        spec = found.decide(ALICE, request, approved=required.wanted)
        assert set(request.authorized_imports) <= set(spec.authorized_imports)
        with pytest.raises(ApprovalRequired):
            found.decide(ALICE, request, approved=required.wanted[1:])
        return tuple(each.what for each in required.wanted)
    except PolicyViolation:
        return ("refused",)
    return ("granted",)


@pytest.mark.parametrize(
    ("imports", "asked", "expected"),
    [
        ("ask = ['requests.*']", ["requests"], ("requests",)),
        ("ask = ['requests.*']", ["requests.sessions", "numpy"], ("requests.sessions",)),
        ("ask = ['requests']", ["requests.sessions"], ("requests.sessions",)),
        ("ask = ['requests']", ["*"], ("*",)),
        ("ask = ['requests']", ["numpy"], ("granted",)),
        ("allowed = ['numpy']\nimports.ask = ['*']", ["numpy", "os"], ("os",)),
        ("allowed = ['numpy']\nimports.ask = ['os']", ["subprocess"], ("refused",)),
        ("allowed = []\nimports.ask = ['os.path']", ["os.*"], ("refused",)),
        ("ask = ['os']\nimports.denied = ['os']", ["os"], ("refused",)),
    ],
)
def test_imports_to_ask_for(imports: str, asked: list[str], expected: tuple[str, ...]) -> None:
    assert outcome(policy(f"imports.{imports}"), RequestedSession(authorized_imports=tuple(asked))) == expected


@pytest.mark.parametrize(
    ("packages", "asked", "expected"),
    [
        ("ask = ['six']", ["six>1"], ("six>1",)),
        ("ask = ['six<2']", ["six>3"], ("refused",)),
        ("ask = ['six']", ["numpy"], ("refused",)),
        ("allowed = ['numpy']\npackages.ask = ['*']", ["numpy"], ("granted",)),
        ("allowed = ['numpy']\npackages.ask = ['*']", ["six", "numpy"], ("six",)),
        ("allowed = ['*']\npackages.ask = ['six']", ["numpy", "six"], ("six",)),
    ],
)
def test_packages_to_ask_for(packages: str, asked: list[str], expected: tuple[str, ...]) -> None:
    found = policy(f"packages.{packages}", own_index=True)
    assert outcome(found, RequestedSession(packages=tuple(asked))) == expected


def test_a_package_that_needs_an_approval_is_not_added_for_a_module() -> None:
    found = policy("packages.ask = ['six']\npackages.auto = true")
    spec = found.decide(ALICE, RequestedSession(authorized_imports=("six",)))
    assert found.with_packages(spec, ["six"]) is None


def test_a_request_that_is_refused_anyway_asks_nobody() -> None:
    request = RequestedSession(authorized_imports=("os",), packages=("numpy",))
    assert outcome(policy("imports.ask = ['os']"), request) == ("refused",)


@pytest.mark.parametrize(
    ("tools", "name", "asks"),
    [
        ("ask = ['delete_*']", "delete_file", True),
        ("ask = ['delete_*']", "read_file", False),
        ("allowed = ['read_*']\ntools.ask = ['*']", "read_file", False),
        ("allowed = ['read_*']\ntools.ask = ['*']", "delete_file", True),
    ],
)
def test_tools_to_ask_for(tools: str, name: str, asks: bool) -> None:
    spec = policy(f"tools.{tools}").decide(ALICE, RequestedSession())
    check_tools(spec, [ToolSpec(name, "", (), False)])
    assert (tool_to_ask(spec, name) is not None) is asks
    shipped = ToolSpec(name, "", (), False, shipped=ShippedTool(b""))
    if asks:  # no call of it would pass the daemon
        with pytest.raises(PolicyViolation, match="allowed is host"):
            check_tools(spec, [shipped])
    else:
        check_tools(spec, [shipped])


def test_hosts_to_ask_for_are_rules_of_the_session_and_no_grants() -> None:
    found = policy(
        "network.allowed = ['a.io.example']\nnetwork.ask = ['*.io.example', 'b.example:22']\nnetwork.denied = ['b.example']"
    )
    network = found.decide(ALICE, RequestedSession(network=("a.io.example", "c.io.example"))).network
    assert (network.allowed, network.ask, network.any) == (("a.io.example",), ("*.io.example",), True)
    assert outcome(found, RequestedSession(network=("other.test",))) == ("refused",)
    assert policy("").decide(ALICE, RequestedSession()).network == NO_NETWORK


@pytest.mark.parametrize(
    ("profile", "problem"),
    [
        ("tools.allowed = ['delete_*']\ntools.ask = ['delete_file']", "tools.ask.0: is granted already by `allowed`"),
        ("imports.ask = ['math']", "imports.ask.0: is granted already by `default`"),
        ("imports.default = ['*']\nimports.ask = ['os']", "imports.ask.0: is granted already by `default`"),
        ("network.default = ['*.io.example']\nnetwork.ask = ['a.io.example']", "network.ask.0: is granted already"),
        ("packages.allowed = ['six']\npackages.ask = ['six>1']", "packages.ask.0: allows six twice"),
        ("approvals.wait_s = 0.5", "approvals.wait_s"),
        ("approvals.wait_s = 3601", "approvals.wait_s"),
        ("network.ask = ['\\u001b[2J']", "network.ask.0"),
    ],
)
def test_what_makes_no_sense_is_an_error_of_the_policy(profile: str, problem: str) -> None:
    if "\\u001b" in profile:
        profile = profile.replace("'", '"')
    with pytest.raises(ConfigError) as caught:
        policy(profile)
    assert any(f"profiles.p.{problem}" in each for each in caught.value.problems), caught.value.problems


def test_a_profile_inherits_what_it_asks_for() -> None:
    text = 'default = "q"\n[profiles.p]\ntools.ask = ["x"]\napprovals.wait_s = 7\n[profiles.q]\nextends = "p"\n'
    found = Policy(parse_policy(text.encode(), Path("p")), images=["base"], backend="local", orphan_time_s=1.0)
    spec = found.decide(ALICE, RequestedSession())
    assert (spec.tools.ask, spec.approval_wait_s) == (("x",), 7.0)


def test_a_tightened_session_asks_for_what_it_was_granted() -> None:
    before = policy("network.default = ['a.example', 'b.example']").decide(
        ALICE, RequestedSession(authorized_imports=("os", "json"))
    )
    after = policy(
        "imports.ask = ['os']\nnetwork.default = ['b.example']\nnetwork.ask = ['a.example']\ntools.ask = ['x']"
    )
    now = after.tightened(ALICE, before, "local")
    assert isinstance(now, SessionSpec)
    assert "os" not in now.authorized_imports and "json" in now.authorized_imports
    assert (now.network.allowed, now.network.ask) == (("b.example",), ("a.example",))
    assert now.tools.ask == ("x",)
    again = after.tightened(ALICE, now, "local")
    assert isinstance(again, SessionSpec) and again.network == now.network


def test_an_import_that_a_running_session_has_is_not_asked_for_again() -> None:
    found = policy("imports.ask = ['os']")
    spec = found.decide(ALICE, RequestedSession())
    wanted = Wanted(ApprovalKind.IMPORT, "os", "profiles.p.imports.ask")
    with pytest.raises(ApprovalRequired) as caught:
        found.authorize_imports(ALICE, spec, ["os"])
    assert caught.value.wanted == (wanted,)
    more = found.authorize_imports(ALICE, spec, ["os"], approved=[wanted])
    assert found.authorize_imports(ALICE, more, ["os"]).authorized_imports == more.authorized_imports


def test_an_explanation_names_the_line_that_asks() -> None:
    text = 'default = "p"\n[profiles.p]\nimports.ask = ["os"]\ntools.ask = ["x"]\nnetwork.ask = ["a.example"]\n'
    found = Policy(parse_policy(text.encode(), Path("p")), images=["base"], backend="local", orphan_time_s=1.0)
    question = Question(authorized_imports=("os",), tools=("x", "y"), connections=("a.example:443",))
    explained = explain(PolicyText(found, text), "alice", question)
    assert explained.granted is not None and not explained.refusals
    assert [(each.message, each.place.line and each.place.line.number) for each in explained.approvals] == [
        ("import os: waits for an approval", 3),
        ("tool x: waits for an approval", 4),
        ("host a.example:443: waits for an approval", 5),
    ]


def test_a_client_reads_what_needs_an_approval() -> None:
    found = policy(
        "imports.ask = ['os']\ntools.ask = ['x']\nnetwork.ask = ['a.example']\npackages.ask = ['six']", own_index=True
    )
    message = policy_to(found.describe(ALICE))
    asks = (message.ask_imports, message.ask_tools, message.network_rules.ask_hosts, message.packages.ask)
    assert list(map(list, asks)) == [["os"], ["x"], ["a.example"], ["six"]]
