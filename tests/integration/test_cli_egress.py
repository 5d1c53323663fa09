"""`executor-server egress check` says what becomes of a connection: by which rule, to which addresses, and why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from executor_server.daemon.cli import main
from executor_server.daemon.cli.egress import EXIT_REFUSED
from tests.support.internet.world import SUFFIX, Internet

POLICY = f"""\
default = "team"
[profiles.base.network]
default = ["localhost", "files.{SUFFIX}:443"]
allowed = ["*.{SUFFIX}", "10.1.2.3:8080"]
denied = ["git.{SUFFIX}"]
[[profiles.base.network.secrets]]
host = "api.{SUFFIX}"
methods = ["GET", "POST"]
paths = ["/repos/*"]
header = "Authorization"
value = "Bearer ${{bot}}"
[profiles.team]
extends = "base"
[profiles.none]
[tenants.nothing]
profile = "none"
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("EXECUTOR_CONFIG", raising=False)
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return path


def check(target: str, *options: object, tenant: str = "x") -> Result:
    arguments = ["egress", "check", target, "--tenant", tenant, *map(str, options)]
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def lines(result: Result) -> list[str]:
    return [line.strip() for line in result.output.splitlines()]


class World:
    """A daemon's configuration that resolves names in the tests' own internet."""

    def __init__(self, internet: Internet, policy: Path) -> None:
        self.internet = internet
        self.directory = policy.parent
        self.policy = policy
        self.secret = policy.parent / "bot"
        self.secret.write_text("ghp_0123\n")
        self.secret.chmod(0o600)

    def check(self, target: str, **egress: Any) -> Result:
        keys = {"secrets": {}, **egress}
        secrets = keys.pop("secrets") or {"bot": str(self.secret)}
        text = f'[policy]\nfile = "{self.policy}"\n{self.internet.config(**keys)}[egress.secrets]\n'
        text += "".join(f"{name} = {json.dumps(path)}\n" for name, path in secrets.items())
        config = self.directory / "executor.toml"
        config.write_text(text)
        return check(target, "--config", config)


@pytest.fixture
def world(internet: Internet, policy: Path) -> World:
    return World(internet, policy)


def test_an_allowed_host_is_shown_with_its_rule_and_its_addresses(world: World) -> None:
    result = world.check(f"FILES.{SUFFIX}:443")
    assert result.exit_code == 0
    assert lines(result) == [
        f"allowed to tenant x, profile team, which extends base: files.{SUFFIX}:443",
        f"rule: files.{SUFFIX}:443 of network.default, for every session",
        f"resolver: {world.internet.resolver}",
        f"address: {world.internet.address}",
    ]


def test_a_host_to_ask_for_is_shown_with_its_rule(world: World) -> None:
    world.policy.write_text(f'default = "a"\n[profiles.a.network]\nask = ["*.{SUFFIX}"]\n[tenants.x]\n')
    result = world.check(f"files.{SUFFIX}:443")
    assert lines(result)[1] == f"rule: *.{SUFFIX} of network.ask, after an approval"


def test_headers_are_shown_and_never_their_secrets(world: World) -> None:
    result = world.check(f"api.{SUFFIX}:443")
    assert result.exit_code == 0
    assert lines(result)[1:3] == [
        f"rule: *.{SUFFIX} of network.allowed, for sessions that ask for it",
        "header: Authorization in GET, POST requests of /repos/*, with bot of egress.secrets",
    ]
    assert "ghp" not in result.output
    assert "header" not in world.check(f"api.{SUFFIX}:80").output, "without TLS nothing is set"


def test_a_secret_that_can_t_be_used_is_shown_with_the_reason(world: World) -> None:
    world.secret.chmod(0o644)
    assert "can be used by other users" in world.check(f"api.{SUFFIX}:443").output
    result = world.check(f"api.{SUFFIX}:443", secrets={"other": str(world.secret)})
    assert result.exit_code == EXIT_REFUSED
    said = f"network: asked for api.{SUFFIX} with Authorization of ${{bot}}, allowed is hosts whose secrets the"
    assert said in result.output and "egress.secrets of the daemon's configuration" in result.output


def test_an_address_that_is_refused_is_shown_with_the_reason(world: World) -> None:
    name = world.internet.name("files")
    world.internet.names.address(name, "10.11.12.13", "169.254.169.254", "fd00:ec2::254", world.internet.address)
    result = world.check(f"{name}:443")
    assert result.exit_code == 0, "one address may be connected to"
    assert sorted(lines(result)[3:]) == sorted(
        [
            f"address: {world.internet.address}",
            "address: 10.11.12.13, refused: it is a private address; egress.internal of the configuration could open it",
            "address: 169.254.169.254, refused: it is the address of a cloud's metadata service",
            "address: fd00:ec2::254, refused: it is the address of a cloud's metadata service",
        ]
    )
    world.internet.names.address(name, "10.11.12.13")
    assert world.check(f"{name}:443").exit_code == EXIT_REFUSED
    assert world.check(f"{name}:443", internal=["10.11.0.0/16"]).exit_code == 0


