"""The first bytes in a tunnel: the same decision however they are cut, and none before they are complete."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.egress import reasons
from executor_server.guest.egress.first_bytes import FirstBytes, check_for
from executor_server.guest.egress.names import Target
from executor_server.guest.egress.protocols import Limits
from executor_server.guest.egress.refusals import Refusal
from tests.support.egress_engine import client_hello

HELLO = client_hello("a.example")
OTHER = client_hello("other.example")
NO_TLS_BELOW_1_2 = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1)


def _check(port: int = 443, host: str = "a.example") -> FirstBytes:
    return check_for(Target(host, port), Limits())


def _reason(check: FirstBytes, *pieces: bytes) -> str:
    with pytest.raises(Refusal) as refused:
        for piece in pieces:
            check.feed(piece)
    return refused.value.reason


@given(st.lists(st.integers(1, 200), max_size=30))
def test_clienthello_is_decided_on_when_it_is_complete_and_not_before(pieces: list[int]) -> None:
    for hello, is_ours in ((HELLO, True), (OTHER, False)):
        check, at = _check(), 0
        for size in [*pieces, len(hello)]:
            piece = hello[at : at + size]
            at += size
            if at < len(hello):
                assert check.feed(piece) is False
            elif piece and is_ours:
                assert check.feed(piece) is True
            elif piece:
                assert _reason(check, piece) == reasons.SERVER_NAME


def test_what_follows_the_clienthello_is_not_looked_at() -> None:
    assert _check().feed(HELLO + b"\x14\x03\x03\x00\x01\x01" + bytes(1000)) is True


@given(st.binary(min_size=1, max_size=200), st.integers(0, len(HELLO) - 1))
def test_no_change_of_a_clienthello_for_another_name_makes_it_pass(change: bytes, at: int) -> None:
    changed = (OTHER[:at] + change + OTHER[at + len(change) :])[: len(OTHER)]
    if b"a.example" not in changed:
        try:
            assert _check().feed(changed) is False
        except Refusal as refusal:
            assert refusal.reason in {reasons.SERVER_NAME, reasons.OLD_TLS}


def test_tls_below_1_2_is_refused_with_its_alert() -> None:
    with pytest.raises(Refusal) as refused:
        _check().feed(client_hello("a.example", versions=NO_TLS_BELOW_1_2))
    assert refused.value.reason == reasons.OLD_TLS
    assert refused.value.parting[:1] == b"\x15"


def test_tls_1_2_alone_passes() -> None:
    versions = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2)
    assert _check().feed(client_hello("a.example", versions=versions)) is True


def test_refused_server_name_is_answered_with_an_alert_of_tls() -> None:
    with pytest.raises(Refusal) as refused:
        _check().feed(OTHER)
    assert refused.value.parting == b"\x15\x03\x03\x00\x02\x02\x70"  # fatal, unrecognized_name


def test_clienthello_without_end_is_refused_at_the_limit() -> None:
    # A handshake record of 16 KiB that begins a message of 128 KiB.
    endless = b"\x16\x03\x01\x40\x00\x01\x01\xff\xff" + bytes(16384 - 4)
    assert _reason(_check(), endless, endless) == reasons.SERVER_NAME


def test_address_needs_no_server_name_and_takes_no_other() -> None:
    assert _check(host="192.0.2.1").feed(client_hello(None)) is True
    assert _reason(_check(host="192.0.2.1"), HELLO) == reasons.SERVER_NAME


@given(st.binary(min_size=1, max_size=100))
def test_other_ports_pass_whatever_is_no_clienthello(data: bytes) -> None:
    check = _check(port=22)
    assert not check.required
    if not data.startswith(b"\x16"):
        assert check.feed(data) is True


def test_other_ports_do_not_pass_a_clienthello_for_another_name() -> None:
    assert _check(port=8443).feed(HELLO) is True
    assert _reason(_check(port=8443), OTHER[:1], OTHER[1:]) == reasons.SERVER_NAME
