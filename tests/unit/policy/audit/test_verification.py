"""The verification finds and names every record that was changed, removed, added or moved."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.policy.audit.chain import GENESIS, AuditKind, Position, encode
from executor_server.policy.audit.directory import ANCHOR_NAME, read_anchor
from executor_server.policy.audit.verification import Verdict, verify
from tests.support.audit import kinds, paths, records, write_log
from tests.support.rounds import rounds

RECORDS = 280


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a log of a few files."""
    directory = tmp_path_factory.mktemp("log") / "audit"
    asyncio.run(write_log(directory, RECORDS, max_file_bytes=2**15))
    assert len(paths(directory)) == 3
    return directory


@pytest.fixture
def log(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy for a test to damage."""
    copy = tmp_path / "audit"
    shutil.copytree(made, copy)
    yield copy


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def edit(path: Path, change: slice, new: list[bytes]) -> None:
    found = lines(path)
    found[change] = new
    path.write_bytes(b"".join(found))


def only_problem(verdict: Verdict) -> tuple[str, int, int]:
    (problem,) = verdict.problems
    return problem.file, problem.line, problem.seq


def test_a_log_as_it_was_written_is_whole(made: Path) -> None:
    verdict = verify(made)
    assert verdict.whole
    assert (verdict.records, verdict.files, verdict.last.seq) == (RECORDS, 3, RECORDS)


@settings(max_examples=rounds(300, 40), deadline=None)
@given(data=st.data())
def test_one_changed_byte_anywhere_is_found_and_its_record_named(made: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(paths(made)))
    before = path.read_bytes()
    place = data.draw(st.integers(0, len(before) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != before[place]))
    try:
        path.write_bytes(before[:place] + bytes([byte]) + before[place + 1 :])
        found = verify(made).problems[0]
    finally:
        path.write_bytes(before)
    line = before[:place].count(b"\n") + 1
    seq = line + sum(len(lines(each)) for each in paths(made) if each < path)
    # A last line without its end looks like one that a kill interrupted, except for the anchor.
    is_the_end = seq == RECORDS and place == len(before) - 1
    assert (found.file, found.line, found.seq) == (("", 0, seq) if is_the_end else (path.name, line, seq))


def test_a_changed_record_is_one_problem(log: Path) -> None:
    path = paths(log)[1]
    line = lines(path)[4]
    edit(path, slice(4, 5), [line.replace(b"acme", b"acne")])
    seq = records(log)[len(lines(paths(log)[0])) + 4]["seq"]
    assert only_problem(verify(log)) == (path.name, 5, seq)


def test_a_record_that_was_replaced_with_its_own_hash_is_found_at_the_next(log: Path) -> None:
    """An attacker who changes a record can compute its hash again, but then the next record does not follow it."""
    path = paths(log)[0]
    found = records(log)[3]
    forged, _ = encode(Position(3, found["prev"]), found["time"], AuditKind(found["kind"]), {"tenant": "other"})
    edit(path, slice(3, 4), [forged])
    assert only_problem(verify(log)) == (path.name, 5, 5)


def test_records_that_were_removed_are_counted(log: Path) -> None:
    edit(paths(log)[0], slice(10, 13), [])
    verdict = verify(log)
    assert only_problem(verdict) == (paths(log)[0].name, 11, 14)
    assert "3 records are missing" in verdict.problems[0].text


def test_a_record_that_was_added_is_found(log: Path) -> None:
    path = paths(log)[0]
    edit(path, slice(10, 10), [lines(path)[2]])
    assert (path.name, 11, 3) in [(each.file, each.line, each.seq) for each in verify(log).problems]


def test_records_that_were_moved_are_found(log: Path) -> None:
    path = paths(log)[0]
    found = lines(path)
    edit(path, slice(10, 12), [found[11], found[10]])
    assert [each.line for each in verify(log).problems] == [11, 12, 13]


def test_files_that_were_swapped_are_found(log: Path) -> None:
    first, second, _ = paths(log)
    first.rename(log / "x")
    second.rename(first)
    (log / "x").rename(second)
    assert not verify(log).whole


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_file_that_was_removed_is_missed(log: Path, index: int) -> None:
    paths(log)[index].unlink()
    assert not verify(log).whole


def test_an_end_that_was_removed_is_missed(log: Path) -> None:
    edit(paths(log)[-1], slice(-2, None), [])
    verdict = verify(log)
    assert [(each.seq, "2 records are missing" in each.text) for each in verdict.problems] == [(RECORDS - 1, True)]


def test_the_whole_log_removed_is_missed_by_the_anchor(log: Path) -> None:
    for path in paths(log):
        path.unlink()
    assert not verify(log).whole


def test_a_log_without_an_anchor_is_not_called_whole(log: Path) -> None:
    (log / ANCHOR_NAME).unlink()
    assert not verify(log).whole


def test_a_log_that_is_ahead_of_its_anchor_is_whole(log: Path) -> None:
    """A daemon was killed after it wrote the record and before it wrote the anchor."""
    before = records(log)[-2]
    (log / ANCHOR_NAME).write_text(f"{before['seq']:020d} {before['hash']}\n")
    assert verify(log).whole


def test_the_last_record_replaced_is_found_by_the_anchor(log: Path) -> None:
    (log / ANCHOR_NAME).write_text(f"{RECORDS:020d} {'0' * 64}\n")
    verdict = verify(log)
    assert [each.seq for each in verdict.problems] == [RECORDS]


def test_half_a_record_at_the_end_is_a_note(log: Path) -> None:
    with paths(log)[-1].open("ab") as file:
        file.write(b'{"seq":281,"pre')
    verdict = verify(log)
    assert (verdict.whole, len(verdict.notes)) == (True, 1)


def test_half_a_record_in_the_middle_is_a_problem(log: Path) -> None:
    with paths(log)[0].open("ab") as file:
        file.write(b'{"seq":281,"pre')
    assert not verify(log).whole


def test_a_record_known_from_elsewhere_is_compared(log: Path) -> None:
    known = records(log)[100]
    assert verify(log, Position(known["seq"], known["hash"])).whole
    assert not verify(log, Position(known["seq"], "0" * 64)).whole
    assert not verify(log, Position(RECORDS + 1, known["hash"])).whole


async def test_a_log_whose_old_files_were_removed_by_the_daemon_is_whole(tmp_path: Path) -> None:
    await write_log(tmp_path / "audit", RECORDS, max_file_bytes=2**14, max_files=2)
    assert len(paths(tmp_path / "audit")) == 2
    verdict = verify(tmp_path / "audit")
    assert (verdict.whole, verdict.records < RECORDS) == (True, True)


async def test_a_file_more_than_the_daemon_removed_is_missed(tmp_path: Path) -> None:
    await write_log(tmp_path / "audit", RECORDS, max_file_bytes=2**14, max_files=3)
    paths(tmp_path / "audit")[0].unlink()
    assert not verify(tmp_path / "audit").whole


async def test_what_was_expected_before_the_beginning_is_said_to_be_removed(tmp_path: Path) -> None:
    await write_log(tmp_path / "audit", RECORDS, max_file_bytes=2**14, max_files=2)
    assert "removed with old files" in verify(tmp_path / "audit", Position(1, "0" * 64)).problems[-1].text


def test_a_log_that_is_only_garbage_is_bounded_in_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "audit-000001.jsonl").write_bytes(b"\x1b[2J\n" * 5000 + b"\0" * 3_000_000)
    verdict = verify(tmp_path)
    assert (verdict.whole, len(verdict.problems), verdict.more > 4000) == (False, 100, True)


async def test_an_empty_file_after_the_last_record_is_whole(log: Path) -> None:
    """A daemon was killed when it had just begun a file."""
    (log / "audit-000004.jsonl").touch()
    assert verify(log).whole
    await write_log(log, 1)
    assert verify(log).whole
    assert kinds(log)[-1] == "variables_set"
    assert read_anchor(log) != GENESIS
