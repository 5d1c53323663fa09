"""The tests' own internet does what tests of the network rely on, without any of ours between."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import ssl
import urllib.request
from contextlib import closing

import dns.resolver
import pytest

from tests.support.internet.world import (
    BAD_CERTIFICATES,
    HTTPS_PORT,
    OLD_TLS_PORT,
    RAW_PORT,
    RAW_TLS_PORT,
    SUFFIX,
    Internet,
    open_internet,
)
from tests.support.own_addresses import addresses_of
from tests.support.package_index.index import JSON_TYPE
from tests.support.package_index.wheels import make_wheel
from tests.support.polling import eventually

TIMEOUT_S = 20.0


def get(internet: Internet, name: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Returns the site's answer, over TLS that is verified."""
    with closing(http.client.HTTPSConnection(name, timeout=TIMEOUT_S, context=internet.context())) as connection:
        connection.sock = internet.context().wrap_socket(tcp(internet, HTTPS_PORT), server_hostname=name)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def tcp(internet: Internet, port: int) -> socket.socket:
    return socket.create_connection((internet.address, port), timeout=TIMEOUT_S)


def resolver(internet: Internet) -> dns.resolver.Resolver:
    own = dns.resolver.Resolver(configure=False)
    own.nameservers, own.lifetime, own.timeout = [internet.address], 1.0, 0.2
    return own


def test_each_site_answers_under_its_name_and_remembers_what_it_was_asked(internet: Internet) -> None:
    name = internet.name("api")
    status, body = get(internet, name, "/x?y=1", Authorization="Bearer mine")
    shown = json.loads(body)
    assert (status, shown["path"], ["Authorization", "Bearer mine"] in shown["headers"]) == (200, "/x?y=1", True)
    (seen,) = internet.sites.seen(name)
    assert (seen.scheme, seen.path, seen.values("authorization")) == ("https", "/x?y=1", ["Bearer mine"])
    assert get(internet, f"files.{SUFFIX}", "/hello.txt") == (200, b"hello from outside\n")
    assert b"egress_hello-1.0-py3-none-any.whl" in get(internet, f"pypi.{SUFFIX}", "/simple/egress-hello/")[1]
    assert b"<h1>Second page</h1>" in get(internet, f"www.{SUFFIX}", "/second")[1]
    refs = get(internet, f"git.{SUFFIX}", "/hello.git/info/refs?service=git-upload-pack")[1]
    assert b"refs/heads/main" in refs


def test_a_test_gets_a_package_index_of_its_own(internet: Internet) -> None:
    index = internet.package_index()
    index.add(make_wheel("Some_Thing", "2.0", requires=["other>=1"]), yanked="a mistake", requires_python=">=3.9")
    status, body = get(internet, index.host, "/simple/some-thing/", Accept=JSON_TYPE)
    (file,) = json.loads(body)["files"]
    assert (status, file["yanked"], file["requires-python"]) == (200, "a mistake", ">=3.9")
    path = file["url"].removeprefix(f"https://{index.files_host}")
    wheel = get(internet, index.files_host, path)[1]
    assert (hashlib.sha256(wheel).hexdigest(), len(wheel)) == (file["hashes"]["sha256"], file["size"])
    assert b"Requires-Dist: other>=1" in get(internet, index.files_host, f"{path}.metadata")[1]
    page = get(internet, index.host, "/simple/some-thing/")[1].decode()
    assert f"{path}#sha256={file['hashes']['sha256']}" in page and 'data-yanked="a mistake"' in page
    assert get(internet, f"pypi.{SUFFIX}", "/simple/some-thing/")[0] == 404
    assert index.requests[0] == "/simple/some-thing/"


