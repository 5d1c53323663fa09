"""The head of a request: read in one way only, or refused. What else is refused: tests/support/egress_attempts.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.egress import reasons
from executor_server.guest.egress.head import Head, HeadReader, TunnelHeadReader
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.refusals import PHRASE_CHARACTERS, Refusal, response_to, shown

LIMIT_BYTES = 16384
LIMIT_LINES = 256


def _reader() -> HeadReader:
    return HeadReader(LIMIT_BYTES, LIMIT_LINES)


def _read(data: bytes) -> Head:
    head = _reader().feed(data)
    assert head is not None
    return head


def _refusal(data: bytes) -> Refusal:
    with pytest.raises(Refusal) as refused:
        reader = _reader()
        reader.feed(data)
        reader.feed(b"")
    return refused.value


@pytest.mark.parametrize(
    ("line", "host", "port", "path"),
    [
        (b"CONNECT pypi.org:443", "pypi.org", 443, b""),
        (b"CONNECT PyPI.org.:443", "pypi.org", 443, b""),
        (b"CONNECT [2001:db8::1]:443", "2001:db8::1", 443, b""),
        (b"GET http://pypi.org/simple/?q=1", "pypi.org", 80, b"/simple/?q=1"),
        (b"GET HTTP://PYPI.org:8080/", "pypi.org", 8080, b"/"),
        (b"GET http://pypi.org", "pypi.org", 80, b"/"),
        (b"DELETE http://pypi.org//x//http://other/", "pypi.org", 80, b"//x//http://other/"),
        (b"GET http://192.0.2.1/", "192.0.2.1", 80, b"/"),
    ],
)
def test_target_and_path_are_read(line: bytes, host: str, port: int, path: bytes) -> None:
    head = _read(line + b" HTTP/1.1\r\nHost: anything.at.all\r\n\r\n")
    assert (head.target.host, head.target.port, head.path) == (host, port, path)


def test_connect_of_http_1_0_needs_no_host() -> None:
    """Python's own http.client sends it so before 3.12."""
    assert _read(b"CONNECT pypi.org:443 HTTP/1.0\r\n\r\n").is_connect


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://a.org/",
        b"GET http://a.org/ HTTP/1.1\r\nHost: x\r\n",
        b" GET http://a.org/ HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_one_request_is_refused(head: bytes) -> None:
    assert _refusal(head).reason == reasons.BAD_REQUEST


def test_a_connect_without_a_body_may_say_so() -> None:
    assert _read(b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").is_connect


def test_head_of_exactly_the_limit_is_read_and_a_longer_one_refused() -> None:
    start, end = b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: x\r\nX: ", b"\r\n\r\n"
    padding = LIMIT_BYTES - len(start) - len(end)
    reader = _reader()
    data = start + b"x" * padding + end
    assert reader.wanted == len(data) + 1
    assert reader.feed(data) is not None
    reader = _reader()
    assert reader.feed(start + b"x" * (padding + len(end))) is None
    with pytest.raises(Refusal) as refused:
        reader.feed((b"x" * 2**20)[: reader.wanted])
    assert refused.value.reason == reasons.HEAD_TOO_LARGE


@given(st.lists(st.integers(1, 40), max_size=60))
def test_head_of_too_many_lines_is_refused_however_it_is_cut(pieces: list[int]) -> None:
    allowed = b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * (LIMIT_LINES - 3) + b"\r\n"
    for data, is_allowed in ((allowed, True), (allowed[:-2] + b"a:\r\n\r\n", False)):
        reader, rest, head = _reader(), data, None
        try:
            for size in [*pieces, len(data)]:
                if rest:
                    head, rest = reader.feed(rest[:size]), rest[size:]
        except Refusal as refusal:
            assert not is_allowed
            assert refusal.reason == reasons.HEAD_TOO_LARGE
        else:
            assert is_allowed and head is not None


def test_lines_behind_the_head_are_not_counted() -> None:
    head = _read(b"POST http://a.org/ HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n" + b"\n" * 1000)
    assert head.target.host == "a.org"


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_more_is_wanted_or_they_are_refused(data: bytes) -> None:
    reader = _reader()
    try:
        head = reader.feed(data) if data else None
    except Refusal as refusal:
        assert refusal.reason in reasons.REFUSALS
    else:
        assert head is None or head.target.host


def test_response_of_a_refusal_is_one_status_line_and_says_all_in_its_body() -> None:
    message = "a" * 190 + " évil\r\nX-Injected: 1 " + "b" * 300
    response = response_to(Refusal(reasons.NOT_ALLOWED, message))
    head, _, body = response.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert len(lines[0]) == len(b"HTTP/1.1 403 ") + PHRASE_CHARACTERS
    assert [line.partition(b":")[0] for line in lines[1:]] == [
        b"Content-Type",
        b"Content-Length",
        b"Connection",
        b"X-Egress-Reason",
    ]
    assert body.decode() == message + "\n"
    assert f"Content-Length: {len(body)}".encode() in lines
    assert response_to(Refusal(reasons.NOT_ALLOWED, message), with_body=False) == head + b"\r\n\r\n"


@given(st.text())
def test_shown_text_is_short_and_printable(text: str) -> None:
    assert len(shown(text)) <= 101
    assert shown(text).isprintable()


def test_a_request_in_a_tunnel_may_come_in_pieces() -> None:
    request = b"GET /path?x=1 HTTP/1.1\r\nHost: A.example\r\n\r\n"
    reader = TunnelHeadReader(Target("a.example", 80), LIMIT_BYTES, LIMIT_LINES)
    *pieces, head = [reader.feed(request[at : at + 1]) for at in range(len(request))]
    assert set(pieces) == {None}
    assert head is not None and (head.target, head.path) == (Target("a.example", 80), b"/path?x=1")


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 1000])
def test_a_head_in_a_tunnel_is_bounded_too(head: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        TunnelHeadReader(Target("a.example", 80), LIMIT_BYTES, LIMIT_LINES).feed(head)
    assert refused.value.reason == reasons.HEAD_TOO_LARGE
