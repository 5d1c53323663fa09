"""`session.record`: what a recording has, what it says it lacks, and which files a reader refuses."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import resource
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_api.recordings import BLOBS_MAX
from executor_client import InvalidRequest, Outcome, Recorder, Recording, RecordingError
from executor_client import recording as recording_module
from tests.support.blocking import client_of
from tests.support.daemon import Daemon

PROGRAMS = [
    "print('begin'); x + 1",
    "add(1, y=2), len(crm_find('key'))",
    "crash()",
    "open('made.txt', 'w').write('z')",
    "bytes(range(256)) * 1200",  # arrives in pieces
    "'e' * 10_000",
    "show(x)",
]


def crash() -> None:
    raise KeyError("no such key")


TOOLS = {"add": lambda x, y: x + y, "crm_find": lambda key: f"secret of {key}", "crash": crash}


@pytest.fixture(params=["sync", "async"], scope="module")
def client(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon) as client:
        yield client


@pytest.fixture(scope="module")
def recorded(client: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A recording, and the results that the session gave."""
    path = tmp_path_factory.mktemp("recording") / "run.rxr"
    with client.create_session() as session:
        session.record(path, redact_tools=["crm_*"])
        session.register_tools(TOOLS)
        session.set_variables({"x": 5, "large": "v" * 5_000})
        session.files.write("given.txt", b"given")
        results = [session.execute(program) for program in PROGRAMS]
        session.savepoint()
        session.rollback()
    return path, results


def test_each_execution_can_be_read_as_it_was_returned(recorded: tuple[Path, list[Any]]) -> None:
    path, results = recorded
    with Recording(path) as recording:
        steps = list(recording.steps())
        assert [step.request.code for step in steps] == PROGRAMS
        for step, returned in zip(steps, results, strict=True):
            read = recording.result(step)
            assert read is not None
            assert {**vars(read), "error": None} == {**vars(returned), "error": None}
            assert str(read.error) == str(returned.error)
        assert steps == sorted(steps, key=lambda step: step.time_s)


def test_it_has_what_the_session_was_given(recorded: tuple[Path, list[Any]]) -> None:
    with Recording(recorded[0]) as recording:
        entries = list(recording.entries())
        given = {entry.kind: entry for entry in entries if entry.kind not in ("execute", "event", "answer")}
        assert list(given) == ["session", "tools", "variables", "file", "savepoint", "rollback"]
        assert given["session"].fields["image"] and given["session"].fields["policy"]["fingerprint"]
        assert [tool.name for tool in given["tools"].message().tools] == list(TOOLS)
        large = given["variables"].message().variables[1]
        assert b"v" * 5_000 in recording.payload(large.value.packed)
        assert recording.payload(given["file"].fields["content"]) == b"given"
        assert recording.manifest.captured["execute"] == len(PROGRAMS) and recording.manifest.complete
        assert recording.manifest.referenced == {"contents of files that the code made or changed": 1}


def test_a_redacted_tool_leaves_its_arguments_and_answers_out_and_the_manifest_says_so(
    recorded: tuple[Path, list[Any]],
) -> None:
    path = recorded[0]
    with zipfile.ZipFile(path) as zipped:
        assert not any(b"secret of" in zipped.read(name) for name in zipped.namelist())
    with Recording(path) as recording:
        assert recording.manifest.redacted_tools == ("crm_*",)
        assert recording.manifest.unknown == {"calls of redacted tools": 1}
        redacted = [entry.kind for entry in recording.entries() if entry.redacted]
        assert redacted == ["event", "answer"]


def test_only_the_owner_can_read_it(recorded: tuple[Path, list[Any]]) -> None:
    assert stat.S_IMODE(recorded[0].stat().st_mode) == 0o600
    assert [each.name for each in recorded[0].parent.iterdir()] == ["run.rxr"]


def test_a_session_has_one_recording_at_a_time_and_another_one_after_it(client: Any, tmp_path: Path) -> None:
    with client.create_session() as session:
        with session.record(tmp_path / "first.rxr"):
            session.execute("n = 1")
            with pytest.raises(InvalidRequest, match=r"first\.rxr"):
                session.record(tmp_path / "second.rxr")
        session.execute("n = 2")
        session.record(tmp_path / "second.rxr")
        session.execute("n = 3")
    for name, unknown in (("first", {}), ("second", {"what the session did before the recording": 1})):
        with Recording(tmp_path / f"{name}.rxr") as recording:
            assert len(list(recording.steps())) == 1
            assert recording.manifest.unknown == unknown


