"""Artifacts are distinguished from files that were there before by what the file system records."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from executor_api.limits import ARTIFACTS_MAX
from executor_server.guest.files import artifacts
from executor_server.guest.files.artifacts import ArtifactFinder, Artifacts
from executor_server.guest.files.transfers import Transfers
from executor_server.guest.wire.messages import FileData, FilePut
from tests.support.descriptors import none_left_open


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "workspace"
    (root / "d").mkdir(parents=True)
    (root / "old").write_bytes(b"old")
    (root / "d/old").write_bytes(b"old")
    with none_left_open():
        yield root
    root.chmod(0o755)


def found(watch: Artifacts) -> list[str]:
    entries, truncated = watch.found()
    assert not truncated
    return [entry.path for entry in entries]


def rewrite_in_place(root: Path) -> None:
    """The same size, and a time of modification that was put back but for a nanosecond."""
    status = (root / "d/old").stat()
    (root / "d/old").write_bytes(b"new")
    os.utime(root / "d/old", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(root: Path) -> None:
    status = (root / "d/old").stat()
    (root / "new").write_bytes(b"new")
    os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "new").rename(root / "d/old")


def append(root: Path) -> None:
    with (root / "old").open("ab") as file:
        file.write(b"more")


def nothing(_root: Path) -> None: ...


def make_directory(root: Path) -> None:
    (root / "e").mkdir()
    (root / "e/f").touch()


def make_odd_ones(root: Path) -> None:
    (root / "e").mkdir()
    (root / "f").symlink_to("old")
    (root / "g").symlink_to("/etc")
    os.mkfifo(root / "p")


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing": (nothing, []),
    "made": (lambda root: (root / "d/new").write_bytes(b"1"), ["d/new"]),
    "made in a new directory": (make_directory, ["e/f"]),
    "appended": (append, ["old"]),
    "rewritten": (rewrite_in_place, ["d/old"]),
    "replaced": (replace, ["d/old"]),
    "renamed": (lambda root: (root / "old").rename(root / "older"), ["older"]),
    "removed": (lambda root: (root / "old").unlink(), []),
    "a directory, links, a FIFO": (make_odd_ones, []),
    "a file on its way in": (lambda root: (root / ".executor-part-7").touch(), []),
    "a name that is not text": (lambda root: os.mknod(os.fsencode(root) + b"/\xff"), []),
}


@pytest.mark.parametrize("what", CHANGES)
def test_regular_files_that_were_made_or_changed_are_found(root: Path, what: str) -> None:
    change, expected = CHANGES[what]
    watch = Artifacts(str(root))
    change(root)
    assert found(watch) == expected


def test_they_are_described_sorted_by_path(root: Path) -> None:
    watch = Artifacts(str(root))
    (root / "z").write_bytes(b"12")
    (root / "z").chmod(0o640)
    (root / "b").touch()
    os.utime(root / "z", (0, 1e9))
    first, last = watch.found()[0]
    assert first.path == "b"
    owner = {"uid": os.getuid(), "gid": os.getgid()}
    assert last.head() == {"path": "z", "size": 2, "directory": False, "modified": 1e9, "mode": 0o640, **owner}


def test_at_most_so_many_are_listed(root: Path) -> None:
    watch = Artifacts(str(root))
    for number in range(ARTIFACTS_MAX + 1):
        (root / f"f{number:04}").touch()
    entries, truncated = watch.found()
    assert (len(entries), entries[-1].path, truncated) == (ARTIFACTS_MAX, f"f{ARTIFACTS_MAX - 1:04}", True)


def test_of_more_files_than_are_remembered_the_old_ones_are_not_taken_for_new(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of their last change decides, with the precision of the clock that stamps files."""
    monkeypatch.setattr(artifacts, "MAX_REMEMBERED", 1)
    made = max(path.stat().st_ctime_ns for path in root.rglob("*"))
    while artifacts.stamp_ns() <= made:
        pass
    watch = Artifacts(str(root))
    (root / "d/new").touch()
    with (root / "old").open("a") as file:
        file.write("more")
    assert found(watch) == ["d/new", "old"]


def test_no_more_than_so_many_entries_are_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MAX_LOOKED_AT", 1)
    assert Artifacts(str(root)).found()[1]


def test_what_a_client_puts_meanwhile_is_not_the_programs_until_it_changes_it(root: Path) -> None:
    channel = SimpleNamespace(connected=True, full=False, done=lambda *_, **__: None)
    watch = Artifacts(str(root))
    transfers = Transfers(channel, str(root), watch.put_by_client)  # type: ignore[arg-type]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("of/an/archive"))
    for op, (path, data) in enumerate({"a": b"1", "b": b"1", "": raw.getvalue()}.items()):
        transfers.begin_file(FilePut(op=op, path=path, size=len(data), tar=not path))
        transfers.add_to_file(FileData(op=op), memoryview(data))
    assert (root / "of/an/archive").exists()
    (root / "b").write_bytes(b"2")
    assert found(watch) == ["b"]


def test_a_workspace_that_cannot_be_read_is_not_taken_for_empty(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Artifacts(str(root))
    root.rename(root.with_name("gone"))
    assert watch.found() == ([], True)
    root.with_name("gone").rename(root)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace that was made a minute ago, as far as its clock shows."""
    made_ns = tmp_path.stat().st_ctime_ns
    monkeypatch.setattr(artifacts, "time", SimpleNamespace(time_ns=lambda: made_ns + 60 * 10**9))
    root = tmp_path / "empty"
    root.mkdir()
    return root


def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    scan = artifacts.Scan

    def noted(root: str, at_most: int) -> artifacts.Scan:
        done.append(root)
        return scan(root, at_most)

    monkeypatch.setattr(artifacts, "Scan", noted)
    return done


def test_an_empty_workspace_is_scanned_once(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, finder = scans(monkeypatch), ArtifactFinder(str(empty))
    for _ in range(3):
        assert found(finder.begin()) == []
    assert len(done) == 1


def test_files_are_found_in_a_workspace_that_was_empty(empty: Path) -> None:
    finder = ArtifactFinder(str(empty))
    for name in ("a", "b"):
        watch = finder.begin()
        (empty / name).write_bytes(b"new")
        assert found(watch) == [name]
    assert found(finder.begin()) == []
    watch = finder.begin()
    (empty / "a").write_bytes(b"newer")
    assert found(watch) == ["a"]


def test_a_file_below_a_directory_is_found_though_the_workspace_itself_has_not_changed(empty: Path) -> None:
    (empty / "d").mkdir()
    finder = ArtifactFinder(str(empty))
    assert found(finder.begin()) == []
    watch = finder.begin()
    (empty / "d/new").write_bytes(b"new")
    assert found(watch) == ["d/new"]


def test_a_time_of_change_that_may_be_that_of_the_next_change_is_not_believed(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's clock for files stands still for some milliseconds."""
    now_ns = empty.stat().st_ctime_ns
    monkeypatch.setattr(artifacts, "time", SimpleNamespace(time_ns=lambda: now_ns + 10**6))
    done, finder = scans(monkeypatch), ArtifactFinder(str(empty))
    assert found(finder.begin()) == []
    assert len(done) == 2


def test_a_workspace_that_was_closed_to_the_supervisor_is_not_taken_for_an_empty_one(empty: Path) -> None:
    finder = ArtifactFinder(str(empty.parent / "missing"))
    assert finder.begin().found() == ([], True)