def test_an_own_address_is_opened_by_itself_only(world: World) -> None:
    name = world.internet.name("files")
    world.internet.names.address(name, world.internet.trap.own)
    closed = world.check(f"{name}:443", internal=["10.0.0.0/8"])
    assert closed.exit_code == EXIT_REFUSED
    assert "refused: it is an address of this host itself; egress.internal" in closed.output


def test_a_name_that_is_not_resolved_is_shown_with_the_reason(world: World) -> None:
    name = f"missing.{SUFFIX}"
    result = world.check(f"{name}:443")
    assert result.exit_code == EXIT_REFUSED
    assert lines(result)[-1] == f"resolver: {world.internet.resolver}; the name does not exist"
    empty = world.internet.name("files")
    world.internet.names.address(empty)
    assert lines(world.check(f"{empty}:443"))[-1].endswith("; the name has no addresses")


def test_names_may_be_left_to_the_upstream_proxy(world: World) -> None:
    keys = {"upstream_proxy": "http://proxy.example:3128", "upstream_resolves": True}
    result = world.check(f"missing.{SUFFIX}:443", **keys)
    assert result.exit_code == 0
    assert (
        lines(result)[-1]
        == "resolver: the upstream proxy http://proxy.example:3128, which is trusted with the addresses"
    )


def test_a_refusal_of_the_policy_names_its_line(world: World) -> None:
    result = world.check(f"x.git.{SUFFIX}:443")
    assert result.exit_code == EXIT_REFUSED
    assert lines(result)[:3] == [
        f"refused to tenant x, profile team, which extends base: x.git.{SUFFIX}:443",
        f"network: asked for x.git.{SUFFIX}:443, allowed is nothing of git.{SUFFIX} (DENIED)",
        f'{world.policy}:5: denied = ["git.{SUFFIX}"]    # network.denied of profile base, which team extends',
    ]
    other = world.check("pypi.org:443")
    assert other.exit_code == EXIT_REFUSED
    assert f"{world.policy}:4: allowed = " in other.output and "rule:" not in other.output


# -- without any configuration


def test_a_policy_alone_is_enough(policy: Path) -> None:
    result = check("localhost:443", "--policy", policy)
    assert result.exit_code == EXIT_REFUSED
    first, rule, resolver, *addresses = lines(result)
    assert first == "refused to tenant x, profile team, which extends base: localhost:443"
    assert (rule, resolver) == ("rule: localhost of network.default, for every session", "resolver: this host")
    assert addresses
    assert all(line.endswith(", refused: it is a loopback address") for line in addresses)


def test_a_tenant_without_hosts_has_none(policy: Path) -> None:
    result = check("localhost:443", "--policy", policy, tenant="nothing")
    assert result.exit_code == EXIT_REFUSED
    assert lines(result)[:2] == [
        "refused to tenant nothing, profile none: localhost:443",
        "network: asked for localhost:443, allowed is none (NOT_ALLOWED)",
    ]


def test_an_address_is_checked_as_one(policy: Path) -> None:
    result = check("10.1.2.3:8080", "--policy", policy)
    assert result.exit_code == EXIT_REFUSED
    assert lines(result)[1:] == [
        "rule: 10.1.2.3:8080 of network.allowed, for sessions that ask for it",
        "resolver: none: it is an address",
        "address: 10.1.2.3, refused: it is a private address; egress.internal of the configuration could open it",
    ]
    assert "allowed is localhost" in check("10.1.2.4:8080", "--policy", policy).output


def test_scripts_get_json(policy: Path) -> None:
    answer = json.loads(check("localhost:443", "--policy", policy, "--json").output)
    assert (answer["target"], answer["allowed"]) == ("localhost:443", False)
    assert answer["addresses"][0]["refused"] == "is a loopback address"
    refused = json.loads(check("pypi.org:1", "--policy", policy, "--json").output)
    assert refused["refusals"][0].startswith("network: asked for pypi.org:1, allowed is localhost")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("pypi.org", "has no port"),
        ("pypi.org:0", "has a port of 0"),
        ("https://pypi.org:443", "has a scheme or a path"),
        ("*.pypi.org:443", "has a * elsewhere"),
        ("127.1:443", "is an address in a spelling of its own"),
        ("0x7f000001:443", "is an address in a spelling of its own"),
    ],
)
def test_a_target_that_is_none_is_wrong_usage(policy: Path, target: str, said: str) -> None:
    result = check(target, "--policy", policy)
    assert result.exit_code == 2 and said in " ".join(result.output.split())