@pytest.mark.parametrize("site", BAD_CERTIFICATES)
def test_a_bad_certificate_does_not_verify(internet: Internet, site: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        get(internet, internet.name(site), "/")


def test_the_old_server_speaks_nothing_that_a_client_of_today_takes(internet: Internet) -> None:
    with pytest.raises(ssl.SSLError), tcp(internet, OLD_TLS_PORT) as bare:
        internet.context().wrap_socket(bare, server_hostname=f"api.{SUFFIX}")


def test_odd_answers_arrive_as_they_are(internet: Internet) -> None:
    for path, shown in (("/two-lengths", b"Content-Length: 50"), ("/no-http", b"another protocol")):
        with tcp(internet, 80) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: odd.{SUFFIX}\r\n\r\n".encode())
            received = b""
            while more := connection.recv(65536):
                received += more
            assert shown in received
    with pytest.raises(http.client.IncompleteRead):
        get(internet, f"odd.{SUFFIX}", "/less-than-said")


def test_the_raw_server_counts_each_byte_in_both_directions(internet: Internet) -> None:
    with tcp(internet, RAW_PORT) as connection:
        peer = "{}:{}".format(*connection.getsockname())
        connection.sendall(b"source 100000\n")
        received = 0
        while data := connection.recv(65536):
            received += len(data)
    (seen,) = (each for each in internet.raw.conversations if each.peer == peer)
    assert eventually(lambda: seen.ended)
    assert (received, seen.sent_bytes, seen.received_bytes) == (100_000, 100_000, len("source 100000\n"))
    with internet.context().wrap_socket(tcp(internet, RAW_TLS_PORT), server_hostname=f"raw.{SUFFIX}") as connection:
        connection.sendall(b"echo\nwords")
        assert connection.recv(5) == b"words"


def test_names_are_what_a_test_says(internet: Internet) -> None:
    ask, name = resolver(internet), f"x.{SUFFIX}"
    internet.names.changing(name, ["192.0.2.1"], ["192.0.2.2", "192.0.2.3"])
    assert [sorted(map(str, ask.resolve(name))) for _ in range(3)][1:] == [["192.0.2.2", "192.0.2.3"]] * 2
    internet.names.address(name, *(f"192.0.2.{n}" for n in range(200)), "2001:db8::1")
    assert len(ask.resolve(name)) == 200  # over TCP: it does not fit a datagram
    assert [question.over_tcp for question in internet.names.questions[-2:]] == [False, True]
    assert [str(each) for each in ask.resolve(name, "AAAA")] == ["2001:db8::1"]
    internet.names.lie_first(name, "192.0.2.66", "192.0.2.1")
    assert [str(each) for each in ask.resolve(name)] == ["192.0.2.1"]
    internet.names.alias(name, f"api.{SUFFIX}", internet.address)
    assert [str(each) for each in ask.resolve(name)] == [internet.address]
    internet.names.forget(name)
    with pytest.raises(dns.resolver.NXDOMAIN):
        ask.resolve(name)
    internet.names.fail(name, "SERVFAIL")
    with pytest.raises(dns.resolver.NoNameservers):
        ask.resolve(name)
    for behave in (internet.names.hang, lambda name: internet.names.malformed(name, b"\x81\x80\0\1\0\1")):
        behave(name)
        with pytest.raises(dns.resolver.LifetimeTimeout):
            ask.resolve(name)


def test_the_traps_remember_who_came(internet: Internet) -> None:
    for address in (internet.trap.own, internet.trap.loopback):
        with urllib.request.urlopen(f"http://{address}/", timeout=TIMEOUT_S) as answer:
            assert answer.read() == b"trap"
        assert internet.trap.connections[-1] == f"{address}:80"
    internet.trap.connections.clear()


def test_several_worlds_stand_side_by_side_and_leave_no_address(internet: Internet) -> None:
    before = addresses_of(os.getpid())
    with open_internet() as other:
        assert other.address != internet.address
        assert addresses_of(os.getpid()) > before
        assert get(other, f"files.{SUFFIX}", "/hello.txt")[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):  # its authority is another
            connection = tcp(other, HTTPS_PORT)
            with connection:
                internet.context().wrap_socket(connection, server_hostname=f"files.{SUFFIX}")
    assert addresses_of(os.getpid()) == before