def test_a_full_disk_ends_the_recording_and_not_the_run(
    client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with client.create_session() as session:
        session.record(tmp_path / "run.rxr")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
        try:
            with caplog.at_level(logging.WARNING, "executor_client.recording"):
                result = session.execute("bytes(100_000)")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert len(result.output) == 100_000 and session.execute("1").output == 1
    assert "nothing of it is kept" in caplog.text and "The run goes on" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_process_writes_the_file_and_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    program = """
import os, sys
from executor_client import Recorder
recorder = Recorder(sys.argv[1])
recorder.add("session", {"image": "base"})
if os.fork() == 0:
    recorder.add("session", {"image": "of the child"})
    sys.exit()
os.wait()
assert not os.path.exists(sys.argv[1])
"""
    path = tmp_path / "run.rxr"
    subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", program, path], check=True, timeout=60)
    with Recording(path) as recording:
        assert [entry.fields for entry in recording.entries()] == [{"image": "base"}]


# ---------------------------------------------------------------------------------------------------------------------
# Files that are refused. They need no daemon.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "small.rxr"
    with Recorder(path) as recorder:
        recorder.add("session", {"image": "base"})
        recorder.payload(os.urandom(2_000))
    return path.read_bytes()


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(RecordingError) as refused:
        Recording(path)
    return refused.value.message


def test_one_changed_byte_is_refused(small: bytes, tmp_path: Path) -> None:
    chosen = random.Random(1).sample(range(len(small)), 300)
    for at in {*chosen, *range(len(small) - 100, len(small))}:
        refusal(tmp_path / "edited.rxr", small[:at] + bytes([small[at] ^ 1]) + small[at + 1 :])


@pytest.mark.parametrize("kept_bytes", [0, 1, 50, 1_000, -1])
def test_a_cut_one_is_refused(small: bytes, tmp_path: Path, kept_bytes: int) -> None:
    assert "cut" in refusal(tmp_path / "cut.rxr", small[:kept_bytes])


def forged(path: Path, **changes: Any) -> bytes:
    """A recording with other lines or another manifest, and the right hashes: an attacker can compute them."""
    lines: bytes = changes.pop("lines", b'{"time":1.0,"kind":"session","step":0,"fields":{}}\n')
    compressions: dict[str, int] = changes.pop("compressions", {})
    chain = hashlib.sha256(b"").digest()
    for line in lines.splitlines(keepends=True):
        chain = hashlib.sha256(chain + line).digest()
    counts: dict[str, dict[str, int]] = {"captured": {}, "referenced": {}, "unknown": {}}
    manifest = {"version": 1, "writer": "", "entries": lines.count(b"\n"), "chain": chain.hex(), "complete": True}
    manifest = {**manifest, "ended": "", "redacted_tools": [], **counts, **changes}
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("events.jsonl", lines, compressions.get("events.jsonl", zipfile.ZIP_DEFLATED))
        zipped.writestr("manifest.json", json.dumps(manifest), compressions.get("manifest.json"))
        zipped.comment = b"0" * 64
    data = path.read_bytes()[:-64]
    return data + hashlib.sha256(data[:-22]).hexdigest().encode()


def test_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    assert "update remote-executor" in refusal(tmp_path / "new.rxr", forged(tmp_path / "f", version=2, new="field"))


@pytest.mark.parametrize(
    "changes", [{"entries": 5}, {"chain": 1}, {"captured": {"x": "y"}}, {"more": 1}, {"version": True}]
)
def test_a_manifest_that_no_recorder_writes_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    refusal(tmp_path / "forged.rxr", forged(tmp_path / "f", **changes))


def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = forged(tmp_path / "f", lines=b"0" * (40 << 20))
    assert len(bomb) < 100_000
    assert "too long" in refusal(tmp_path / "bomb.rxr", bomb)


@pytest.mark.parametrize(
    ("part", "compression"),
    [
        ("manifest.json", zipfile.ZIP_DEFLATED),
        ("manifest.json", zipfile.ZIP_BZIP2),
        ("events.jsonl", zipfile.ZIP_BZIP2),
        ("events.jsonl", zipfile.ZIP_LZMA),
    ],
)
def test_a_part_that_would_be_unpacked_at_once_is_refused(tmp_path: Path, part: str, compression: int) -> None:
    """`zipfile` unpacked 1.9 GB of a manifest that said that it had 1,000 bytes, from a file of 2 KB."""
    assert "compressed" in refusal(tmp_path / "f.rxr", forged(tmp_path / "f", compressions={part: compression}))


def test_a_directory_of_a_large_zip_is_refused_unread(small: bytes, tmp_path: Path) -> None:
    """`zipfile` reads the directory that the end of a large zip (ZIP64) names, with any number of parts."""
    directory = small[:-86] + b"PK\6\7" + bytes(16)
    end = bytearray(small[-86:-64])
    end[12:16] = struct.pack("<I", int.from_bytes(end[12:16], "little") + 20)
    data = directory + end + hashlib.sha256(directory).hexdigest().encode()
    assert "too many parts" in refusal(tmp_path / "large.rxr", data)


def test_a_directory_of_too_many_parts_is_refused_unread(small: bytes, tmp_path: Path) -> None:
    end = bytearray(small)
    end[-86 + 8 : -86 + 12] = struct.pack("<HH", BLOBS_MAX + 9, BLOBS_MAX + 9)
    assert "too many parts" in refusal(tmp_path / "many.rxr", bytes(end))


def test_executions_without_an_end_are_refused_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "HELD_BYTES_MAX", 500_000)
    lines = b"".join(b'{"time":1,"kind":"execute","step":%d,"fields":{}}\n' % step for step in range(1, 1000))
    (tmp_path / "many.rxr").write_bytes(forged(tmp_path / "f", lines=lines))
    with pytest.raises(RecordingError, match="500,000 bytes"), Recording(tmp_path / "many.rxr") as recording:
        list(recording.steps())
    with pytest.raises(RecordingError, match="500,000 bytes"), Recording(tmp_path / "many.rxr") as recording:
        list(recording.in_order())


