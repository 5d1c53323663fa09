"""The text form of a byte stream: right bytes or none, whatever became of it on its way."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.guest.wire.lines import (
    LINE_BYTES,
    PREAMBLE_BYTES,
    LineDecoder,
    LineError,
    encode_lines,
    start_line,
)

NONCE = "4f1d"
MiB = 2**20


def decoded(stream: bytes, nonce: str | None = None) -> bytes:
    return b"".join(LineDecoder(nonce).feed(stream))


def lines_of(*pieces: bytes) -> list[bytes]:
    """One line for each piece."""
    lines = []
    seq = 1
    for piece in pieces:
        line, seq = encode_lines(piece, seq)
        lines.append(line)
    return lines


def right_bytes_or_error(stream: bytes, whole: bytes) -> None:
    """In whatever pieces it comes, what is decoded of a damaged stream is a beginning of what was sent."""
    for step in (1, 7, 1000):
        decoder = LineDecoder()
        got = b""
        try:
            for offset in range(0, len(stream), step):
                got += b"".join(decoder.feed(stream[offset : offset + step]))
        except LineError:
            pass
        assert whole.startswith(got)


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(1, 10**9), st.integers(1, 64))
def test_bytes_come_back_in_pieces_of_any_size(data: bytes, first_seq: int, step: int) -> None:
    stream, _ = encode_lines(data, 1)
    assert re.fullmatch(rb"(\d+ [0-9a-f]{8} [A-Za-z0-9+/]+=*\n)*", stream)
    decoder = LineDecoder(NONCE)
    whole = b"Welcome to this machine!\r\n$ " + start_line(NONCE) + stream
    pieces = [decoder.feed(whole[offset : offset + step]) for offset in range(0, len(whole), step)]
    assert b"".join(b"".join(piece) for piece in pieces) == data
    _, next_seq = encode_lines(data, first_seq)
    assert next_seq == first_seq + (len(data) > 0)


def test_large_data_becomes_lines_of_bounded_length() -> None:
    data = bytes(range(256)) * 1024  # 256 KiB
    stream, next_seq = encode_lines(memoryview(data), 1)
    assert next_seq == 1 + -(-len(data) // LINE_BYTES)
    assert max(len(line) for line in stream.split(b"\n")) < 66_000
    assert decoded(stream) == data


@pytest.mark.parametrize("damage", ["change", "delete", "duplicate", "insert"])
def test_one_damaged_byte_never_gives_wrong_bytes(damage: str) -> None:
    pieces = [b"first line", b"\x00\xff" * 9, b"x", b"and the last"]
    stream, whole = b"".join(lines_of(*pieces)), b"".join(pieces)
    for at in range(len(stream)):
        before, byte, after = stream[:at], stream[at], stream[at + 1 :]
        if damage == "delete":
            right_bytes_or_error(before + after, whole)
        elif damage == "duplicate":
            right_bytes_or_error(before + bytes([byte, byte]) + after, whole)
        else:
            for other in (byte ^ 1, byte ^ 0x20, byte ^ 0x80, *b"\n\r 0=A9"):
                kept = bytes([byte]) if damage == "insert" else b""
                right_bytes_or_error(before + bytes([other]) + kept + after, whole)


@settings(deadline=None)
@given(st.permutations(range(5)), st.integers(1, 5))
def test_reordered_and_repeated_lines_never_give_wrong_bytes(order: list[int], kept: int) -> None:
    pieces = [b"%d" % number * 3 for number in range(5)]
    lines = lines_of(*pieces)
    right_bytes_or_error(b"".join(lines[number] for number in order[:kept]), b"".join(pieces))


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=20))
def test_a_line_that_comes_again_is_ignored(repeats: list[int]) -> None:
    """So what could not be known to have been sent may be sent again."""
    lines = lines_of(*(b"%d" % number for number in range(5)))
    stream = list(lines)
    for number in repeats:
        stream.insert(stream.index(lines[number]) + 1, lines[number])
    assert decoded(b"".join(stream) + lines[0] + lines[4]) == b"01234"


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_or_hold_nothing(garbage: bytes) -> None:
    right_bytes_or_error(garbage, b"")
    right_bytes_or_error(b"".join(lines_of(b"data")) + garbage, b"data")


def test_blank_lines_and_carriage_returns_are_tolerated() -> None:
    stream = b"\n\r\n" + b"\r\n\n".join(line[:-1] for line in lines_of(b"a", b"b", b"c")) + b"\r\n\r\n"
    assert decoded(stream) == b"abc"


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\v", "\f", "\x1c", " ", "\t"])
def test_only_a_line_feed_ends_a_line(separator: str) -> None:
    first, second = lines_of(b"a", b"b")
    with pytest.raises(LineError):
        decoded(first[:-1] + separator.encode() + second)
    with pytest.raises(LineError):
        decoded(first + separator.encode() + second)


@pytest.mark.parametrize(
    "line",
    [
        b"1 00000000 YQ==",  # wrong CRC
        b"1 YQ==",
        b"01 1cd9f6d7 YQ==",
        b"+1 00000000 YQ==",
        b"-1 00000000 YQ==",
        b"1_0 00000000 YQ==",
        b"0 00000000 YQ==",
        b"9999999999999999 00000000 YQ==",
        "\u0661 00000000 YQ==".encode(),  # a digit, but not one of ours
        b"1 00000000 ",
        b"1 00000000 YQ",
        b"1 00000000 Y!Q==",
        b"1 00000000 YR==",  # bits that no byte has
        b"executor-relay/1 4f1d",
        b"Connection reset by peer",
    ],
)
def test_what_is_no_line_is_refused(line: bytes) -> None:
    with pytest.raises(LineError):
        decoded(line + b"\n")


def test_a_decoder_that_refused_a_line_takes_nothing_more() -> None:
    decoder = LineDecoder()
    with pytest.raises(LineError):
        decoder.feed(b"garbage\n")
    with pytest.raises(LineError):
        decoder.feed(lines_of(b"a")[0])


def test_a_line_without_end_costs_no_memory() -> None:
    """10 GB in one line would be a way to fill a daemon's memory."""
    decoder = LineDecoder()
    tracemalloc.start()
    try:
        with pytest.raises(LineError):
            for _ in range(10 * 1024):
                decoder.feed(b"A" * 4096)
        with pytest.raises(LineError):
            LineDecoder().feed(b"A" * MiB)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 * MiB


def test_a_line_that_is_too_long_is_refused_though_it_ends() -> None:
    with pytest.raises(LineError, match="a line of more than"):
        decoded(b"1 00000000 " + b"A" * 70_000 + b"\n")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_what_comes_before_the_start_is_bounded(end: bytes) -> None:
    decoder = LineDecoder(NONCE)
    with pytest.raises(LineError, match="no start line"):
        for _ in range(PREAMBLE_BYTES // 64 + 1):
            decoder.feed(b"." * 64 + end)


def test_only_the_line_with_the_right_nonce_is_the_start() -> None:
    """The output of an earlier relay of the same command line does not belong to this connection."""
    decoder = LineDecoder(NONCE)
    assert decoder.feed(start_line("0000") + lines_of(b"old")[0]) == []
    assert decoder.feed(b"x" + start_line(NONCE)[1:]) == []
    assert not decoder.started
    assert decoder.feed(start_line(NONCE) + lines_of(b"new")[0]) == [b"new"]
    assert decoder.started
