"""The tape as files: whole records, segments that go, and no exception for whoever writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.guest.frames import CHUNK_BYTES, MAX_BODY_BYTES, Frame, Kind, encode_frame, encode_prefix
from executor_server.journal_records import snapshot_body
from executor_server.tape import SEGMENT_BYTES, Mark, Tape, TapeError

RECORD = encode_frame(Kind.LOG, {"id": "e"}, b"text", seq=1)


@pytest.fixture
def tape(tmp_path: Path) -> Iterator[Tape]:
    tape = Tape(tmp_path / "tape")
    tape.create()
    tape.begin_segment(b"{}")
    yield tape
    tape.close()


def read(directory: Path) -> dict[int, list[tuple[int, bytes]]]:
    tape = Tape(directory)
    found = {each.number: [(record.kind, said(record)) for record in each.records] for each in tape.read()}
    tape.close()
    return found


def said(record: Frame) -> bytes:
    return snapshot_body(record) if record.kind == Mark.SNAPSHOT else record.body


def test_records_come_back_in_order_by_segment(tape: Tape, tmp_path: Path) -> None:
    tape.append(RECORD)
    tape.begin_segment(b"[]")
    body = bytes(CHUNK_BYTES)
    tape.append(encode_prefix(Kind.EXECUTE, {"id": "e"}, len(body), seq=1), body)
    assert read(tmp_path / "tape") == {
        1: [(Mark.SNAPSHOT, b"{}"), (Kind.LOG, b"text")],
        2: [(Mark.SNAPSHOT, b"[]"), (Kind.EXECUTE, body)],
    }


def test_it_is_nobody_else_s(tape: Tape, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "tape").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "tape" / "1").stat().st_mode) == 0o600


def test_a_segment_is_full_past_its_size(tape: Tape) -> None:
    for _ in range(SEGMENT_BYTES // CHUNK_BYTES):
        assert not tape.full
        tape.append(encode_frame(Kind.BLOB_CHUNK, {}, bytes(CHUNK_BYTES)))
    assert tape.full
    tape.begin_segment(b"{}")
    assert not tape.full


def test_a_torn_record_is_cut_off_and_what_follows_is_whole(tape: Tape, tmp_path: Path) -> None:
    tape.append(RECORD)
    with (tmp_path / "tape" / "1").open("ab") as segment:
        segment.write(RECORD[:-1])
    after = Tape(tmp_path / "tape")
    assert [len(segment.records) for segment in after.read()] == [2]
    after.append(RECORD)
    after.close()
    assert [kind for kind, _ in read(tmp_path / "tape")[1]] == [Mark.SNAPSHOT, Kind.LOG, Kind.LOG]


def test_segments_can_be_removed_anywhere_but_at_the_end(tape: Tape, tmp_path: Path) -> None:
    for without in ((), (), (2,)):
        tape.begin_segment(b"{}", without=without)
    assert list(read(tmp_path / "tape")) == [1, 3, 4]


@pytest.mark.parametrize(
    "write",
    [
        lambda tape: tape.append(RECORD),
        lambda tape: tape.append(RECORD[:30], RECORD[30:]),
    ],
)
def test_a_full_disk_ends_it_and_removes_it(tape: Tape, tmp_path: Path, write: object) -> None:
    full_fd = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full_fd, tape._fd)
    os.close(full_fd)
    write(tape)  # type: ignore[operator]
    assert tape.broken
    assert not (tmp_path / "tape").exists()
    write(tape)  # type: ignore[operator]
    tape.begin_segment(b"{}")
    assert not (tmp_path / "tape").exists()


@pytest.mark.parametrize("step", ["create", "begin", "too large a snapshot"])
def test_a_tape_that_can_not_go_on_says_nothing_and_is_gone(tape: Tape, tmp_path: Path, step: str) -> None:
    if step == "create":
        tape = Tape(tmp_path / "no such" / "tape")
        tape.create()
    elif step == "begin":
        (tmp_path / "tape" / "2").write_bytes(b"")
        tape.begin_segment(b"{}")
    else:
        tape.begin_segment(bytes(MAX_BODY_BYTES + 1))
    assert tape.broken
    tape.append(RECORD)


def test_what_is_not_there_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match="could not be written"):
        read(tmp_path / "nothing")


def test_a_strange_file_among_the_segments_is_damage(tape: Tape, tmp_path: Path) -> None:
    (tmp_path / "tape" / "notes.txt").write_text("hello")
    with pytest.raises(TapeError, match="can't be read"):
        read(tmp_path / "tape")
