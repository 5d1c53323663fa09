"""A fork server that did not end with its daemon is found by its record, and no other process is taken for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.backends.local.fork_server.records import ForkServerRecords
from executor_server.backends.local.records import ProcessRecord

FORK_SERVER = "0123456789abcdef"


@pytest.fixture
def process() -> Iterator[ProcessRecord]:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        yield ProcessRecord.of(sleeping.pid)
        sleeping.kill()


def test_a_living_one_is_found_and_can_be_ended(tmp_path: Path, process: ProcessRecord) -> None:
    ForkServerRecords(tmp_path).write(FORK_SERVER, process)
    (orphan,) = ForkServerRecords(tmp_path).orphans()
    assert orphan.fork_server_id == FORK_SERVER and not orphan.has_ended()
    orphan.kill()
    while not orphan.has_ended():
        pass
    orphan.release()


def test_another_process_with_its_number_is_not_taken_for_it(tmp_path: Path, process: ProcessRecord) -> None:
    records = ForkServerRecords(tmp_path)
    records.write(FORK_SERVER, ProcessRecord(process.pid, process.start_time - 1, process.boot_id))
    assert records.orphans() == []
    assert list((tmp_path / "fork_servers").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": "x"}', json.dumps({"pid": 1, "boot_id": "b"})])
def test_a_record_that_is_no_record_is_removed(tmp_path: Path, text: str) -> None:
    (tmp_path / "fork_servers").mkdir()
    (tmp_path / "fork_servers" / f"{FORK_SERVER}.json").write_text(text)
    (tmp_path / "fork_servers" / "other").write_text("")
    assert ForkServerRecords(tmp_path).orphans() == []
    assert [path.name for path in (tmp_path / "fork_servers").iterdir()] == ["other"]


def test_without_a_directory_there_is_none(tmp_path: Path) -> None:
    assert ForkServerRecords(tmp_path).orphans() == []
    ForkServerRecords(tmp_path).remove(FORK_SERVER)
