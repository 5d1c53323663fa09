"""Reading the end of an audit log backwards: every record once, and only sound ones are called sound."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.policy.audit import tail
from executor_server.policy.audit.chain import AuditKind
from executor_server.policy.audit.tail import Record, Wanted, search
from tests.support.audit import audit_log, paths, write_log

RECORDS = 60
FILE_BYTES = 4096  # of which the log has several


def pages(directory: Path, wanted: Wanted) -> list[Record]:
    """All records that match, the newest first."""
    found = search(directory, wanted)
    records = list(found.records)
    while found.continue_before_seq:
        found = search(directory, replace(wanted, before_seq=found.continue_before_seq))
        records += found.records
    return records


@pytest.mark.parametrize("most", [1, 7, RECORDS, 1000])
async def test_pages_have_every_record_once_across_files(tmp_path: Path, most: int) -> None:
    await write_log(tmp_path, RECORDS, max_file_bytes=FILE_BYTES)
    assert len(paths(tmp_path)) > 3
    found = pages(tmp_path, Wanted(most=most))
    assert [record.seq for record in found] == list(range(RECORDS, 0, -1))
    assert all(record.is_sound for record in found)


async def test_a_search_that_stops_for_its_bound_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_log(tmp_path, RECORDS, max_file_bytes=FILE_BYTES)
    monkeypatch.setattr(tail, "SEARCH_BYTES", 1000)
    monkeypatch.setattr(tail, "_CHUNK_BYTES", 64)
    first = search(tmp_path, Wanted(text='"NUMBER":5,'))
    assert not first.records
    assert first.continue_before_seq
    assert [record.seq for record in pages(tmp_path, Wanted(text='"NUMBER":5,'))] == [6]
    assert [record.seq for record in search(tmp_path, Wanted(after_seq=RECORDS - 2)).records] == [RECORDS, RECORDS - 1]


async def test_a_changed_record_is_not_sound_nor_is_one_after_a_gap(tmp_path: Path) -> None:
    await write_log(tmp_path, 10)
    (path,) = paths(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"acme", b"evil")
    del lines[6]
    path.write_bytes(b"".join(lines) + b'{"seq":99,"prev"')  # and half a record, as a killed daemon leaves it
    found = pages(tmp_path, Wanted(most=3))
    assert [record.seq for record in found] == [10, 9, 8, 6, 5, 4, 3, 2, 1]
    assert [record.seq for record in found if not record.is_sound] == [8, 4, 3]


async def test_recorded_code_is_neither_shown_nor_found(tmp_path: Path) -> None:
    async with audit_log(tmp_path) as log:
        log.write(AuditKind.EXECUTION_REQUESTED, {"tenant": "acme", "code": "hunter2", "code_bytes": 7})
        log.write(AuditKind.INPUT_PUT, {"tenant": "acme", "what": "h\u00fcnter2", "input": "x" * 100_000})
    whole = pages(tmp_path, Wanted(tenant="acme"))
    assert not any("hunter2" in record.json or "xxx" in record.json for record in whole)
    assert json.loads(whole[1].json)["code_withheld"] is True
    assert pages(tmp_path, Wanted(text="hunter2")) == []
    assert [record.seq for record in pages(tmp_path, Wanted(text="H\u00fcnter2"))] == [2]


async def test_a_pipe_or_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    await write_log(tmp_path, 3)
    path = tmp_path / "audit-000002.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        search(tmp_path, Wanted())
    path.unlink()
    path.symlink_to(paths(tmp_path)[0])
    with pytest.raises(OSError, match="symbolic links"):
        search(tmp_path, Wanted())
