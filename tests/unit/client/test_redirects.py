"""Where a session is followed to, and where the token is not sent."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client import ConfigurationError, TlsConfig
from executor_client._core.endpoint import Endpoint, resolve
from executor_client._core.redirects import redirected

CA = TlsConfig(ca="/ca.pem")
PUBLIC = TlsConfig()


def front(address: str, tls: TlsConfig | None = None, domain: str | None = None) -> Endpoint:
    return resolve(address, "secret", tls, domain)


def refused(at: Endpoint, address: str) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        redirected(at, address)
    message = str(refusal.value)
    assert at.address in message and "fleet.proxy" in message and "secret" not in message
    return message


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="n-") as made:
        yield Path(made)


@pytest.fixture
def sock(directory: Path) -> Iterator[Path]:
    """A socket of this user."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "s"))
        yield directory / "s"


# ---------------------------------------------------------------------------------------------------------------------
# A front on this machine

LOCAL = (
    front("unix:/run/front.sock"),
    front("127.0.0.1:1"),
    front("localhost:1"),
    front("[::1]:1"),
    front("localhost:1", CA),
)


@pytest.mark.parametrize("at", LOCAL, ids=lambda at: at.address)
@pytest.mark.parametrize("address", ["127.0.0.1:50051", "127.9.9.9:1", "localhost:65535", "[::1]:50051"])
def test_a_front_on_this_machine_may_name_loopback_addresses(at: Endpoint, address: str) -> None:
    node = redirected(at, address)
    assert (node.address, node.token, node.tls, node.is_node) == (address, "secret", at.tls, True)


@pytest.mark.parametrize("at", LOCAL, ids=lambda at: at.address)
@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1:50051",
        "0.0.0.0:50051",
        "node.example.com:443",
        "localhost.evil.example:443",
        "127.0.0.1.evil.example:443",
        "127.1:50051",
        "2130706433:50051",
        "0x7f.0.0.1:50051",
        "[2001:db8::1]:50051",
        "[::]:50051",
    ],
)
def test_a_front_on_this_machine_may_name_no_other_machine(at: Endpoint, address: str) -> None:
    assert "this machine only" in refused(at, address)


def test_a_socket_of_this_user_is_followed_without_tls(sock: Path) -> None:
    for address in (f"unix:{sock}", f"unix://{sock}"):
        node = redirected(front("localhost:1", CA), address)
        assert (node.address, node.token, node.tls) == (address, "secret", None)


def test_a_socket_that_is_not_there_yet_is_judged_by_its_directory(directory: Path) -> None:
    assert redirected(LOCAL[0], f"unix:{directory}/later").address == f"unix:{directory}/later"
    assert "can't be examined" in refused(LOCAL[0], f"unix:{directory}/missing/s")


