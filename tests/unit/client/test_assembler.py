"""The assembler accepts a limited total of one execution."""

from __future__ import annotations

import io
from collections.abc import Iterator

import PIL.Image
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from executor_api.v1 import types_pb2 as pb
from executor_client._core import assembler, blobs, limits
from executor_client._core.assembler import Assembler, ToolRequest
from executor_client.errors import ProtocolError
from tests.support.fake_daemon import blob, chunks, log, result


def image(size: tuple[int, int] = (4, 4)) -> pb.Event:
    file = io.BytesIO()
    PIL.Image.new("1", size).save(file, "PNG")
    return pb.Event(
        image=pb.ImageEvent(data=pb.Payload(inline=file.getvalue()), mime_type="image/png", source="figure")
    )


def feed(*events: pb.Event) -> Assembler:
    assembler = Assembler("id")
    for number, event in enumerate(events, 1):
        event.number = number
        assembler.feed(event)
    return assembler


def test_images_are_kept_in_order_and_bad_ones_say_why() -> None:
    bad = pb.Event(image=pb.ImageEvent(data=pb.Payload(inline=b"?"), mime_type="image/png"))
    got = feed(image(), bad, image((5, 5)), result()).result
    assert got is not None
    assert [each.size for each in got.images] == [(4, 4), (5, 5)]
    assert [bool(each.problem) for each in got.image_entries] == [False, True, False]


def test_all_images_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "IMAGES_PIXELS_MAX", 40)
    got = feed(image(), image(), image(), result()).result
    assert got is not None
    assert [bool(each.problem) for each in got.image_entries] == [False, False, True]


def endless(kind: str) -> Iterator[pb.Event]:
    while True:
        if kind == "log":
            yield log("x" * 100)
        if kind == "image":
            yield image()
        if kind == "blob":
            yield from chunks("b", b"x" * 100)


@pytest.mark.parametrize(
    ("module", "limit", "kind"),
    [
        (assembler, "LOG_CHARS_MAX", "log"),
        (assembler, "IMAGES_MAX", "image"),
        (assembler, "MESSAGES_MAX", "log"),
        (assembler, "EXECUTION_BLOBS_BYTES_MAX", "blob"),
    ],
)
def test_endless_stream_ends_at_a_limit(monkeypatch: pytest.MonkeyPatch, module: object, limit: str, kind: str) -> None:
    monkeypatch.setattr(module, limit, 10)
    with pytest.raises(ProtocolError, match="more than 10"):
        feed(*(event for event, _ in zip(endless(kind), range(20), strict=False)))


def calls_with(argument: bytes, count: int) -> Iterator[pb.Event]:
    for number in range(count):
        arguments = pb.Value(packed=blob(f"b{number}", len(argument)))
        yield from chunks(f"b{number}", argument)
        yield pb.Event(tool_call=pb.ToolCallEvent(call_id=f"c{number}", name="tool", arguments=arguments))


def test_arguments_count_as_long_as_they_wait_for_their_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "EXECUTION_BLOBS_BYTES_MAX", 100)
    fed_one = Assembler("id")
    for number, event in enumerate(calls_with(b"x" * 60, count=5), 1):
        event.number = number
        fed = fed_one.feed(event)
        if isinstance(fed, ToolRequest):
            assert fed.take_arguments() == b"x" * 60
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        feed(*calls_with(b"x" * 60, count=2))


def test_an_image_tells_its_place_in_the_logs() -> None:
    cut = pb.Event(output_cut=pb.OutputCutEvent(omitted_bytes=7))
    ended = feed(log("before"), image(), cut, log("after"), image(), result()).result
    assert ended is not None
    places = [each.log_offset for each in ended.image_entries]
    assert [ended.logs[:place] for place in places] == ["before", ended.logs]


def test_nothing_is_accepted_after_the_result() -> None:
    with pytest.raises(ProtocolError, match="after the result"):
        feed(result(), log("late"))


def test_blob_is_handed_out_once() -> None:
    one = pb.Event(image=pb.ImageEvent(data=blob("b", 1), mime_type="image/png"))
    two = pb.Event(image=pb.ImageEvent(data=blob("b", 1), mime_type="image/png"))
    with pytest.raises(ProtocolError, match="arrived with 0"):
        feed(*chunks("b", b"x"), one, two)


def test_pieces_of_two_blobs_may_alternate() -> None:
    first, second = chunks("a", b"1234", 2), chunks("b", b"5678", 2)
    incoming = blobs.IncomingBlobs(bytes_max=100, open_max=2)
    for event in (first[0], second[0], first[1], second[1]):
        incoming.add(event.blob_chunk)
    assert (incoming.take(blob("b", 4)), incoming.take(blob("a", 4))) == (b"5678", b"1234")


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_whatever_parses_as_events_is_taken_or_refused(raw: list[bytes]) -> None:
    assembler = Assembler("id")
    for each in raw:
        try:
            event = pb.Event.FromString(each)
        except DecodeError:
            continue
        event.number = assembler.last_number + 1
        try:
            assembler.feed(event)
        except ProtocolError:
            return


def test_image_limit_is_below_the_librarys_own() -> None:
    """Pillow warns, and later refuses, above its own limit: ours must speak first."""
    assert PIL.Image.MAX_IMAGE_PIXELS is not None
    assert limits.IMAGE_PIXELS_MAX < PIL.Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(
    "packed",
    [b"", b"[]", b"{}", b'{"text/html": 1}', b'{"no type": "x"}', b'{"text/html": "x"', b"\xff", b'{"a/b": "\\ud8"}'],
)
def test_display_data_that_a_program_has_broken_says_why_and_fails_nothing(packed: bytes) -> None:
    shown = pb.Event(display=pb.DisplayEvent(data=pb.Payload(inline=b'{"text/html": "<b>"}')))
    broken = pb.Event(display=pb.DisplayEvent(data=pb.Payload(inline=packed)))
    got = feed(log("abc"), shown, broken, result()).result
    assert got is not None
    assert [(each.data, each.log_offset) for each in got.displays] == [({"text/html": "<b>"}, 3), ({}, 3)]
    assert got.displays[1].problem
