"""The network of a profile: what a file may say, what a session is granted, and what is left when the policy changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core import NO_NETWORK, NetworkRules, NetworkSecret
from executor_server.core.config import Config, ConfigError, PoolSection, validated
from executor_server.core.errors import InvalidRequest, PolicyViolation, Violation, ViolationKind
from executor_server.core.model import Principal, SessionSpec
from executor_server.policy.check import policy_for, unserved
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, parse_policy
from executor_server.policy.network import covered_by_both, narrowed, network_rules
from executor_server.policy.requested import MAX_REQUESTED_HOSTS, RequestedSession

ALICE = Principal("local", "token")
NOT_ALLOWED, DENIED, UNSUPPORTED = ViolationKind.NOT_ALLOWED, ViolationKind.DENIED, ViolationKind.UNSUPPORTED

PROFILE = """
[profiles.a.network]
default = ["pypi.org:443"]
allowed = ["*.example.com", "api.github.com:443", "internal.example.net:8443"]
denied = ["secret.example.com", "b.example.com:80"]
max_connections = 4
max_new_connections_per_minute = 50
max_sent_bytes = "1MiB"
max_received_bytes = 2_000_000
max_connection_s = 60
audit = "denials"
[[profiles.a.network.secrets]]
host = "api.github.com"
methods = ["GET", "POST"]
paths = ["/repos/acme/*"]
header = "Authorization"
value = "Bearer ${github-bot}"
"""


def file_of(text: str) -> PolicyFile:
    return parse_policy(f"default = 'a'\n[profiles.a]\n{text}".encode(), Path("p.toml"))


def policy(text: str = PROFILE, secrets: tuple[str, ...] | None = None) -> Policy:
    return Policy(file_of(text), images=["base"], backend="local", orphan_time_s=60.0, secrets=secrets)


def granted(*asked: str, text: str = PROFILE) -> SessionSpec:
    return policy(text).decide(ALICE, RequestedSession(network=asked))


def violations(*asked: str, text: str = PROFILE, secrets: tuple[str, ...] | None = None) -> tuple[Violation, ...]:
    with pytest.raises(PolicyViolation) as caught:
        policy(text, secrets).decide(ALICE, RequestedSession(network=asked))
    return caught.value.violations


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        file_of(text)
    return list(caught.value.problems)


# -- files


def test_a_profile_without_hosts_has_no_network() -> None:
    for text in ("", "network.denied = ['x.example']", "network.max_connections = 3"):
        spec = granted(text=text)
        assert spec.network is NO_NETWORK and not spec.sandbox.egress
        summary = policy(text).describe(ALICE).network
        assert (summary.default, summary.allowed, summary.rules) == ((), (), NO_NETWORK)


def test_one_host_is_written_in_one_form_only() -> None:
    one, other = (file_of(f"network.allowed = ['{host}']") for host in ("PyPI.org.:443", "pypi.org:443"))
    assert one.profiles["a"].network.allowed == ("pypi.org:443",) and one.fingerprint == other.fingerprint


@pytest.mark.parametrize("key", ["default", "allowed", "denied"])
@pytest.mark.parametrize("host", ["", "*.co.uk", "x.example:0", "https://x.example", "10.0.0.0/8"])
def test_what_is_no_host_is_refused_with_what_would_be_one(key: str, host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(PolicyFile, {"profiles": {"a": {"network": {key: ["pypi.org", host]}}}})
    (problem,) = caught.value.problems
    assert problem.startswith(f"profiles.a.network.{key}.1: ")
    assert 'it must be a host by name ("api.example.com", "*.example.com")' in problem


@pytest.mark.parametrize("key", ["default", "allowed", "denied"])
def test_hosts_of_a_file_are_bounded(key: str) -> None:
    (problem,) = problems(f"network.{key} = {[f'h{number}.example' for number in range(257)]}")
    assert problem.startswith(f"profiles.a.network.{key}: Tuple should have at most 256 items")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_connections", "0"),
        ("max_connections", "4097"),
        ("max_connections", "true"),
        ("max_new_connections_per_minute", "0"),
        ("max_sent_bytes", "0"),
        ("max_received_bytes", "-1"),
        ("max_sent_bytes", "'lots'"),
        ("max_sent_bytes", "9_007_199_254_740_993"),
        ("max_connection_s", "0.0"),
        ("max_connection_s", "inf"),
        ("audit", "'none'"),
        ("colour", "1"),
    ],
)
def test_limits_of_connections_have_bounds(key: str, value: str) -> None:
    (problem,) = problems(f"network.{key} = {value}")
    assert problem.startswith(f"profiles.a.network.{key}: ")


SECRET: dict[str, Any] = {"host": "api.example.com", "header": "X-Key", "value": "key=${the.key-1}"}


def secret_problems(*secrets: dict[str, Any], **network: Any) -> list[str]:
    table = {"allowed": ["api.example.com:443"], "secrets": list(secrets), **network}
    with pytest.raises(ConfigError) as caught:
        validated(PolicyFile, {"profiles": {"a": {"network": table}}})
    return [problem.removeprefix("profiles.a.network.") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("host", "api.example.com:0", "has a port of 0"),
        ("host", "*", "it must be a host by name"),
        ("methods", ["get"], 'must be a method in capitals, such as "GET"'),
        ("methods", ["CONNECT"], "must be a method in capitals"),
        ("methods", ["GET", "TRACE"], "and not TRACE, TRACK or CONNECT"),
        ("methods", ["GET"] * 17, "at most 16 items"),
        ("paths", ["repos/acme"], "does not begin with /"),
        ("paths", ["/a/*/b"], "a * before its end"),
        ("paths", ["/a/../b"], "has an empty segment, . or .."),
        ("paths", ["/a//b"], "has an empty segment"),
        ("paths", ["/a%2fb"], "has characters that servers read in different ways"),
        ("paths", ["/a;b"], "has characters that servers read in different ways"),
        ("paths", ["/" + "a" * 1024], "or is too long"),
        ("paths", ["/a"] * 65, "at most 64 items"),
        ("header", "", "is not a header name"),
        ("header", "X-Key\r\nX-Other", "is not a header name"),
        ("header", "X" * 65, "is not a header name"),
        ("header", "Host", "is a header of the connection or of message framing"),
        ("header", "content-length", "is a header of the connection"),
        ("value", "Bearer ghp_1234", "names no secret (and must not be one itself)"),
        ("value", "${key}\r\nX-Other: 1", "is not one line"),
        ("value", " ${key}", "is not one line"),
        ("value", "${key} ${", "has a ${ without the name of a secret and a }"),
        ("value", "${key}${a b}", "has a ${ without the name of a secret and a }"),
        ("value", "${}", "names no secret"),
        ("value", "${key}" * 200, "is not one line of 1 to 1,024"),
    ],
)
def test_a_secret_s_rule_that_could_not_be_kept_is_refused(key: str, value: Any, said: str) -> None:
    (problem,) = secret_problems({**SECRET, key: value})
    assert problem.startswith(f"secrets.0.{key}") and said in problem


@pytest.mark.parametrize(
    "secrets",
    [
        [{**SECRET, "value": "Bearer ghp_1234"}],
        [{**SECRET, "value": ["ghp_1234"]}],
        [{**SECRET, "value": {"a": "ghp_1234"}}],
        ["ghp_1234"],
        "ghp_1234",
    ],
    ids=repr,
)
def test_secret_in_place_of_its_name_is_not_repeated(secrets: Any) -> None:
    """The problem goes to the log, to the audit log for good, and to the administrator who reloads."""
    table = {"default": ["api.example.com"], "secrets": secrets}
    with pytest.raises(ConfigError) as caught:
        validated(PolicyFile, {"profiles": {"a": {"network": table}}})
    assert "network.secrets" in str(caught.value)
    assert "ghp_1234" not in str(caught.value)


@pytest.mark.parametrize("key", ["host", "header", "value"])
def test_a_secret_s_rule_is_whole(key: str) -> None:
    assert secret_problems({name: each for name, each in SECRET.items() if name != key}) == [
        f"secrets.0.{key}: is missing"
    ]


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ({"allowed": []}, "is covered neither by network.default nor by network.allowed"),
        ({"allowed": ["example.com", "xapi.example.com"]}, "is covered neither by"),
        ({"allowed": ["api.example.com:80"]}, "is covered on port 80 only"),
        ({"denied": ["example.com"]}, "is denied by network.denied"),
        ({"denied": ["api.example.com:443"]}, "is denied by network.denied"),
    ],
)
def test_a_secret_for_a_host_that_can_t_be_reached_is_a_mistake(network: dict[str, Any], said: str) -> None:
    (problem,) = secret_problems(SECRET, **network)
    assert problem.startswith("secrets.0.host: ") and said in problem


def test_a_session_has_the_secrets_of_the_ports_that_it_was_granted() -> None:
    secret = {**SECRET, "host": "api.example.com:8443"}
    table = {"default": ["api.example.com:443"], "allowed": ["*.example.com:8443"], "secrets": [secret]}
    profile = validated(PolicyFile, {"profiles": {"a": {"network": table}}}).profiles["a"]
    assert network_rules(profile, []).secrets == ()
    (granted,) = network_rules(profile, ["api.example.com:8443"]).secrets
    assert granted.host == "api.example.com:8443"


def test_two_rules_for_the_same_requests_are_a_mistake() -> None:
    (problem,) = secret_problems(SECRET, {**SECRET, "header": "x-key", "value": "${other}"})
    assert problem == "secrets.1.host: has this header for the same requests twice (it is 'api.example.com')"
    assert validated(
        PolicyFile,
        {
            "profiles": {
                "a": {
                    "network": {
                        "default": ["*.example.com"],
                        "denied": ["api.example.com:80"],
                        "secrets": [SECRET, {**SECRET, "paths": ["/a"]}, {**SECRET, "header": "X-Other"}],
                    }
                }
            }
        },
    )


# -- what is granted


def test_a_session_has_the_default_hosts_and_those_that_it_asks_for() -> None:
    assert granted().network.allowed == ("pypi.org:443",) and granted().sandbox.egress
    spec = granted("A.Example.com", "api.github.com:443", "a.example.com")
    assert spec.network == NetworkRules(
        allowed=("a.example.com", "api.github.com:443", "pypi.org:443"),
        denied=("b.example.com:80", "secret.example.com"),
        secrets=(
            NetworkSecret(
                "api.github.com", "Authorization", "Bearer ${github-bot}", ("GET", "POST"), ("/repos/acme/*",)
            ),
        ),
        max_connections=4,
        max_new_connections_per_minute=50,
        max_sent_bytes=2**20,
        max_received_bytes=2_000_000,
        max_connection_s=60.0,
        audit="denials",
    )


def test_a_session_gets_the_secrets_of_its_own_hosts_only() -> None:
    assert granted("a.example.com").network.secrets == ()
    wide = (
        'network.allowed = ["*.github.com"]\nnetwork.secrets = [{host = "*.github.com", header = "A", value = "${k}"}]'
    )
    for asked in ("api.github.com", "*.github.com:443", "*.api.github.com:80"):
        assert len(granted(asked, text=wide).network.secrets) == 1


@pytest.mark.parametrize(
    ("asked", "violation"),
    [
        ("example.org", (NOT_ALLOWED, "example.org", "allowed")),
        ("example.com", (NOT_ALLOWED, "example.com", "allowed")),
        ("*.org:443", None),
        ("api.github.com", (NOT_ALLOWED, "api.github.com", "allowed")),
        ("api.github.com:80", (NOT_ALLOWED, "api.github.com:80", "allowed")),
        ("x.api.github.com:443", (NOT_ALLOWED, "x.api.github.com:443", "allowed")),
        ("*.github.com:443", (NOT_ALLOWED, "*.github.com:443", "allowed")),
        ("a.example.com:22", (NOT_ALLOWED, "a.example.com:22", "allowed")),
        ("internal.example.net", (NOT_ALLOWED, "internal.example.net", "allowed")),
        ("secret.example.com:443", (DENIED, "secret.example.com:443", "denied")),
        ("x.secret.example.com", (DENIED, "x.secret.example.com", "denied")),
        ("*.secret.example.com", (DENIED, "*.secret.example.com", "denied")),
        ("b.example.com", (DENIED, "b.example.com", "denied")),
        ("b.example.com:443", ()),
        ("*.example.com", ()),
        ("*.c.example.com", ()),
        ("internal.example.net:8443", ()),
        ("pypi.org:443", ()),
    ],
)
def test_a_host_is_granted_on_each_of_its_ports_or_refused(
    asked: str, violation: tuple[ViolationKind, str, str] | tuple[()] | None
) -> None:
    if violation is None:  # below a public suffix: no policy can grant it
        with pytest.raises(InvalidRequest):
            granted(asked)
    elif not violation:
        assert asked in granted(asked).network.allowed
    else:
        kind, requested, key = violation
        (found,) = violations(asked)
        assert (found.field, found.kind, found.requested) == ("network", kind, requested)
        assert found.rule == f"profiles.a.network.{key}"


def test_all_that_is_not_granted_is_refused_at_once() -> None:
    found = violations("pypi.org:443", "x.org", "a.example.com", "secret.example.com", "x.org")
    assert [(each.requested, each.kind) for each in found] == [("x.org", NOT_ALLOWED), ("secret.example.com", DENIED)]
    assert found[0].allowed == "pypi.org:443, *.example.com, api.github.com:443, internal.example.net:8443"
    assert found[1].allowed == "nothing of secret.example.com, b.example.com:80"


@pytest.mark.parametrize("host", ["", "*.com", "x.example:0"])
def test_what_is_no_host_is_no_request(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        granted("pypi.org:443", host)
    assert caught.value.field == "network[1]" and caught.value.message.startswith("network[1] ")


def test_hosts_of_a_request_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="network has more than 64 entries"):
        granted(*("a.example.com",) * (MAX_REQUESTED_HOSTS + 1))


def test_what_is_denied_is_not_said_to_be_had() -> None:
    text = 'network = {default = ["a.x.org", "b.x.org"], allowed = ["*.y.org", "z.org"], denied = ["b.x.org", "y.org"]}'
    summary = policy(text).describe(ALICE).network
    assert (summary.default, summary.allowed) == (("a.x.org",), ("z.org",))
    assert granted(text=text).network.allowed == ("a.x.org",)


def test_a_secret_that_the_daemon_does_not_have_is_no_grant() -> None:
    assert policy(secrets=("github-bot",)).decide(ALICE, RequestedSession(network=("api.github.com:443",)))
    assert policy(secrets=()).decide(ALICE, RequestedSession())
    expected = Violation(
        "network",
        UNSUPPORTED,
        "api.github.com with Authorization of ${github-bot}",
        "hosts whose secrets the daemon is configured with",
        "egress.secrets",
    )
    assert violations("api.github.com:443", secrets=("other",)) == (expected,)


# -- the daemon's configuration, and its pool


def test_secrets_that_the_configuration_lacks_are_found_beforehand() -> None:
    config = validated(Config, {"egress": {"secrets": {"other": "/x"}}})
    assert [str(problem) for problem in unserved(file_of(PROFILE), config)] == [
        "profiles.a.network.secrets: the configuration has no secret 'github-bot' (egress.secrets; it has other), so "
        "no session gets these hosts"
    ]
    assert unserved(file_of(PROFILE), validated(Config, {"egress": {"secrets": {"github-bot": "/x"}}})) == []
    cloud = {"server": {"backend": "e2b"}, "egress": {"secrets": {"github-bot": "/x"}}}
    assert [str(problem) for problem in unserved(file_of(PROFILE), validated(Config, cloud))] == [
        "profiles.a.network.secrets: the e2b backend sets no headers, so no session gets these hosts"
    ]
    asking = file_of('network.ask = ["a.example"]')
    assert [str(problem) for problem in unserved(asking, validated(Config, cloud))] == [
        "profiles.a.network.ask: the e2b backend does not hold connections for an approval, so no session is made"
    ]


def test_the_policy_of_a_daemon_knows_its_secrets() -> None:
    with pytest.raises(PolicyViolation, match="network"):
        policy_for(file_of(PROFILE), Config()).decide(ALICE, RequestedSession(network=("api.github.com:443",)))


def test_sandboxes_with_a_network_are_kept_ready_for_those_who_ask() -> None:
    asked = 'network.allowed = ["pypi.org"]'
    pool = validated(
        PoolSection, {"warm": [{"image": "base", "size": 1, "network": True}, {"image": "base", "size": 1}]}
    )
    ready, plain = (each.spec for each in policy(asked).warm_sandboxes(pool))
    assert ready == granted("pypi.org:443", text=asked).sandbox
    assert plain == granted(text=asked).sandbox
    default = 'network.default = ["pypi.org"]'
    assert {each.spec for each in policy(default).warm_sandboxes(pool)} == {granted(text=default).sandbox}
    with pytest.raises(ConfigError, match=r"pool\.warm\.0\.network: the profile 'a' grants no hosts"):
        policy("").warm_sandboxes(pool)


# -- tightening


def tightened(spec: SessionSpec, text: str) -> NetworkRules:
    after = policy(text).tightened(ALICE, spec, "local")
    assert isinstance(after, SessionSpec), after
    assert after.sandbox == spec.sandbox
    return after.network


def test_a_tightened_session_keeps_what_both_policies_grant() -> None:
    spec = granted("*.example.com", "api.github.com:443")
    after = tightened(
        spec,
        """
        network.allowed = ["a.example.com:443", "b.example.com", "elsewhere.org", "api.github.com"]
        network.denied = ["c.example.com"]
        network.max_connections = 9
        network.max_sent_bytes = 1000
        """,
    )
    assert after.allowed == ("a.example.com:443", "api.github.com:443", "b.example.com:443")
    assert after.denied == ("b.example.com:80", "c.example.com", "secret.example.com")
    assert (after.max_connections, after.max_sent_bytes, after.secrets, after.audit) == (4, 1000, (), "connections")


def test_a_session_without_a_network_is_not_given_one_by_tightening() -> None:
    assert tightened(granted(text=""), PROFILE) == NO_NETWORK


def test_a_session_may_lose_all_its_hosts() -> None:
    assert tightened(granted(), "").allowed == ()


def test_tightening_to_the_same_policy_changes_nothing() -> None:
    spec = granted("*.example.com", "api.github.com:443", "b.example.com:443")
    assert tightened(spec, PROFILE) == spec.network


@pytest.mark.parametrize(
    ("left", "right", "both"),
    [
        (["x.org"], ["x.org"], ["x.org"]),
        (["x.org"], ["x.org:443"], ["x.org:443"]),
        (["x.org:443"], ["x.org"], ["x.org:443"]),
        (["x.org"], ["x.org:80", "x.org:443"], ["x.org"]),
        (["x.org"], ["x.org:22"], []),
        (["*.x.org:443"], ["a.x.org"], ["a.x.org:443"]),
        (["a.x.org"], ["*.x.org:443"], ["a.x.org:443"]),
        (["*.x.org"], ["*.a.x.org", "x.org"], ["*.a.x.org:443", "*.a.x.org:80"]),
        (["a.org", "b.org"], ["c.org"], []),
    ],
)
def test_common_hosts_are_those_that_both_cover(left: list[str], right: list[str], both: list[str]) -> None:
    assert list(covered_by_both(tuple(left), tuple(right))) == both


@pytest.mark.parametrize(
    ("had", "now", "left"),
    [
        ({}, {}, ((), ())),
        ({"methods": ("GET",)}, {}, (("GET",), ())),
        ({}, {"methods": ("GET",)}, (("GET",), ())),
        ({"methods": ("GET", "PUT")}, {"methods": ("POST", "GET")}, (("GET",), ())),
        ({"methods": ("GET",)}, {"methods": ("POST",)}, None),
        ({"paths": ("/a/*",)}, {"paths": ("/a/b", "/a/c/*", "/d")}, ((), ("/a/b", "/a/c/*"))),
        ({"paths": ("/a/b",)}, {"paths": ("/*",)}, ((), ("/a/b",))),
        ({"paths": ("/a",)}, {"paths": ("/a/*",)}, None),
        ({}, {"host": "y.org"}, None),
        ({}, {"value": "${l}"}, None),
        ({}, {"header": "x-key"}, ((), ())),
    ],
)
def test_a_header_is_set_in_requests_that_both_policies_name(
    had: dict[str, Any], now: dict[str, Any], left: tuple[tuple[str, ...], tuple[str, ...]] | None
) -> None:
    rule = NetworkSecret("x.org", "X-Key", "${k}")
    found = narrowed(replace(rule, **had), replace(rule, **now))
    assert (found and (found.methods, found.paths)) == left
