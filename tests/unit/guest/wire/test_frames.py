"""The codec of frames: what goes in comes out, in any pieces; whatever else comes gives frames or a FrameError."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.guest.wire.frames import (
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    MAX_HEAD_BYTES,
    Fields,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    decode_head,
    encode_frame,
    encode_head,
)
from tests.support.rounds import rounds

KINDS = sorted(value for name, value in vars(Kind).items() if name.isupper())
HEADER_BYTES = 25

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters())
)
_HEADS = st.dictionaries(
    st.text(max_size=8), st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6), max_size=4
)
_FRAMES = st.tuples(
    st.sampled_from(KINDS), _HEADS, st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)
)

Fed = tuple[int, int, int, Any, bytes]


def fed(decoder: FrameDecoder, data: bytes, cuts: list[int]) -> list[Fed]:
    """The frames of a stream that comes in pieces. Each is looked at before the next piece, as a reader does."""
    taken: list[Fed] = []
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    start = 0
    for end in ends:
        taken += [(f.kind, f.seq, f.ack, f.head.values, f.body) for f in decoder.feed(data[start:end])]
        start = end
    return taken


@given(st.lists(_FRAMES, max_size=5), st.lists(st.integers(0, 10_000), max_size=8))
@settings(deadline=None)
def test_any_frames_come_back_from_any_pieces(frames: list[Any], cuts: list[int]) -> None:
    data = b"".join(encode_frame(kind, head, body, seq=seq, ack=ack) for kind, head, body, seq, ack in frames)
    assert fed(FrameDecoder(), data, cuts) == [(kind, seq, ack, head, body) for kind, head, body, seq, ack in frames]


@given(
    st.binary(max_size=400) | st.binary(max_size=100).map(lambda tail: struct.pack("!IB", len(tail) + 1, 66) + tail),
    st.lists(st.integers(0, 500), max_size=5),
)
@settings(deadline=None)
def test_any_bytes_give_frames_or_a_frame_error(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(FrameError):
        fed(FrameDecoder(), data, cuts)


@given(_FRAMES, st.integers(0, 300), st.integers(1, 255), st.lists(st.integers(0, 500), max_size=5))
@settings(deadline=None)
def test_a_frame_with_one_byte_changed_gives_frames_or_a_frame_error(
    frame: Any, at: int, flip: int, cuts: list[int]
) -> None:
    kind, head, body, seq, ack = frame
    data = bytearray(encode_frame(kind, head, body, seq=seq, ack=ack))
    data[at % len(data)] ^= flip
    with contextlib.suppress(FrameError):
        fed(FrameDecoder(), bytes(data) * 2, cuts)


def read_into_place(decoder: FrameDecoder, data: bytes, common_bytes: int, most_bytes: int) -> list[Fed]:
    """The frames of a stream that is read to where `space` says, at most so many bytes at a time."""
    taken: list[Fed] = []
    common = memoryview(bytearray(common_bytes))
    start = 0
    while start < len(data):
        space = decoder.space(common)
        size = min(len(space), most_bytes, len(data) - start)
        space[:size] = data[start : start + size]
        taken += [(f.kind, f.seq, f.ack, f.head.values, f.body) for f in decoder.filled(space, size)]
        start += size
    return taken


_LARGE = st.sampled_from([0, 1, 60_000, 70_000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 600_000])


@given(
    st.lists(st.tuples(_LARGE, st.integers(0, 255)), max_size=5),
    st.integers(1, 100_000),
    st.integers(1, 300_000),
)
@settings(deadline=None, max_examples=rounds(60, 25))
def test_any_frames_come_back_when_they_are_read_to_their_place(
    bodies: list[tuple[int, int]], common_bytes: int, most_bytes: int
) -> None:
    common_bytes, most_bytes = max(common_bytes, 300), max(most_bytes, 300)  # else it takes minutes
    sent = [(Kind.BLOB_DATA, seq, 0, {"blob": "b"}, bytes([fill]) * size) for seq, (size, fill) in enumerate(bodies)]
    data = b"".join(encode_frame(kind, head, body, seq=seq, ack=ack) for kind, seq, ack, head, body in sent)
    assert read_into_place(FrameDecoder(), data, common_bytes, most_bytes) == sent


def test_the_rest_of_a_large_frame_is_read_without_a_copy() -> None:
    decoder, common = FrameDecoder(), memoryview(bytearray(1000))
    data = encode_frame(Kind.BLOB_DATA, {"blob": "b"}, b"x" * CHUNK_BYTES)
    assert decoder.space(common) is common
    common[:] = data[:1000]
    assert decoder.filled(common, 1000) == []
    rest = decoder.space(common)
    assert len(rest) == len(data) - 1000
    rest[:] = data[1000:]
    (frame,) = decoder.filled(rest, len(rest))
    assert frame.raw.obj is rest.obj
    assert decoder.space(common) is common


def test_a_length_that_nothing_follows_takes_no_more_memory_than_a_piece() -> None:
    decoders = [FrameDecoder() for _ in range(10)]
    tracemalloc.start()
    try:
        for decoder in decoders:
            decoder.feed(struct.pack("!IB", MAX_FRAME_BYTES, Kind.LOG))
        large, _ = tracemalloc.get_traced_memory()
        for decoder in decoders:
            decoder.filled(decoder.space(memoryview(bytearray(8))), 0)
    finally:
        tracemalloc.stop()
    assert large < 10 * 10_000


def test_a_frame_that_is_wrong_ends_the_decoder_that_read_it_to_its_place() -> None:
    decoder, common = FrameDecoder(), memoryview(bytearray(1000))
    data = raw(CHUNK_BYTES, kind=255) + bytes(CHUNK_BYTES)
    common[:] = data[:1000]
    decoder.filled(common, 1000)
    rest = decoder.space(common)
    with pytest.raises(FrameError):
        decoder.filled(rest, len(rest))
    with pytest.raises(AssertionError):
        decoder.feed(b"x")


def raw(length: int, kind: int = Kind.LOG, head_bytes: int = 2, rest: bytes = b"{}") -> bytes:
    return struct.pack("!IBQQI", length, kind, 1, 0, head_bytes) + rest


BAD_FRAMES = {
    "no room for its header": raw(20),
    "larger than allowed": raw(MAX_FRAME_BYTES + 1),
    "the largest number": b"\xff" * 4,
    "of kind 0": raw(23, kind=0),
    "of kind 255": raw(23, kind=255),
    "a head past the end": raw(23, head_bytes=3),
    "a head of 4 GB": raw(23, head_bytes=2**32 - 1),
    "a head over its limit": raw(
        21 + MAX_HEAD_BYTES + 1, head_bytes=MAX_HEAD_BYTES + 1, rest=b" " * (MAX_HEAD_BYTES + 1)
    ),
    "an empty head": raw(21, head_bytes=0, rest=b""),
    "a head that is a list": raw(23, rest=b"[]"),
    "a head that is not JSON": raw(23, rest=b"{{"),
    "a head that is not UTF-8": raw(23, rest=b"\xff\xff"),
    "a head with a tail": raw(25, head_bytes=4, rest=b"{}{}"),
    "a head with NaN": raw(21 + 9, head_bytes=9, rest=b'{"a":NaN}'),
    "a deep head": raw(21 + 60_000, head_bytes=60_000, rest=b'{"a":' + b"[" * 59_995),
    "a head with an endless number": raw(21 + 50_006, head_bytes=50_006, rest=b'{"a":' + b"9" * 50_000 + b"}"),
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_bad_frame_is_an_error_whole_and_in_pieces(what: str) -> None:
    data = BAD_FRAMES[what]
    for cuts in ([], [2, 10], list(range(1, 26))):
        with pytest.raises(FrameError):
            fed(FrameDecoder(), data, cuts)


def test_a_failed_decoder_takes_nothing_more() -> None:
    decoder = FrameDecoder()
    with pytest.raises(FrameError):
        decoder.feed(b"\xff" * 4)
    with pytest.raises(AssertionError):
        decoder.feed(b"")


def test_the_largest_frame_passes_and_no_larger_one_is_made() -> None:
    room = MAX_FRAME_BYTES - (HEADER_BYTES - 4) - 2
    [frame] = FrameDecoder().feed(encode_frame(Kind.LOG, {}, bytes(room)))
    assert len(frame.body) == room
    with pytest.raises(AssertionError):
        encode_frame(Kind.LOG, {}, bytes(room + 1))
    with pytest.raises(AssertionError):
        encode_head({"a": "x" * MAX_HEAD_BYTES})


@pytest.mark.parametrize("piece_bytes", [2, 1000])
def test_an_incomplete_frame_costs_about_its_size_whatever_its_pieces(piece_bytes: int) -> None:
    """A guest that writes two bytes at a time must not make the daemon keep an object for each."""
    data = encode_frame(Kind.LOG, {}, bytes(100_000))[:-1]
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        for start in range(0, len(data), piece_bytes):
            decoder.feed(data[start : start + piece_bytes])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * len(data)


def test_lone_surrogates_survive_in_a_head() -> None:
    assert decode_head(encode_head({"a": "\ud800"})).text("a") == "\ud800"


# -- fields

FIELDS = Fields(json.loads(json.dumps({
    "text": "abc", "int": 7, "negative": -1, "huge": 10**30, "float": 1.5, "true": True, "none": None,
    "list": ["a"], "numbers": [1], "objects": [{"a": 1}], "object": {"a": 1}, "long": "x" * 100,
})) | {"nan": float("nan"), "inf": float("inf"), "huge_float": 1e300})  # fmt: skip

ALL = set(FIELDS.values) | {"missing"}
# The values that each accessor takes; it refuses everything else.
ACCESSORS: dict[str, tuple[Callable[[str], Any], set[str]]] = {
    "text": (lambda name: FIELDS.text(name, 10), {"text"}),
    "integer": (FIELDS.integer, {"int"}),
    "integer in a range": (lambda name: FIELDS.integer(name, -5, 6), {"negative"}),
    "number": (FIELDS.number, {"int", "float"}),
    "negative number": (lambda name: FIELDS.number(name, -5.0, 1.0), {"negative"}),
    "boolean": (FIELDS.boolean, {"true"}),
    "texts": (lambda name: FIELDS.texts(name, 1, 5), {"list"}),
    "no texts": (lambda name: FIELDS.texts(name, 0), set()),
    "objects": (lambda name: FIELDS.objects(name, 1), {"objects"}),
    "object": (FIELDS.object, {"object", "none", "missing"}),
}


@pytest.mark.parametrize("accessor", ACCESSORS)
def test_an_accessor_takes_its_type_and_range_and_nothing_else(accessor: str) -> None:
    read, accepted = ACCESSORS[accessor]
    for name in accepted:
        read(name)
    for name in ALL - accepted:
        with pytest.raises(FrameError, match=name):
            read(name)


def test_defaults_stand_in_for_what_is_missing_only() -> None:
    assert FIELDS.boolean("missing", default=False) is False
    assert FIELDS.integer("missing", default=3) == 3
    assert FIELDS.text("missing", default="") == ""
    with pytest.raises(FrameError):
        FIELDS.integer("none", default=3)


def test_a_frame_is_kept_only_as_a_copy() -> None:
    """The bytes below a view may be overwritten by the next read."""
    buffer = bytearray(encode_frame(Kind.LOG, {}, b"text"))
    [frame] = FrameDecoder().feed(memoryview(buffer))
    kept: Frame = frame
    body = kept.body
    buffer[:] = bytes(len(buffer))
    assert body == kept.body == b"text"
