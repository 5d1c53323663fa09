"""A request gets a secret by its method and path, where these can be read in one way only."""

from __future__ import annotations

from posixpath import normpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.egress.host_names import HostPattern
from executor_server.guest.egress.host_rules import SecretRule
from executor_server.network.proxy.request_secrets import Ambiguous, is_spelling_of, plain_path, secrets_for

HOST = HostPattern.parse("api.example.com")


def rule(
    *, methods: tuple[str, ...] = (), paths: tuple[str, ...] = (), header: str = "Authorization", value: str = "${a}"
) -> SecretRule:
    return SecretRule(HOST, header, value, methods, paths)


def covers(secret: SecretRule, target: str, method: str = "GET", headers: tuple[tuple[bytes, bytes], ...] = ()) -> bool:
    return bool(secrets_for([secret], method.encode(), target.encode(), headers))


@pytest.mark.parametrize(
    "target",
    [
        "/repos/acme/x",
        "/repos/acme/x/y/z",
        "/repos/acme/x?a=/../b",
        "/repos/acm%65/x",
        "/repos/acme/%E2%82%AC",
        "/status",
    ],
)
def test_path_below_a_pattern_gets_the_secret(target: str) -> None:
    assert covers(rule(paths=("/repos/acme/*", "/status")), target)


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/repos/acme",
        "/repos/acme/",
        "/repos/acmex/x",
        "/Repos/acme/x",
        "/x/repos/acme/x",
        "/status/",
        "/statu",
        "*",
    ],
)
def test_other_paths_go_out_without_it(target: str) -> None:
    assert not covers(rule(paths=("/repos/acme/*", "/status")), target)


@pytest.mark.parametrize(
    "target",
    [
        "/repos/acme/../other",
        "/repos/acme/./x",
        "/repos/acme/..",
        "/repos/acme/%2e%2e/other",
        "/repos/acme/.%2e/other",
        "/repos/acme/%252e%252e/other",
        "/repos/acme%2fx",
        "/repos/acme%2Fx",
        "/repos/acme%5cx",
        "/repos/acme\\x",
        "/repos/acme/..;/x",
        "/repos/acme/..%3b/x",
        "/repos/acme;a=b/x",
        "/repos/acme/x;y",
        "/repos/acme/x%3By",
        "/repos//acme/x",
        "//repos/acme/x",
        "/repos/acme//x",
        "/repos/acme/%",
        "/repos/acme/%2",
        "/repos/acme/%zz",
        "/repos/acme/%00",
        "/repos/acme/%0d%0a",
        "/repos/acme/%C0%AF",
        "/repos/acme/%ff",
        "/repos/acme/x#y",
        "/repos/acme/%E2%80%A8",
        "/repos/acme/..%20/x",
    ],
)
def test_path_that_can_be_read_in_two_ways_is_refused(target: str) -> None:
    with pytest.raises(Ambiguous):
        covers(rule(paths=("/repos/acme/*",)), target)


@pytest.mark.parametrize("target", ["/other;a=b/x", "/other//x", "/other/100%25", "/a%20b"])
def test_odd_path_that_no_reading_covers_goes_out_without_the_secret(target: str) -> None:
    assert not covers(rule(paths=("/repos/acme/*",)), target)


def test_path_does_not_matter_where_no_rule_has_one() -> None:
    assert covers(rule(), "/a/../b;c//%2f")


def test_method_must_be_listed_in_its_own_spelling() -> None:
    secret = rule(methods=("GET", "POST"))
    assert covers(secret, "/", "GET")
    assert covers(secret, "/", "POST")
    assert not covers(secret, "/", "DELETE")
    assert not covers(secret, "/", "get")
    assert not covers(secret, "/", "HEAD")


@pytest.mark.parametrize("name", [b"x-http-method-override", b"x_http_method_override", b"x-method-override"])
def test_header_that_changes_the_method_is_refused_where_the_method_matters(name: bytes) -> None:
    with pytest.raises(Ambiguous, match="override"):
        covers(rule(methods=("GET",)), "/", headers=((name, b"GET"),))
    assert covers(rule(), "/", headers=((name, b"PATCH"),))


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "CONNECT", "trace"])
def test_method_that_servers_answer_with_the_request_gets_no_secret(method: str) -> None:
    """A server echoes a TRACE by default, with every header: the program would read the secret in the answer."""
    assert not covers(rule(), "/", method)
    assert not covers(rule(methods=("GET", method)), "/", method)
    with pytest.raises(Ambiguous, match="override"):
        covers(rule(), "/", "POST", headers=((b"x-http-method-override", f" {method}".encode()),))


def test_header_that_changes_the_path_is_refused_where_the_path_matters() -> None:
    with pytest.raises(Ambiguous, match="x-original-url"):
        covers(rule(paths=("/a",)), "/a", headers=((b"x-original-url", b"/b"),))
    assert covers(rule(methods=("GET",)), "/a", headers=((b"x-original-url", b"/b"),))


def test_first_rule_that_covers_a_request_sets_the_header() -> None:
    rules = [
        rule(paths=("/a",), value="${one}"),
        rule(header="AUTHORIZATION", value="${two}"),
        rule(header="X-Key", value="${three}"),
    ]
    assert [each.value for each in secrets_for(rules, b"GET", b"/a", ())] == ["${one}", "${three}"]
    assert [each.value for each in secrets_for(rules, b"GET", b"/b", ())] == ["${two}", "${three}"]


@pytest.mark.parametrize("name", [b"X-Api-Key", b"x-api-key", b"X_API_KEY", b"x-Api_key"])
def test_every_spelling_of_a_header_that_a_gateway_folds_is_known(name: bytes) -> None:
    assert is_spelling_of(name, "X-Api-Key")
    assert not is_spelling_of(name + b"s", "X-Api-Key")


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "%2e", "%2f", "%25", "2e", ";", "\\", "%5c", ""]), max_size=6))
def test_path_that_is_accepted_means_the_same_after_more_decoding_and_normalising(pieces: list[str]) -> None:
    """Readings of real servers: decoded once or twice, dot segments resolved before or after, slashes of both kinds."""
    target = "/" + "/".join(pieces)
    try:
        path = plain_path(target.encode())
    except Ambiguous:
        return
    for reading in (target, unquote(target), unquote(unquote(target)), unquote(target).replace("\\", "/")):
        resolved = normpath(reading) if reading.strip("/") else "/"
        assert unquote(resolved).strip("/") == normpath(path).strip("/.")


@pytest.mark.parametrize("sign", ["%EF%BC%8E", "%EF%BC%8F", "%E2%80%A5", "%EF%BC%85", "%E2%84%80"])
def test_characters_that_servers_replace_make_a_path_ambiguous(sign: str) -> None:
    with pytest.raises(Ambiguous):
        plain_path(f"/repos/acme/{sign}{sign}/other".encode())
