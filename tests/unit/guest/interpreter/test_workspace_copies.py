"""Copies of a workspace that are hard to restore: too many entries, or entries that agent code has closed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.guest.interpreter import workspace_copies
from executor_server.guest.interpreter.workspace_copies import WorkspaceCopies

MAX_SEEN = 10
NOBODY = 65_534


@pytest.fixture(autouse=True)
def low_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_copies, "_MAX_SEEN", MAX_SEEN)


@pytest.fixture
def workspace() -> Iterator[Path]:
    """A directory of an ordinary user, who acts meanwhile: modes of files don't stop root."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # the user nobody can't enter the directories of the tests
    was_root = os.geteuid() == 0
    if was_root:
        os.chown(directory, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield directory
    finally:
        if was_root:
            os.seteuid(0)
        shutil.rmtree(directory)


def test_files_that_were_not_reached_are_not_reported_as_removed(tmp_path: Path) -> None:
    """Whatever the search for changes did not reach counted as removed."""
    copies = WorkspaceCopies(str(tmp_path))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "old").touch()
    copies.save(max_bytes=0)
    fill(tmp_path)
    _, changed, removed, unknown = copies.changes()
    assert (changed, removed) == ([], [])
    assert "below/old" in unknown


def test_a_workspace_that_is_too_full_to_be_emptied_is_a_failure(tmp_path: Path) -> None:
    """The failures were counted by the entries of the copy, so an empty copy had none."""
    copies = WorkspaceCopies(str(tmp_path))
    copies.save(max_bytes=0)
    fill(tmp_path)
    assert copies.restore_last() == 1


def test_a_file_that_could_not_be_restored_is_not_taken_for_the_copy(workspace: Path) -> None:
    """It got the key of the present file, so the next copy had the old bytes, and called them restored."""
    copies = WorkspaceCopies(str(workspace))
    file = workspace / "file"
    file.write_bytes(b"one")
    copies.save(max_bytes=100)
    file.write_bytes(b"two!")
    file.chmod(0o400)
    assert (copies.restore_last(), copies.restore_last()) == (1, 1)
    assert copies.save(max_bytes=100)["file"].data == b"two!"


def test_an_entry_that_no_copy_holds_is_a_failure_each_time(workspace: Path) -> None:
    copies = WorkspaceCopies(str(workspace))
    file = workspace / "file"
    file.touch(0o000)
    copies.save(max_bytes=100)
    file.chmod(0o200)
    assert (copies.restore_last(), copies.restore_last()) == (1, 1)


def test_a_directory_that_was_closed_is_opened_before_its_entries_are_compared(workspace: Path) -> None:
    """All its entries were made again: directories and links failed, and files were written."""
    copies = WorkspaceCopies(str(workspace))
    below = workspace / "closed" / "below"
    below.mkdir(parents=True)
    (below / "link").symlink_to("file")
    (below / "file").touch()
    copies.save(max_bytes=0)
    before = (below / "file").stat()
    (below / "new").touch()
    below.chmod(0o500)
    below.parent.chmod(0o000)
    assert copies.restore_last() == 0
    assert copies.changes() == ([], [], [], [])
    assert (below / "file").stat() == before


def test_the_entries_of_a_read_only_directory_are_restored(workspace: Path) -> None:
    """It got its mode before its entries."""
    copies = WorkspaceCopies(str(workspace))
    closed = workspace / "closed"
    closed.mkdir()
    (closed / "file").touch()
    closed.chmod(0o500)
    copies.save(max_bytes=0)
    closed.chmod(0o700)
    shutil.rmtree(closed)
    assert copies.restore_last() == 0
    assert (closed / "file").exists()
    assert closed.stat().st_mode & 0o777 == 0o500


def test_no_mode_is_changed_through_a_link_in_place_of_a_directory(workspace: Path) -> None:
    copies = WorkspaceCopies(str(workspace / "root"))
    (workspace / "root" / "one" / "two").mkdir(parents=True)
    copies.save(max_bytes=0)
    (workspace / "root" / "one").rename(workspace / "outside")
    (workspace / "outside" / "two").chmod(0o500)
    (workspace / "root" / "one").symlink_to(workspace / "outside")
    assert copies.restore_last() == 0
    assert (workspace / "outside" / "two").stat().st_mode & 0o777 == 0o500


def fill(directory: Path) -> None:
    for number in range(MAX_SEEN + 1):
        (directory / str(number)).touch()
