"""The `[environments]` section: the index that packages come from, and what is no index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_server.core.config import Config, ConfigError, EnvironmentsSection, load, to_toml, validated

OWN = {"index_url": "https://packages.example.com/simple"}


def problems(environments: dict[str, Any], **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validated(Config, {"environments": environments, **sections})
    return list(caught.value.problems)


def test_without_an_index_packages_come_from_the_public_one() -> None:
    section = EnvironmentsSection()
    assert section.hosts == ("pypi.org:443", "files.pythonhosted.org:443") and not section.has_own_index
    assert section.directory_in(Path("/state")) == Path("/state/environments")


@pytest.mark.parametrize(
    ("url", "canonical", "host"),
    [
        ("https://Packages.Example.com/simple/", "https://packages.example.com/simple", "packages.example.com:443"),
        ("https://packages.example.com:8443", "https://packages.example.com:8443", "packages.example.com:8443"),
        ("http://10.1.2.3/simple", "http://10.1.2.3/simple", "10.1.2.3:80"),
        ("http://[fd00::1]:8080/a/b", "http://[fd00::1]:8080/a/b", "[fd00::1]:8080"),
    ],
)
def test_an_index_has_one_url_and_the_host_of_it(url: str, canonical: str, host: str) -> None:
    section = validated(Config, {"environments": {"index_url": url}}).environments
    assert (section.index_url, section.hosts, section.has_own_index) == (canonical, (host,), True)


def test_the_public_index_is_nobodys_own_however_it_is_written() -> None:
    for url in ("https://pypi.org/simple", "https://PyPI.org./simple/", "https://pypi.org:443/simple"):
        section = validated(Config, {"environments": {"index_url": url}}).environments
        assert not section.has_own_index
        assert section.hosts == EnvironmentsSection().hosts  # its files have another host


@pytest.mark.parametrize(
    ("url", "clause"),
    [
        ("", "is not a directory URL"),
        ("packages.example.com", "is not a directory URL"),
        ("ftp://packages.example.com", "is not a directory URL"),
        ("file:///packages", "is not a directory URL"),
        ("https://", "is not a directory URL"),
        ("https://packages.example.com/a b", "is not a directory URL"),
        ("https://packages.example.com/simple?x=1", "is not a directory URL"),
        ("https://packages.example.com/simple#x", "is not a directory URL"),
        ("https://packages.example.com/simple\n", "is not a directory URL"),
        ("https://*.example.com/simple", "is not a directory URL"),
        ("https://user:word@packages.example.com/simple", "has a user or a password"),
        ("https://packages.example.com:0/simple", "has a port"),
        ("https://packages.example.com:x/simple", "has "),
        ("https://0x7f000001/simple", "is an address in a spelling of its own"),
        (f"https://packages.example.com/{'x' * 512}", "is longer than 512 characters"),
    ],
)
def test_what_is_no_index_is_refused_with_what_would_be_one(url: str, clause: str) -> None:
    (problem,) = problems({"index_url": url})
    assert problem.startswith(f"environments.index_url: {clause}")
    assert 'it must be the URL of an index, as "https://packages.example.com/simple"' in problem


def test_the_hosts_of_an_index_are_listed_with_its_own() -> None:
    hosts = ["Files.Example.com", "*.example.com:443"]
    section = validated(Config, {"environments": {**OWN, "index_hosts": hosts}}).environments
    assert section.hosts == ("files.example.com", "*.example.com:443")
    assert problems({**OWN, "index_hosts": ["files.example.com"]}) == [
        "environments.index_hosts: lacks the host of index_url, packages.example.com:443 (it is an array of 1)"
    ]
    (problem,) = problems({**OWN, "index_hosts": ["*"]})
    assert problem.startswith("environments.index_hosts.0: covers every host")


@pytest.mark.parametrize("key", ["index_hosts", "index_authorization"])
def test_what_belongs_to_an_index_needs_one(key: str) -> None:
    value = ["a.example"] if key == "index_hosts" else "Basic ${index}"
    (problem,) = problems({key: value}, egress={"secrets": {"index": "/s"}})
    assert problem.startswith(f"environments.{key}: needs index_url, which is not set")


def test_credentials_are_the_name_of_a_secret_and_go_encrypted() -> None:
    secrets = {"secrets": {"index": "/secrets/index"}}
    header = {"index_authorization": "Basic ${index}"}
    assert validated(Config, {"environments": {**OWN, **header}, "egress": secrets}).environments.index_authorization
    assert problems({**OWN, **header}) == [
        "environments.index_authorization: names the secret 'index', which egress.secrets lacks; it has none"
    ]
    (problem,) = problems({"index_url": "http://a.example/simple", **header}, egress=secrets)
    assert "needs an index_url of https, or it would be sent unencrypted" in problem


@pytest.mark.parametrize(
    "text", ["", "hunter2", "Basic hunter2", "${index}", "Basic ${index} x", "Basic ${}", "Digest ${a}"]
)
def test_a_credential_itself_is_refused(text: str) -> None:
    (problem,) = problems({**OWN, "index_authorization": text})
    assert 'it must be "Basic ${NAME}" or "Bearer ${NAME}"' in problem


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uv", "uv"),
        ("cache", "cache"),
        ("max_bytes", 0),
        ("max_bytes", "much"),
        ("build_timeout_s", 0),
        ("build_timeout_s", float("nan")),
        ("max_archive_bytes", "2GiB"),
        ("index_hosts", [f"h{number}.example" for number in range(65)]),
        ("pip", "pip"),
    ],
)
def test_values_that_no_daemon_could_use_are_refused(key: str, value: object) -> None:
    (problem,) = problems({key: value})
    assert problem.startswith(f"environments.{key}: ")


def test_the_section_survives_being_printed(tmp_path: Path) -> None:
    config = validated(
        Config,
        {
            "environments": {**OWN, "index_authorization": "Bearer ${i}", "cache": "/cache", "max_bytes": "1GiB"},
            "egress": {"secrets": {"i": "/secrets/i"}},
        },
    )
    path = tmp_path / "executor.toml"
    path.write_text(to_toml(config))
    path.chmod(0o600)
    assert load(path) == config
