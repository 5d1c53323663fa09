"""Cutting and carrying the output: every byte is given out or counted, in order, and none costs more than its share."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.supervisor.output import STOP_FACTOR, LogRelay, OutputCutter, StreamDecoder
from executor_server.guest.wire.frames import CHUNK_BYTES, Kind
from executor_server.guest.wire.schema import Message

_STREAMS = st.sampled_from(["stdout", "stderr"])
_WRITES = st.lists(st.tuples(_STREAMS, st.binary(min_size=1, max_size=30)), max_size=30)


@given(_WRITES, st.integers(2, 200))
def test_head_omitted_and_tail_are_all_there_was(writes: list[tuple[str, bytes]], limit_bytes: int) -> None:
    cutter = OutputCutter(limit_bytes)
    head = [(stream, cutter.feed(stream, data)) for stream, data in writes]
    tail = cutter.drain()
    total = sum(len(data) for _, data in writes)
    given_bytes = sum(len(data) for _, data in head) + sum(len(data) for _, data in tail)
    assert cutter.total_bytes == total == given_bytes + cutter.omitted_bytes
    assert given_bytes == min(total, limit_bytes)
    everything = marked(writes)
    head_bytes, tail_bytes = marked(head), marked(tail)
    assert everything[: len(head_bytes)] == head_bytes
    assert tail_bytes == everything[len(everything) - len(tail_bytes) :]


def marked(writes: list[tuple[str, bytes]]) -> list[tuple[str, int]]:
    """Byte by byte, each with its stream."""
    return [(stream, byte) for stream, data in writes for byte in data]


def test_tiny_writes_of_alternating_streams_are_bounded_in_number() -> None:
    cutter = OutputCutter(10**6)
    cutter.feed("stdout", bytes(5 * 10**5))
    for number in range(40_000):
        cutter.feed("stdout" if number % 2 else "stderr", b"x")
    assert len(cutter._tail) <= 4096
    assert cutter.omitted_bytes + sum(len(data) for _, data in cutter.drain()) == 40_000


def test_tiny_writes_of_one_stream_are_joined() -> None:
    cutter = OutputCutter(10**6)
    cutter.feed("stdout", bytes(5 * 10**5))
    for _ in range(40_000):
        cutter.feed("stdout", b"x")
    assert (len(cutter._tail), cutter.omitted_bytes) == (10, 0)


def test_a_flood_is_told_from_long_output() -> None:
    cutter = OutputCutter(100)
    cutter.feed("stdout", bytes(100 * STOP_FACTOR))
    assert not cutter.flooded
    cutter.feed("stderr", b"x")
    assert cutter.flooded


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.lists(st.integers(0, 160), max_size=6))
def test_text_survives_any_split(text: str, cuts: list[int]) -> None:
    data = text.encode()
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    decoder, decoded, start = StreamDecoder(), "", 0
    for end in ends:
        decoded += decoder.decode("stdout", data[start:end])
        assert decoder.decode("stderr", b"") == ""
        start = end
    assert decoded == text
    assert decoder.reset() == [("stdout", ""), ("stderr", "")]


def test_half_a_character_at_the_end_becomes_its_replacement() -> None:
    decoder = StreamDecoder()
    assert decoder.decode("stdout", "ä".encode()[:1]) == ""
    assert decoder.reset() == [("stdout", "\ufffd")]


class Frames:
    """Takes what would go to the daemon."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any], bytes]] = []

    def send(self, message: Message, body: bytes = b"") -> None:
        self.sent.append((message.kind, message.head(), body))

    @property
    def texts(self) -> list[tuple[str, str]]:
        return [(head["stream"], body.decode()) for kind, head, body in self.sent if kind == Kind.LOG]


def relay(limit_bytes: int = 10**6, execution_id: str = "e") -> tuple[LogRelay, Frames]:
    frames = Frames()
    return LogRelay(frames, execution_id, limit_bytes), frames  # type: ignore[arg-type]


def test_a_character_split_over_pieces_streams_and_the_cut_comes_whole() -> None:
    logs, frames = relay(limit_bytes=100)
    data = "ä".encode()
    logs.add("stdout", b"x" * 49 + data[:1])  # the head ends within the character
    logs.add("stderr", b"y")
    logs.add("stdout", data[1:])
    logs.finish()
    assert "".join(text for stream, text in frames.texts if stream == "stdout") == "x" * 49 + "ä"


def test_the_tail_follows_a_note_of_what_was_left_out() -> None:
    logs, frames = relay(limit_bytes=10)
    logs.add("stdout", b"head.")
    logs.add("stderr", b"x" * 100)
    logs.add("stdout", b".tail")
    logs.finish()
    assert [(kind, head.get("omitted", 0)) for kind, head, _ in frames.sent] == [
        (Kind.LOG, 0),
        (Kind.OUTPUT_CUT, 100),
        (Kind.LOG, 0),
    ]
    assert frames.texts == [("stdout", "head."), ("stdout", ".tail")]
    assert (logs.total_bytes, logs.flooded) == (110, False)


def test_no_piece_is_larger_than_a_chunk() -> None:
    logs, frames = relay(limit_bytes=4 * CHUNK_BYTES)
    logs.add("stdout", "\U0001f600".encode() * (CHUNK_BYTES // 4 + 1000))
    logs.add("stdout", b"\xff" * CHUNK_BYTES)  # each byte becomes a character of three
    logs.finish()
    assert max(len(body) for _, _, body in frames.sent) <= CHUNK_BYTES


def test_what_the_prelude_prints_is_told_to_nobody() -> None:
    logs, frames = relay(execution_id="")
    logs.add("stdout", b"x" * 10)
    logs.finish()
    assert frames.sent == []
    assert logs.total_bytes == 10


def test_a_notice_is_a_line_of_its_own_behind_an_open_one() -> None:
    logs, frames = relay()
    logs.add("stderr", b"half a line")
    logs.flush()
    logs.say_notice("no way\n")
    logs.say_notice("none\n")
    assert [text for _, text in frames.texts] == ["half a line", "\nno way\n", "none\n"]
    assert logs.total_bytes == len("half a line"), "a notice is no output of the program"
