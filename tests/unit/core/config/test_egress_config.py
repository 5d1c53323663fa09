"""The section of the egress proxy takes what can work, and says what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_server.core.config import ConfigError, EgressSection, validated
from executor_server.core.config.config import load, to_toml


def problem(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validated(EgressSection, keys)
    (found,) = caught.value.problems
    return found


def test_nothing_of_it_needs_to_be_set() -> None:
    section = EgressSection()
    assert (section.internal, section.resolver, section.upstream_proxy, section.secrets) == ((), (), None, {})


def test_what_was_written_is_kept_in_one_form(tmp_path: Path) -> None:
    path = tmp_path / "executor.toml"
    path.write_text(
        """
        [egress]
        internal = ["10.20.0.0/16", "10.9.8.7", "FD12::/32"]
        resolver = ["10.0.0.53", "[fd12::0:53]:5353"]
        upstream_proxy = "http://proxy.example:03128/"
        upstream_resolves = true
        ca_file = "/etc/ours.pem"
        secrets = { github-bot = "/etc/secrets/github" }
        """
    )
    config = load(path)
    assert config.egress.internal == ("10.20.0.0/16", "10.9.8.7/32", "fd12::/32")
    assert config.egress.resolver == ("10.0.0.53:53", "[fd12::53]:5353")
    assert config.egress.upstream_proxy == "http://proxy.example:3128"
    assert config.egress.secrets == {"github-bot": Path("/etc/secrets/github")}
    path.write_text(to_toml(config))
    assert load(path) == config


def test_one_resolver_needs_no_array() -> None:
    assert EgressSection(resolver="127.0.0.53").resolver == ("127.0.0.53:53",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.20.0.1/16", "is not an address range"),
        ("mirror.example", "is not an address range"),
        ("0.0.0.0/0", "covers all addresses"),
        ("::/0", "covers all addresses"),
        ("127.0.0.1", "is a loopback address, and the proxy never connects to these"),
        ("169.254.169.254/32", "is the address of a cloud's metadata service"),
        ("169.254.1.0/24", "is a link-local address"),
        ("fd00:ec2::254", "is the address of a cloud's metadata service"),
        ("::1", "is a loopback address"),
        ("fe80::/64", "is a link-local address"),
        ("239.1.0.0/16", "is a multicast address"),
        ("2002::/16", "is an address of 6to4"),
        ("::ffff:10.0.0.0/104", "write it in IPv4"),
    ],
)
def test_a_range_that_opens_nothing_or_everything_is_refused(text: str, said: str) -> None:
    found = problem(internal=[text])
    assert found.startswith("internal.0: ") and said in found and 'such as "10.20.0.0/16"' in found


@pytest.mark.parametrize(
    "text", ["dns.example", "10.0.0.53:0", "10.0.0.53:65536", "fe80::1%eth0", "10.0.0.53:", "", "tcp://10.0.0.53"]
)
def test_a_resolver_is_an_address(text: str) -> None:
    assert 'it must be the address of a DNS server, as "10.0.0.53"' in problem(resolver=text)


@pytest.mark.parametrize(
    "text",
    [
        "proxy.example:3128",
        "https://proxy.example:3128",
        "socks5://proxy.example:1080",
        "http://proxy.example",
        "http://proxy.example:0",
        "http://proxy.example:65536",
        "http://proxy.example:3128/path",
        "http://bad host:3128",
        "http://-x:3128",
    ],
)
def test_an_upstream_proxy_is_a_host_and_a_port(text: str) -> None:
    assert 'it must be "http://HOST:PORT"' in problem(upstream_proxy=text)


def test_an_upstream_proxy_s_password_does_not_belong_into_the_file() -> None:
    assert "has a user or a password" in problem(upstream_proxy="http://me:secret@proxy.example:3128")


def test_only_an_upstream_proxy_can_resolve_upstream() -> None:
    assert problem(upstream_resolves=True) == ("upstream_resolves: needs upstream_proxy, which is not set (it is True)")


def test_secrets_have_names_and_absolute_paths() -> None:
    assert "1 to 64 of A-Z" in problem(secrets={"a b": "/x"})
    assert "must be an absolute path" in problem(secrets={"a": "x"})
