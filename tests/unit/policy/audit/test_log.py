"""The log continues at its end, however the daemon ended, and records a gap when it could not be written."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from executor_server.policy.audit import log as log_module
from executor_server.policy.audit.directory import ANCHOR_NAME, read_anchor
from executor_server.policy.audit.log import AuditLog
from executor_server.policy.audit.log_files import AuditDirError, AuditFiles, Flush
from executor_server.policy.audit.verification import verify
from tests.support.audit import KIND, audit_log, kinds, paths, records, write_log
from tests.support.polling import eventually_async


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "RETRY_INTERVAL_S", 0.0)


def hide(directory: Path) -> Path:
    """Moves the directory away under the daemon."""
    return directory.rename(directory.with_name("hidden"))


# -- where it ends and goes on


async def test_the_next_daemon_goes_on_with_the_chain(directory: Path) -> None:
    await write_log(directory, 3)
    await write_log(directory, 2)
    assert [record["seq"] for record in records(directory)] == [1, 2, 3, 4, 5]
    assert verify(directory).whole


async def test_the_log_is_for_its_user_only(directory: Path) -> None:
    await write_log(directory, 1)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {"audit-000001.jsonl": 0o600, "anchor": 0o600, "lock": 0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


async def test_the_anchor_names_the_last_record(directory: Path) -> None:
    await write_log(directory, 3)
    last = records(directory)[-1]
    anchor = read_anchor(directory)
    assert anchor is not None
    assert (anchor.seq, anchor.hash) == (last["seq"], last["hash"])


async def test_a_full_file_is_followed_by_the_next(directory: Path) -> None:
    await write_log(directory, 1000, max_file_bytes=2**16)
    assert len(paths(directory)) > 1
    assert all(path.stat().st_size <= 2**16 for path in paths(directory))
    assert verify(directory).records == 1000


async def test_old_files_go_and_the_log_says_so(directory: Path) -> None:
    await write_log(directory, 1000, max_file_bytes=2**16, max_files=1)
    (kept,) = paths(directory)
    assert records(directory)[0]["kind"] == "file_removed"
    assert kept.name != "audit-000001.jsonl"


async def test_no_file_goes_before_there_are_too_many(directory: Path) -> None:
    await write_log(directory, 600, max_file_bytes=2**15, max_files=7)
    assert (len(paths(directory)), "file_removed" in kinds(directory)) == (5, False)


async def test_half_a_record_at_the_end_is_cut_off_and_that_is_written_down(directory: Path) -> None:
    await write_log(directory, 3)
    with paths(directory)[0].open("ab") as file:
        file.write(b'{"seq":4,"prev"')
    await write_log(directory, 1)
    repair = records(directory)[3]
    assert (repair["kind"], repair["what"], repair["bytes"]) == ("audit_repaired", "torn_record", 15)
    assert verify(directory).whole


async def test_an_end_that_was_removed_while_no_daemon_ran_stays_known(directory: Path) -> None:
    await write_log(directory, 5)
    path = paths(directory)[0]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    await write_log(directory, 9)
    repair = records(directory)[3]
    assert (repair["what"], repair["first"], repair["last"]) == ("records_missing", 4, 5)
    assert [each.seq for each in verify(directory).problems] == [4]


async def test_a_last_record_that_was_replaced_while_no_daemon_ran_stays_known(directory: Path) -> None:
    await write_log(directory, 5)
    (directory / ANCHOR_NAME).write_text(f"{5:020d} {'0' * 64}\n")
    await write_log(directory, 1)
    assert [each.seq for each in verify(directory).problems] == [6]


async def test_an_anchor_that_was_removed_while_no_daemon_ran_stays_known(directory: Path) -> None:
    await write_log(directory, 5)
    (directory / ANCHOR_NAME).unlink()
    await write_log(directory, 1)
    assert [each.seq for each in verify(directory).problems] == [6]


async def test_a_whole_log_that_was_removed_while_no_daemon_ran_stays_known(directory: Path) -> None:
    await write_log(directory, 5)
    paths(directory)[0].unlink()
    await write_log(directory, 1)
    assert records(directory)[0]["what"] == "records_missing"
    assert not verify(directory).whole


async def test_a_damaged_end_is_left_as_it_is_and_the_log_goes_on_beside_it(directory: Path) -> None:
    await write_log(directory, 5)
    path = paths(directory)[0]
    damaged = path.read_bytes()[:-20] + b"#" * 19 + b"\n"
    path.write_bytes(damaged)
    await write_log(directory, 1)
    assert path.read_bytes() == damaged
    assert (records_of(paths(directory)[1])[0]["seq"], verify(directory).whole) == (6, False)


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def test_two_daemons_do_not_write_one_directory(directory: Path) -> None:
    async with audit_log(directory):
        with pytest.raises(AuditDirError, match="Another executor-server"):
            await write_log(directory)


def make_fifo(directory: Path) -> None:
    directory.mkdir()
    os.mkfifo(directory / "audit-000001.jsonl")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_text(""), "can't be opened"),
        (lambda path: path.symlink_to(path.parent), "is not a directory"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "chmod 700"),
        (make_fifo, "can't be opened"),
        (lambda path: (path.mkdir(), (path / "anchor").symlink_to("/etc/passwd")), "can't be opened"),
    ],
)
async def test_a_directory_that_will_not_do_is_refused_in_a_sentence(
    directory: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(directory)
    with pytest.raises(AuditDirError, match=why):
        await write_log(directory)


# -- the disk


async def test_always_waits_until_the_record_is_on_the_disk(directory: Path) -> None:
    flushed: list[int] = []

    class Noting(Flush):
        def run(self, *, sync: bool) -> None:
            super().run(sync=sync)
            flushed.append(self.position.seq)

    class Files(AuditFiles):
        def flush(self) -> Flush:
            return Noting(**vars(super().flush()))

    async with audit_log(directory, sync="always", files=Files) as log:
        assert log.write(KIND, {})
        assert await log.durable()
        assert flushed == [1]


async def test_records_that_come_together_share_a_flush(directory: Path) -> None:
    async with audit_log(directory, sync="always") as log:

        async def write() -> bool:
            return log.write(KIND, {}) and await log.durable()

        assert all(await asyncio.gather(*(write() for _ in range(50))))
        assert log.stats.flushes <= 2


async def test_interval_brings_records_to_the_disk_by_itself(directory: Path) -> None:
    async with audit_log(directory, sync="interval") as log:
        log.write(KIND, {})
        assert await log.durable()
        assert await eventually_async(lambda: log.stats.flushes)


class Failing(AuditFiles):
    """A disk that fails to keep what the kernel took, while `fails` is set."""

    fails = True

    def flush(self) -> Flush:
        found = super().flush()
        if Failing.fails:
            found.current = 10**6  # no descriptor
        return found


async def test_a_disk_that_can_not_be_written_to_is_a_failure_for_who_waits(directory: Path) -> None:
    Failing.fails = True
    async with audit_log(directory, sync="always", files=Failing) as log:
        assert log.write(KIND, {})
        assert not await log.durable()
        assert log.stats.is_failing
        Failing.fails = False
        assert await eventually_async(lambda: not log.stats.is_failing)
        assert log.write(KIND, {})
        assert await log.durable()
    # No record follows those that the disk may have lost: the log continues in a new file.
    assert [records_of(path)[0]["kind"] for path in paths(directory)] == [KIND, "audit_gap"]
    assert verify(directory).whole


async def test_a_disk_that_does_not_answer_holds_nobody_for_good(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "FLUSH_TIME_S", 0.01)
    answers = threading.Event()

    class Hanging(Flush):
        def run(self, *, sync: bool) -> None:
            answers.wait()
            super().run(sync=sync)

    class Files(AuditFiles):
        def flush(self) -> Flush:
            return Hanging(**vars(super().flush()))

    async with audit_log(directory, sync="always", files=Files) as log:
        log.write(KIND, {})
        assert not await log.durable()
        assert not log.write(KIND, {})
        answers.set()
        assert await eventually_async(lambda: log.write(KIND, {}))
    assert "audit_gap" in kinds(directory)


# -- failing


async def lost_and_found(directory: Path, *, restore: Callable[[Path], object]) -> None:
    async with audit_log(directory) as log:
        log.write(KIND, {})
        hidden = hide(directory)
        assert [log.write(KIND, {}) for _ in range(3)] == [False] * 3
        assert log.stats.is_failing
        restore(hidden)
        assert await eventually_async(lambda: not log.stats.is_failing)
        assert log.write(KIND, {})


async def test_a_log_that_comes_back_says_what_it_lacks(directory: Path) -> None:
    await lost_and_found(directory, restore=lambda hidden: hidden.rename(directory))
    gap = next(record for record in records(directory) if record["kind"] == "audit_gap")
    assert (gap["records"], gap["kinds"]) == (3, {KIND: 3})
    assert verify(directory).whole


async def test_a_log_whose_files_were_taken_away_shows_that_they_are_missing(directory: Path) -> None:
    await lost_and_found(directory, restore=lambda _hidden: directory.mkdir(mode=0o700))
    assert kinds(directory)[0] == "audit_gap"
    assert "1 record is missing" in verify(directory).problems[0].text


async def test_who_wants_to_know_of_a_failure_is_told_once(directory: Path) -> None:
    calls: list[bool] = []
    async with audit_log(directory) as log:
        log.on_failing(lambda: calls.append(True))
        hide(directory)
        for _ in range(3):
            log.write(KIND, {})
        assert await eventually_async(lambda: calls)
        assert calls == [True]
        directory.mkdir(mode=0o700)
        assert await eventually_async(lambda: not log.stats.is_failing)


async def test_a_failure_is_logged_and_not_once_for_each_record(directory: Path) -> None:
    with capture_logs() as logged:
        async with audit_log(directory) as log:
            hide(directory)
            for _ in range(100):
                log.write(KIND, {})
    assert [entry["event"] for entry in logged] == ["audit_not_written", "audit_records_lost"]


async def test_a_log_can_be_closed_twice_and_without_its_directory(directory: Path) -> None:
    async with audit_log(directory) as log:
        hide(directory)
        log.write(KIND, {})
        await log.close()
    assert isinstance(log, AuditLog)
