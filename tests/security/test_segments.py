"""Attacks of a hostile guest, or of a writer of the state directory, on the records of a session: they only lose it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.config.state_dir import StateDir
from executor_server.guest.wire.frames import FrameDecoder, FrameError, Kind, encode_frame
from executor_server.guest.wire.messages import ToolResult
from executor_server.sessions.journal.execution import ToolFailure
from executor_server.sessions.journal.records import SegmentError
from executor_server.sessions.journal.registry import Registry
from executor_server.sessions.journal.segments import RecordKind, Segments
from tests.unit.sessions.journal.test_journal import Bench, Files, held_events, replayed
from tests.unit.sessions.journal.test_registry import RECORD, change

MiB = 1 << 20


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "segments", journal_bytes=MiB)
    bench.journal.begin_segments()
    yield bench
    bench.journal.close()


def size_of(files: Files) -> int:
    return sum(len(data) for data in files.values())


# -- a guest that lies


@pytest.mark.parametrize(
    "kind",
    [
        Kind.EXECUTE,
        Kind.TOOL_RESULT,
        Kind.CANCEL,
        RecordKind.SNAPSHOT,
        RecordKind.VERDICT,
        RecordKind.LOST,
        RecordKind.RESUMED,
        Kind.DONE,
    ],
)
def test_a_guest_cannot_write_a_record_of_ours(bench: Bench, kind: int) -> None:
    bench.execute("e")
    before = bench.files
    with pytest.raises(FrameError):
        bench.say(kind, {"id": "e", "taken": 5, "call": "c1", "ok": True}, b"{}")
    assert bench.files == before


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_result_with_a_malformed_suspicion_changes_nothing(bench: Bench, value: object, tmp_path: Path) -> None:
    """It was noticed after the record had been written, so the later daemon choked on its own segments."""
    execution = bench.execute("e")
    before = bench.files
    with pytest.raises(FrameError):
        bench.end("e", oom_suspect=value)
    assert not execution.done
    assert bench.files == before
    with replayed(before, tmp_path / "next") as after:
        assert list(after.journal.state.running) == ["e"]


@pytest.mark.parametrize("answered", [False, True])
async def test_a_call_is_not_made_twice(bench: Bench, answered: bool) -> None:
    execution = bench.execute("e")
    bench.call("e", "c1")
    if answered:
        execution.submit_tool_result("c1", ToolFailure("E", "no"))
    with pytest.raises(FrameError, match="made before"):
        bench.call("e", "c1")


def test_open_calls_are_bounded(bench: Bench) -> None:
    bench.execute("e")
    with pytest.raises(FrameError, match="too many"):
        for number in range(2000):
            bench.call("e", f"c{number}")


Frames = Callable[[Bench, int], None]


def junk_in_the_head(bench: Bench, number: int) -> None:
    bench.say(Kind.LOG, {"id": "e", "stream": "stdout", "junk": "x" * 60_000})


def wide_characters(bench: Bench, number: int) -> None:
    bench.log("e", "\N{PILE OF POO}" + "x" * 60_000)


def nothing(bench: Bench, number: int) -> None:
    bench.log("e", "")


@pytest.mark.parametrize("frame", [junk_in_the_head, wide_characters, nothing])
def test_what_nobody_reads_is_bounded_on_disk_and_in_memory(bench: Bench, frame: Frames) -> None:
    """A head of junk counted as nothing: 64 KiB on disk for each 256 bytes of the limit."""
    execution = bench.execute("e")
    number = 0
    while not bench.held:
        frame(bench, number)
        number += 1
    assert size_of(bench.files) < 2 * MiB
    texts = sum(len(event.kind.text) * 4 for event in held_events(execution) if hasattr(event.kind, "text"))
    assert frame is not wide_characters or texts < 2 * MiB


@pytest.mark.parametrize("part", ["error", "artifacts", "junk"])
def test_what_is_in_a_result_counts(bench: Bench, part: str) -> None:
    """The last results are kept, as many as fit; those of a hostile guest are as large as they can be."""
    info = {"path": "p" * 2000, "size": 1, "directory": False, "modified": 1.0}
    error = {"type": "E", "message": "m" * 16_000, "traceback": "t" * 32_000}
    head: dict[str, dict[str, Any]] = {"error": {}, "artifacts": {}, "junk": {"junk": "x" * 60_000}}
    body = {"error": json.dumps(error), "artifacts": json.dumps([info] * 200), "junk": ""}[part].encode()
    sizes = {part: len(body)} if body else {}
    for number in range(300):
        bench.execute(f"e{number}")
        bench.guest_seq += 1
        fields = {"id": f"e{number}", "outcome": "exception", "variables": "kept", "generation": 1, "final": ""}
        usage = dict.fromkeys(("operations", "wall_time_s", "cpu_time_s", "peak_memory_bytes", "output_bytes"), 0)
        frame = {**fields, **usage, "error": 0, **head[part], **sizes}
        bench.journal.take(FrameDecoder().feed(encode_frame(Kind.RESULT, frame, body, seq=bench.guest_seq))[0])
    kept = bench.journal.state.finished
    assert 1 <= len(kept) < 40
    assert sum(execution.journal_size for execution in kept.values()) <= MiB


async def test_a_snapshot_longer_than_a_segment_is_not_written_with_each_record(bench: Bench) -> None:
    """Ids of answered calls are the guest's choice, and are remembered for each execution."""
    for number in range(20):
        execution = bench.execute(f"e{number}")
        for call in range(4000):
            execution.note_answer(f"{call:064}")
        if number < 19:
            bench.end(f"e{number}")
    bench.begin_segment()
    begun = bench.segments.segment
    for _ in range(50):
        bench.log("e19", "x")
    assert bench.segments.segment == begun
    assert not bench.segments.broken