def test_what_waits_for_an_unended_execution_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "HELD_BYTES_MAX", 500_000)
    first = b'{"time":1,"kind":"execute","step":1,"fields":{}}\n'
    lines = first + b'{"time":1,"kind":"imports","step":0,"fields":{}}\n' * 1000
    (tmp_path / "many.rxr").write_bytes(forged(tmp_path / "f", lines=lines))
    with pytest.raises(RecordingError, match="500,000 bytes"), Recording(tmp_path / "many.rxr") as recording:
        list(recording.in_order())


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'{"time":1,"kind":"unheard of","step":0,"fields":{}}',
        b'{"time":1,"kind":"event","step":3,"fields":{}}',
        b"[" * 100_000,
        b'{"time":1e999,"kind":"event","step":0,"fields":null}',
    ],
)
def test_an_entry_that_no_recorder_writes_is_refused_when_it_is_read(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "entry.rxr"
    data = forged(tmp_path / "f", lines=line + b"\n")
    path.write_bytes(data)
    with pytest.raises(RecordingError), Recording(path) as recording:
        list(recording.entries())


def test_an_event_with_fields_of_another_type_is_refused(tmp_path: Path) -> None:
    lines = (
        b'{"time":1,"kind":"execute","step":1,"fields":{"code":"1"}}\n'
        b'{"time":1,"kind":"event","step":1,"fields":{"result":{"outcome":"OUTCOME_X"}}}\n'
    )
    path = tmp_path / "event.rxr"
    path.write_bytes(forged(tmp_path / "f", lines=lines))
    with pytest.raises(RecordingError, match="invalid fields"), Recording(path) as recording:
        recording.result(next(recording.steps()))


def test_a_program_that_is_left_alone_has_no_result(client: Any, tmp_path: Path) -> None:
    def give_up(_: object) -> None:
        raise TimeoutError("enough")

    with client.create_session() as session:
        session.record(tmp_path / "run.rxr")
        with pytest.raises(TimeoutError):
            session.execute("print(1)", on_event=give_up)
        assert session.execute("2").outcome is Outcome.SUCCEEDED
    with Recording(tmp_path / "run.rxr") as recording:
        left, ended = recording.steps()
        assert not left.is_ended and left.entries[-1].fields == {"type": "TimeoutError", "message": "enough"}
        assert ended.is_ended and recording.result(ended) is not None
