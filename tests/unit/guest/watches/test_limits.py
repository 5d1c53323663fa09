"""A watch that the host or the kernel does not give, and events that the kernel drops."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from executor_server.guest.watches import inotify, tree
from executor_server.guest.watches.changes import Changes
from executor_server.guest.watches.watches import Watches
from executor_server.guest.wire.file_changes import WatchFiles
from executor_server.guest.wire.loop import Loop


class Channel:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.refused: list[tuple[int, str, str]] = []

    def fail(self, op: int, reason: str, message: str) -> None:
        self.refused.append((op, reason, message))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_full_limit_of_the_host_refuses_the_watch_and_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, "full")

    monkeypatch.setattr(inotify.Inotify, "add", full)
    loop, channel = Loop(), Channel()
    watches = Watches(channel, loop, str(tmp_path))  # type: ignore[arg-type]
    watches.take(WatchFiles(op=1, path="", recursive=True))
    loop.close()
    ((op, reason, message),) = channel.refused
    assert (op, reason) == (1, "queue_full") and "fs.inotify" in message


def test_dropped_events_are_said_and_directories_that_came_meanwhile_are_watched(tmp_path: Path) -> None:
    changes = Changes()
    watched = tree.Tree(str(tmp_path), "", changes, recursive=True)
    (tmp_path / "sub").mkdir()
    watched._take(-1, inotify.OVERFLOW, b"")
    assert changes.take(1000, 10_000)[1]
    watched.read()
    changes.take(1000, 10_000)
    (tmp_path / "sub" / "file").touch()
    watched.read()
    watched.close()
    assert [each.path for each in changes.take(1000, 10_000)[0]] == ["sub/file"]


def test_a_name_that_is_no_text_is_left_out_as_in_listings(tmp_path: Path) -> None:
    changes = Changes()
    watched = tree.Tree(str(tmp_path), "", changes, recursive=True)
    Path(str(tmp_path) + "/bad-\udcff").touch()
    (tmp_path / "good").touch()
    watched.read()
    watched.close()
    assert [each.path for each in changes.take(1000, 10_000)[0]] == ["good"]


def test_after_dropped_events_no_file_is_called_new_and_no_dead_directory_counts(tmp_path: Path) -> None:
    """No event says what is new then; and each overflow used to leave the numbers of deleted directories behind."""
    (tmp_path / "old").touch()
    (tmp_path / "sub").mkdir()
    changes = Changes()
    watched = tree.Tree(str(tmp_path), "", changes, recursive=True)
    (tmp_path / "sub").rmdir()
    watched._take(-1, inotify.OVERFLOW, b"")
    for _ in watched._look_again():
        pass
    found, overflowed = changes.take(1000, 10_000)
    paths = list(watched._paths.values())
    watched.close()
    assert overflowed and found == [] and paths == [""]


def test_a_watched_directory_that_is_gone_after_dropped_events_ends_the_watch(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    watched = tree.Tree(str(tmp_path), "sub", Changes(), recursive=True)
    (tmp_path / "sub").rmdir()
    watched._take(-1, inotify.OVERFLOW, b"")
    watched.read()
    watched.close()
    assert watched.gone


def test_a_large_tree_that_moves_in_and_out_is_looked_at_once_and_in_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look for each move kept the supervisor from its deadlines for a minute."""
    inside, outside = tmp_path / "watched", tmp_path / "tree"
    inside.mkdir()
    outside.mkdir()
    for number in range(500):
        (outside / f"{number}").touch()
    changes = Changes()
    watched = tree.Tree(str(tmp_path), "watched", changes, recursive=True)
    for _ in range(100):
        outside.rename(inside / "tree")
        (inside / "tree").rename(outside)
    outside.rename(inside / "tree")
    monkeypatch.setattr(tree, "_TURN_TIME_S", 0.0)
    turns = 1
    watched.read()
    while watched.busy:
        watched.read()
        turns += 1
    watched.close()
    assert 500 < turns < 1000, "one step in each turn: for an event, or an entry"
    assert len(changes.take(1000, 100_000)[0]) == 501


def test_the_first_watch_imports_nothing_of_the_images_library() -> None:
    """It is imported after agent code has run, which may be able to write to that library."""
    program = (
        "import sys; import executor_server.guest.main; before = set(sys.modules);"
        "import executor_server.guest.watches.watches;"
        "print(sorted(n for n in set(sys.modules) - before if not n.startswith('executor_')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.strip() == "[]"