# -- a state directory that another process wrote to


def made(directory: Path) -> Files:
    """Segments with some of everything."""
    bench = Bench(directory)
    bench.journal.begin_segments()
    bench.execute("e1")
    bench.log("e1", "text")
    bench.call("e1", "c1")
    bench.send(ToolResult(id="e1", call="c1", ok=True), b"value")
    bench.end("e1")
    bench.execute("e2")
    bench.begin_segment()
    bench.end("e2", oom_suspect=True)
    bench.journal.decide("e2", 1)
    bench.execute("e3")
    bench.journal.resume(bench.seq - 1)
    bench.journal.lose("gone")
    bench.journal.close()
    return bench.files


@pytest.mark.parametrize("what", ["a pipe", "a link", "a directory", "a huge file", "segments that are a link"])
def test_a_trap_among_the_segments_is_damage_and_is_not_waited_for(tmp_path: Path, what: str) -> None:
    files = made(tmp_path / "segments")
    directory = tmp_path / "segments"
    if what == "segments that are a link":
        directory = tmp_path / "link"
        directory.symlink_to(tmp_path / "segments")
    else:
        trap = directory / str(max(map(int, files.keys() - {"head"})) + 1)
        if what == "a pipe":
            os.mkfifo(trap)
        elif what == "a link":
            trap.symlink_to(directory / "1")
        elif what == "a directory":
            trap.mkdir()
        else:
            with trap.open("wb") as file:
                file.truncate(2**40)
    segments = Segments(directory)
    with pytest.raises(SegmentError):
        list(segments.read())
    segments.close()


@pytest.mark.parametrize("session_id", ["../victim", "/tmp", ".", "", "a/b", "x" * 65])
def test_an_id_that_leads_elsewhere_is_not_believed(tmp_path: Path, session_id: str) -> None:
    """The directory of that name would be read, and removed whole when the session ends."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "victim").mkdir()
    registry = Registry(StateDir(state))
    registry.add(RECORD)
    registry.close()
    change(state, "UPDATE sessions SET session_id = ?", session_id)
    after = Registry(StateDir(state))
    assert after.load() == []
    after.close()
    assert (state / "victim").is_dir()


def test_all_that_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    """The registry holds the tokens of the sandboxes, the segments the computed values."""
    before = os.umask(0)
    try:
        registry = Registry(StateDir(tmp_path))
        registry.add(RECORD)
        segments = registry.segments_of(RECORD.session_id)
        segments.create()
        segments.begin_segment(b"{}")
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    assert len(modes) >= 4
    assert set(modes.values()) == {0}, modes
    segments.close()
    registry.close()
