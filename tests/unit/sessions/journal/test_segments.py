"""Segments as files: whole records, removal, and no exception for the writer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.guest.wire.frames import CHUNK_BYTES, MAX_BODY_BYTES, Frame, Kind, encode_frame, encode_prefix
from executor_server.sessions.journal.records import SegmentError, snapshot_body
from executor_server.sessions.journal.segments import SEGMENT_BYTES, RecordKind, Segments
from tests.support.full_disk import fill_disk

RECORD = encode_frame(Kind.LOG, {"id": "e"}, b"text", seq=1)


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    segments = Segments(tmp_path / "segments")
    segments.create()
    segments.begin_segment(b"{}")
    yield segments
    segments.close()


def read(directory: Path) -> dict[int, list[tuple[int, bytes]]]:
    segments = Segments(directory)
    found = {each.number: [(record.kind, said(record)) for record in each.records] for each in segments.read()}
    segments.close()
    return found


def said(record: Frame) -> bytes:
    return snapshot_body(record) if record.kind == RecordKind.SNAPSHOT else record.body


def test_records_come_back_in_order_by_segment(segments: Segments, tmp_path: Path) -> None:
    segments.append(RECORD)
    segments.begin_segment(b"[]")
    body = bytes(CHUNK_BYTES)
    segments.append(encode_prefix(Kind.EXECUTE, {"id": "e"}, len(body), seq=1), body)
    assert read(tmp_path / "segments") == {
        1: [(RecordKind.SNAPSHOT, b"{}"), (Kind.LOG, b"text")],
        2: [(RecordKind.SNAPSHOT, b"[]"), (Kind.EXECUTE, body)],
    }


def test_a_segment_is_full_past_its_size(segments: Segments) -> None:
    for _ in range(SEGMENT_BYTES // CHUNK_BYTES):
        assert not segments.full
        segments.append(encode_frame(Kind.BLOB_CHUNK, {}, bytes(CHUNK_BYTES)))
    assert segments.full
    segments.begin_segment(b"{}")
    assert not segments.full


@pytest.mark.parametrize(
    "write",
    [
        lambda segments: segments.append(RECORD),
        lambda segments: segments.append(RECORD[:30], RECORD[30:]),
    ],
)
def test_a_full_disk_ends_it_and_removes_it(segments: Segments, tmp_path: Path, write: object) -> None:
    fill_disk(tmp_path / "segments")
    write(segments)  # type: ignore[operator]
    assert segments.broken
    assert not (tmp_path / "segments").exists()
    write(segments)  # type: ignore[operator]
    segments.begin_segment(b"{}")
    assert not (tmp_path / "segments").exists()


@pytest.mark.parametrize("step", ["create", "begin", "too large a snapshot"])
def test_segments_that_can_not_go_on_raise_nothing_and_are_removed(
    segments: Segments, tmp_path: Path, step: str
) -> None:
    if step == "create":
        segments = Segments(tmp_path / "no such" / "segments")
        segments.create()
    elif step == "begin":
        (tmp_path / "segments" / "2").write_bytes(b"")
        segments.begin_segment(b"{}")
    else:
        segments.begin_segment(bytes(MAX_BODY_BYTES + 1))
    assert segments.broken
    segments.append(RECORD)


def test_what_is_not_there_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="could not be written"):
        read(tmp_path / "nothing")
