"""One session's rules: read from JSON field by field, denials first, and refusals that say what would be allowed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.core.network import NetworkRules, NetworkSecret
from executor_server.guest.egress import reasons
from executor_server.guest.egress.host_names import HostPattern, LiteralAddress, Target, parse_authority
from executor_server.guest.egress.host_rules import MESSAGE_CHARACTERS, Allowed, Refused, Rules

SECRET = {"host": "api.github.com", "header": "Authorization", "value": "Bearer ${github-bot}"}
RULES = Rules.read(
    {
        "allowed": ["pypi.org", "*.pythonhosted.org:443", "api.github.com:443", "db.example.com:5432", "10.1.2.3:8080"],
        "denied": ["gist.github.com", "secret.pythonhosted.org"],
        "secrets": [SECRET],
    }
)


def of_json(rules: NetworkRules) -> Rules:
    return Rules.read(json.loads(json.dumps(asdict(rules))))


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("pypi.org:443", "pypi.org"),
        ("pypi.org:80", "pypi.org"),
        ("files.pythonhosted.org:443", "*.pythonhosted.org:443"),
        ("a.b.pythonhosted.org:443", "*.pythonhosted.org:443"),
        ("db.example.com:5432", "db.example.com:5432"),
    ],
)
def test_an_allowed_target_is_told_its_rule(target: str, rule: str) -> None:
    assert RULES.decide(parse_authority(target)) == Allowed(rule, ())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("pypi.org:8080", reasons.NOT_ALLOWED),
        ("www.pypi.org:443", reasons.NOT_ALLOWED),
        ("pythonhosted.org:443", reasons.NOT_ALLOWED),
        ("files.pythonhosted.org:80", reasons.NOT_ALLOWED),
        ("evilpythonhosted.org:443", reasons.NOT_ALLOWED),
        ("db.example.com:443", reasons.NOT_ALLOWED),
        ("gist.github.com:443", reasons.DENIED),
        ("gist.github.com:8443", reasons.DENIED),
        ("a.gist.github.com:443", reasons.DENIED),
        ("secret.pythonhosted.org:443", reasons.DENIED),
        ("a.secret.pythonhosted.org:443", reasons.DENIED),
        # The spelling of a homograph's A-label is another name.
        ("xn--pyp-eoc.org:443", reasons.NOT_ALLOWED),
    ],
)
def test_whatever_no_rule_covers_is_refused(target: str, reason: str) -> None:
    decision = RULES.decide(parse_authority(target))
    assert isinstance(decision, Refused)
    assert decision.reason == reason


def test_a_refusal_says_what_is_allowed() -> None:
    decision = RULES.decide(Target("api.x.com", 443))
    assert decision == Refused(
        reasons.NOT_ALLOWED,
        "api.x.com:443 is not allowed for this session; allowed: pypi.org, *.pythonhosted.org:443, api.github.com:443,"
        " db.example.com:5432, 10.1.2.3:8080",
    )


def test_a_refusal_names_the_ports_of_a_host_that_is_allowed() -> None:
    decision = RULES.decide(Target("pypi.org", 8080))
    assert decision.message == "pypi.org:8080 is not allowed for this session; this host is allowed on port 80, 443"  # type: ignore[union-attr]


def test_a_refusal_under_no_rules_says_so() -> None:
    assert Rules().decide(Target("x.org", 443)) == Refused(
        reasons.NOT_ALLOWED, "x.org:443 is not allowed for this session; nothing is allowed"
    )


def test_a_listed_address_is_allowed_as_such_and_no_other() -> None:
    with pytest.raises(LiteralAddress) as caught:
        parse_authority("10.1.2.3:8080")
    assert caught.value.target is not None
    assert RULES.decide(caught.value.target) == Allowed("10.1.2.3:8080", ())
    for target in (Target("10.1.2.3", 443), Target("10.1.2.4", 8080), Target("::1", 8080)):
        decision = RULES.decide(target)
        assert isinstance(decision, Refused)
        assert decision.reason == reasons.ADDRESS_LITERAL


def test_a_secret_with_a_port_goes_to_that_port_alone() -> None:
    secrets = [{**SECRET, "host": host} for host in ("x.org:8443", "*.x.org:443", "x.org:80", "x.org")]
    rules = Rules.read({"allowed": ["x.org", "x.org:8443", "*.x.org", "*.x.org:8443"], "secrets": secrets})
    eight, below, _, every = rules.secrets
    for target, found in (
        ("x.org:8443", (eight, every)),
        ("x.org:443", (every,)),
        ("a.x.org:443", (below,)),
        ("a.x.org:8443", ()),
        ("x.org:80", ()),
    ):
        decision = rules.decide(parse_authority(target))
        assert isinstance(decision, Allowed) and decision.secrets == found, target


def test_a_secret_goes_to_its_host_and_never_where_there_is_no_tls() -> None:
    rules = Rules.read(
        {"allowed": ["api.github.com", "pypi.org", "*.x.org"], "secrets": [SECRET, {**SECRET, "host": "*.x.org"}]}
    )
    first, second = rules.secrets
    assert rules.decide(Target("api.github.com", 443)) == Allowed("api.github.com", (first,))
    assert rules.decide(Target("a.x.org", 443)) == Allowed("*.x.org", (second,))
    assert rules.decide(Target("api.github.com", 80)) == Allowed("api.github.com", ())
    assert rules.decide(Target("pypi.org", 443)) == Allowed("pypi.org", ())


# -- reading


def test_the_rules_of_the_daemon_are_read_whole() -> None:
    secret = NetworkSecret("api.x.org", "X-Api-Key", "${x}", methods=("GET",), paths=("/v1/*",))
    rules = of_json(
        NetworkRules(
            allowed=("api.x.org:443",),
            denied=("evil.x.org",),
            secrets=(secret,),
            max_connections=3,
            max_new_connections_per_minute=4,
            max_sent_bytes=5,
            max_received_bytes=6,
            max_connection_s=0.5,
            audit="denials",
        )
    )
    assert [pattern.text for pattern in rules.allowed] == ["api.x.org:443"]
    assert [pattern.text for pattern in rules.denied] == ["evil.x.org"]
    assert [(each.host.text, each.header, each.value, each.methods, each.paths) for each in rules.secrets] == [
        ("api.x.org", "X-Api-Key", "${x}", ("GET",), ("/v1/*",))
    ]
    assert (rules.max_connections, rules.max_new_connections_per_minute) == (3, 4)
    assert (rules.max_sent_bytes, rules.max_received_bytes, rules.max_connection_s) == (5, 6, 0.5)
    assert rules.audit == "denials"


def test_fields_that_are_missing_have_the_figures_of_the_daemon() -> None:
    ours, theirs = Rules.read({}), of_json(NetworkRules())
    figures = [name for name in vars(ours) if not name.startswith("_")]
    assert len(figures) == 10
    assert [getattr(ours, name) for name in figures] == [getattr(theirs, name) for name in figures]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "must be an object"),
        ({"alowed": []}, "must not have alowed"),
        ({"allowed": "pypi.org"}, "allowed must be a list"),
        ({"allowed": [1]}, "allowed must be text"),
        ({"allowed": ["*.com"]}, r"allowed: '\*.com' covers everything below com"),
        ({"denied": ["a b"]}, "denied: 'a b' has a space"),
        ({"allowed": ["a.org"] * 5000}, "at most 4096 entries"),
        ({"max_connections": 0}, "max_connections must be at least 1"),
        ({"max_connections": True}, "max_connections must be a whole number"),
        ({"max_sent_bytes": -1}, "max_sent_bytes must be a whole number from 0"),
        ({"max_received_bytes": 2**60}, "max_received_bytes must be a whole number"),
        ({"max_connection_s": 0}, "max_connection_s must be a number of seconds"),
        ({"max_connection_s": float("nan")}, "max_connection_s must be a number of seconds"),
        ({"audit": "all"}, "audit must be one of connections, denials"),
        ({"secrets": [1]}, "a secret must be an object"),
        ({"secrets": [{}]}, "a secret's host must be text"),
        ({"secrets": [{**SECRET, "host": "a.org:0"}]}, "has a port of 0"),
        ({"secrets": [{**SECRET, "header": "A B"}]}, "a secret's header must be"),
        ({"secrets": [{**SECRET, "header": "Host"}]}, "frames or routes"),
        ({"secrets": [{**SECRET, "value": "a\r\nX: b"}]}, "a secret's value must be"),
        ({"secrets": [{**SECRET, "value": ""}]}, "a secret's value must be"),
        ({"secrets": [{**SECRET, "methods": ["GET /"]}]}, "a secret's methods must be"),
        ({"secrets": [{**SECRET, "paths": ["repos"]}]}, "a secret's paths must be"),
        ({"secrets": [{**SECRET, "paths": ["/a b"]}]}, "a secret's paths must be"),
        ({"secrets": [{**SECRET, "token": "x"}]}, "a secret must not have token"),
    ],
)
def test_rules_that_are_none_are_refused_with_a_sentence(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules.read(values)


def test_the_sentence_about_a_bad_secret_does_not_hold_its_value() -> None:
    with pytest.raises(ValueError, match="a secret's value must be") as caught:
        Rules.read({"secrets": [{**SECRET, "value": "hunter2\n"}]})
    assert "hunter2" not in str(caught.value)


# -- properties

_LABELS = st.sampled_from(["a", "b", "x" * 40, "example"])
_HOSTS = st.lists(_LABELS, min_size=1, max_size=5).map(lambda labels: ".".join([*labels, "example", "org"]))
_PATTERNS = st.builds(HostPattern, _HOSTS, wildcard=st.booleans(), port=st.sampled_from([None, 80, 443, 8443]))
_TARGETS = st.builds(Target, _HOSTS, st.sampled_from([80, 443, 8443, 22]))


@given(st.lists(_PATTERNS, max_size=8), st.lists(_PATTERNS, max_size=3), _TARGETS)
def test_a_decision_is_that_of_the_patterns_one_by_one(
    allowed: list[HostPattern], denied: list[HostPattern], target: Target
) -> None:
    decision = Rules(allowed=allowed, denied=denied).decide(target)
    if any(pattern.forbids(target) for pattern in denied):
        assert isinstance(decision, Refused)
        assert decision.reason == reasons.DENIED
    elif any(pattern.covers(target) for pattern in allowed):
        assert isinstance(decision, Allowed)
        assert HostPattern.parse(decision.rule).covers(target)
    else:
        assert isinstance(decision, Refused)
        assert decision.reason == reasons.NOT_ALLOWED


@given(st.lists(_PATTERNS, max_size=60), _TARGETS)
def test_a_sentence_is_bounded_and_counts_what_it_leaves_out(allowed: list[HostPattern], target: Target) -> None:
    decision = Rules(allowed=allowed).decide(target)
    if isinstance(decision, Allowed):
        return
    assert len(decision.message) <= MESSAGE_CHARACTERS
    assert decision.message.isascii()
    assert decision.message.isprintable()
    if "; allowed: " in decision.message:
        names = decision.message.partition("; allowed: ")[2].split(", ")
        last = names[-1].removeprefix("and ")
        left_out = int(last.split()[0]) if last.endswith(("more", "hosts")) else 0
        shown = [name for name in names if not name.endswith(("more", "hosts"))]
        assert len(shown) + left_out == len(dict.fromkeys(allowed)) or len(allowed) != len(set(allowed))


def test_a_longest_name_leaves_room_for_the_sentence() -> None:
    target = Target(".".join(["a" * 62] * 4), 65535)
    decision = Rules(allowed=[HostPattern("pypi.org")]).decide(target)
    assert isinstance(decision, Refused)
    assert decision.message.endswith("allowed: pypi.org")
    assert len(decision.message) <= MESSAGE_CHARACTERS