def test_a_socket_of_another_user_gets_no_token(sock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if sock.stat().st_uid == 0:
        assert redirected(LOCAL[0], f"unix:{sock}").token == "secret"
    else:
        assert "another user's" in refused(LOCAL[0], f"unix:{sock}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_socket_that_was_given_to_another_user_gets_no_token(sock: Path) -> None:
    os.chown(sock, 4711, -1)
    assert "another user's" in refused(LOCAL[0], f"unix:{sock}")
    os.chown(sock, 0, -1)
    os.chown(sock.parent, 4711, -1)
    assert "another user's" in refused(LOCAL[0], f"unix:{sock}")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_socket_that_others_can_replace_gets_no_token(sock: Path, mode: int) -> None:
    sock.parent.chmod(mode)
    assert "other users can replace" in refused(LOCAL[0], f"unix:{sock}")


@pytest.mark.parametrize(
    "address", ["unix-abstract:x", "unix-abstract:1", "unix:relative/s", "unix:s", "unix:", "unix:/a\nb", "unix://h/s"]
)
def test_other_names_of_sockets_are_no_addresses(address: str) -> None:
    refused(LOCAL[0], address)


# ---------------------------------------------------------------------------------------------------------------------
# A front with an authority of the user's own

ADDRESSES = [
    "node-1.pods.local:50051",
    "10.0.0.7:50051",
    "[2001:db8::7]:50051",
    "127.0.0.1:50051",
    "xn--bcher-kva.de:1",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_authority_of_ones_own_may_vouch_for_any_host(address: str) -> None:
    node = redirected(front("front.example.com:443", CA), address)
    assert (node.address, node.tls) == (address, CA)


@pytest.mark.parametrize("address", ["unix:/run/node.sock", "unix-abstract:x"])
def test_a_front_on_another_machine_may_name_no_socket(address: str) -> None:
    refused(front("front.example.com:443", CA), address)
    refused(front("front.example.com:443", PUBLIC), address)


@pytest.mark.parametrize("tls", [CA, PUBLIC], ids=["own authority", "public authorities"])
@pytest.mark.parametrize("domain", ["Nodes.Example.NET", ".nodes.example.net", "nodes.example.net."])
def test_a_given_domain_bounds_the_hosts(tls: TlsConfig, domain: str) -> None:
    at = front("front.example.com:443", tls, domain)
    for host in ("a.nodes.example.net", "b.a.nodes.example.net", "front.example.com"):
        assert redirected(at, f"{host}:50051").address == f"{host}:50051"
    for host in (
        "nodes.example.net",
        "other.example.net",
        "evilnodes.example.net",
        "a.nodes.example.net.evil.example",
        "node.example.com",
        "10.0.0.7",
        "[2001:db8::7]",
    ):
        assert "nodes.example.net" in refused(at, f"{host}:50051")


# ---------------------------------------------------------------------------------------------------------------------
# A front with a certificate of the public authorities


def test_public_authorities_vouch_for_the_fronts_own_host_and_those_below_it() -> None:
    at = front("Fleet.example.com.:443", PUBLIC)
    for host in ("fleet.example.com", "node-1.fleet.example.com", "a.b.fleet.example.com"):
        node = redirected(at, f"{host}:50051")
        assert (node.address, node.tls, node.token) == (f"{host}:50051", PUBLIC, "secret")
    for host in (
        "example.com",
        "node.example.com",
        "evil.example",
        "evilfleet.example.com",
        "fleet.example.com.evil.example",
        "127.0.0.1",
        "localhost",
        "10.0.0.7",
        "[::1]",
    ):
        assert "fleet.example.com" in refused(at, f"{host}:50051")


@pytest.mark.parametrize("address", ["front:443", "203.0.113.7:443", "[2001:db8::7]:443"])
def test_an_address_has_no_names_below_it(address: str) -> None:
    at = front(address, PUBLIC)
    own = address.rpartition(":")[0]
    assert redirected(at, f"{own}:50051").address == f"{own}:50051"
    for host in ("node.com", "com", "node.example.com", "203.0.113.8", "[2001:db8::8]", "1.203.0.113.7"):
        assert "fleet_domain=..." in refused(at, f"{host}:443")


def test_a_bundle_of_authorities_is_taken_for_the_public_ones(directory: Path) -> None:
    file = directory / "ca.pem"
    for count, is_followed in ((1, True), (16, True), (17, False)):
        file.write_text("-----BEGIN CERTIFICATE-----\n" * count)
        at = front("front.example.com:443", TlsConfig(ca=file))
        if is_followed:
            assert redirected(at, "node.example.net:1").is_node
        else:
            refused(at, "node.example.net:1")
            assert redirected(at, "node.front.example.com:1").is_node


def test_names_are_compared_without_case_and_without_the_last_dot() -> None:
    at = front("dns:///front.example.com:443", PUBLIC)
    assert redirected(at, "NODE.Front.Example.COM.:50051").address == "node.front.example.com:50051"
    assert redirected(at, "front.example.com:443").is_node


def test_a_domain_in_another_script_is_written_in_ascii() -> None:
    at = front("front.example.com:443", PUBLIC, "xn--bcher-kva.example")
    assert redirected(at, "a.xn--bcher-kva.example:1").address == "a.xn--bcher-kva.example:1"
    refused(at, "a.bücher.example:1")
    refused(at, "a.xn--bcher-kva\u3002example:1")
    for domain in ("bücher.example", ".", "a..b", "a b", "x" * 300):
        with pytest.raises(ConfigurationError, match="is no domain"):
            front("front.example.com:443", PUBLIC, domain)


# ---------------------------------------------------------------------------------------------------------------------
# Forms


@pytest.mark.parametrize(
    "address",
    [
        "node.example.com",
        "node.example.com:",
        "node.example.com:0",
        "node.example.com:65536",
        "node.example.com:000443",
        "node.example.com:-1",
        "node.example.com:443:443",
        "node.example.com:\uff14\uff14\uff13",
        ":443",
        ".:443",
        "..example.com:443",
        "-a.example.com:443",
        "a..example.com:443",
        "a@evil.example:443",
        "a,10.0.0.1:443",
        "a.example.com/x:443",
        "a.example.com :443",
        "a.example.com\n:443",
        "a.example.com:443\n",
        "dns:node.example.com:443",
        "dns:///node.example.com:443",
        "ipv4:10.0.0.1:443",
        "xds:///node.example.com:443",
        "https://node.example.com:443",
        "dns:443",
        "xds:443",
        "2001:db8::7:443",
        "[2001:db8::7]",
        "[fe80::1%eth0]:443",
        "[10.0.0.1]:443",
        "[node.example.com]:443",
        "[]:443",
        f"{'a' * 64}.example.com:443",
        f"{'a.' * 200}example.com:443",
        "a" * 100_000,
    ],
)
def test_what_is_no_address_is_refused_in_a_bounded_text(address: str) -> None:
    at = front("front.example.com:443", CA)
    assert len(refused(at, address)) < 2_000


def test_the_address_of_the_front_is_the_front() -> None:
    at = front("unix:/run/front.sock")
    assert redirected(at, "unix:/run/front.sock") is at


def test_fleet_domain_is_an_argument_or_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("example.com:1", "t", True).fleet_domain is None
    monkeypatch.setenv("EXECUTOR_FLEET_DOMAIN", "of.the.environment")
    assert resolve("example.com:1", "t", True).fleet_domain == "of.the.environment"
    assert resolve("example.com:1", "t", True, "given.example").fleet_domain == "given.example"


def test_connections_to_nodes_notice_soon_that_nobody_answers() -> None:
    at = front("localhost:1")
    of_front, of_node = dict(at.options), dict(redirected(at, "localhost:2").options)
    assert of_node["grpc.keepalive_time_ms"] + of_node["grpc.keepalive_timeout_ms"] <= 3000
    assert of_front["grpc.keepalive_time_ms"] == 330_000
