"""Copies of a workspace that has more entries than are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.guest.interpreter import workspace_copies
from executor_server.guest.interpreter.workspace_copies import WorkspaceCopies

MAX_SEEN = 10


@pytest.fixture(autouse=True)
def low_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_copies, "_MAX_SEEN", MAX_SEEN)


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


def fill(directory: Path) -> None:
    for number in range(MAX_SEEN + 1):
        (directory / str(number)).touch()
