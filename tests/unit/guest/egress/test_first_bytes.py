"""The first bytes in a tunnel: the same decision however they are cut, and none before they are complete."""

from __future__ import annotations

import contextlib
import ssl
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.egress import reasons
from executor_server.guest.egress.first_bytes import FirstBytes
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.protocols import Limits
from executor_server.guest.egress.refusals import Refusal
from tests.support.certificates import Authority
from tests.support.egress_engine import client_hello

HELLO = client_hello("a.example")
OTHER = client_hello("other.example")
NO_TLS_BELOW_1_2 = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1)


def _check(port: int = 443, host: str = "a.example") -> FirstBytes:
    return FirstBytes(Target(host, port), Limits().head_bytes)


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


def test_what_is_no_clienthello_passes_behind_one() -> None:
    check = _check()
    assert check.feed(HELLO + CHANGE_CIPHER + _record(bytes(1000), 23)) is True
    assert not check.done


# ----------------------------------------------------------------------------------------------------------------------
# A second ClientHello: the server may have asked for it, and then it serves the name of that one


def _record(content: bytes, kind: int = 22) -> bytes:
    return bytes([kind]) + b"\x03\x03" + len(content).to_bytes(2, "big") + content


def _cut(message: bytes, size: int) -> bytes:
    return b"".join(_record(message[at : at + size]) for at in range(0, len(message), size))


def _answer(curve: str = "", versions: tuple[ssl.TLSVersion, ssl.TLSVersion] | None = None) -> bytes:
    """Returns the answer of OpenSSL to HELLO."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory(prefix="hello-") as directory:
        pair = Authority(Path(directory)).server()
        context.load_cert_chain(pair.cert, pair.key)
    if versions is not None:
        context.minimum_version, context.maximum_version = versions
    if curve:
        context.set_ecdh_curve(curve)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(HELLO)
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    return outgoing.read()


RETRY, ACCEPTED = _answer("secp384r1"), _answer()
OLDER = _answer(versions=(ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2))
CHANGE_CIPHER = _record(b"\x01", 20)
SECOND, OTHER_SECOND = (client_hello(name, curve="secp384r1")[5:] for name in ("a.example", "other.example"))
BETWEEN = {
    "nothing": b"",
    "change-cipher": CHANGE_CIPHER,
    "early-data": _record(bytes(600), 23) + CHANGE_CIPHER + _record(b"", 22),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("record", [1, 7, 2**14])
@given(st.lists(st.integers(1, 400), max_size=30))
def test_a_second_clienthello_for_another_name_never_passes(between: bytes, record: int, pieces: list[int]) -> None:
    for message, is_ours in ((SECOND, True), (OTHER_SECOND, False)):
        check, at = _check(), 0
        assert check.feed(HELLO) is True
        check.feed_answer(RETRY)
        second = between + _cut(message, record)
        for size in [*pieces, len(second)]:
            piece = second[at : at + size]
            at += size
            if at < len(second):
                check.feed(piece)
            elif piece and is_ours:
                assert check.feed(piece) is True
            elif piece:
                assert _reason(check, piece) == reasons.SERVER_NAME


def test_two_clienthellos_in_one_record_are_both_read() -> None:
    assert _reason(_check(), _record(HELLO[5:] + OTHER_SECOND)) == reasons.SERVER_NAME
    assert _reason(_check(), _record(HELLO[5:] + OTHER_SECOND[:50]), _record(OTHER_SECOND[50:])) == reasons.SERVER_NAME
    assert _check().feed(_record(HELLO[5:] + SECOND)) is True


def test_a_second_clienthello_is_read_before_it_was_asked_for_and_with_other_records_between_its_parts() -> None:
    check = _check()
    assert check.feed(HELLO + _record(OTHER_SECOND[:9]) + CHANGE_CIPHER) is False
    assert _reason(check, _record(bytes(9), 23) + _record(OTHER_SECOND[9:])) == reasons.SERVER_NAME


def test_a_second_clienthello_without_end_is_refused_at_the_limit() -> None:
    check = _check()
    check.feed(HELLO)
    check.feed_answer(RETRY)
    assert _reason(check, *[_cut(OTHER_SECOND[:4] + bytes(4), 1)] * 400) == reasons.SERVER_NAME


@given(st.lists(st.integers(1, 90), max_size=40))
def test_the_servers_hello_ends_the_reading_and_its_request_to_retry_does_not(pieces: list[int]) -> None:
    for answer, ends in ((RETRY, False), (RETRY + CHANGE_CIPHER + ACCEPTED, True), (ACCEPTED, True), (OLDER, True)):
        check, at = _check(), 0
        assert check.feed(HELLO) is True
        for size in [*pieces, len(answer)]:
            check.feed_answer(answer[at : at + size])
            at += size
        assert check.done is ends


def test_what_the_server_says_before_a_clienthello_ends_nothing() -> None:
    check = _check(port=8443)
    check.feed_answer(ACCEPTED + b"220 ready")
    assert not check.done


@pytest.mark.parametrize("follows", [_record(b"\x10" + bytes(40)), b"GET / HTTP/1.1\r\n", b"\x16\x03\x03\xff\xff"])
def test_what_no_client_sends_before_the_servers_hello_is_refused(follows: bytes) -> None:
    assert _reason(_check(), HELLO + follows) == reasons.SERVER_NAME


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
