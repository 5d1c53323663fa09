"""Directories are measured as builds write to them, and removed whatever they have become."""

from __future__ import annotations

from pathlib import Path

from executor_server.packages.disk import MAX_DEPTH, Volume, remove, volume_of


def filled(directory: Path, files: int, size_bytes: int = 4096) -> None:
    directory.mkdir(parents=True)
    for number in range(files):
        (directory / str(number)).write_bytes(bytes(size_bytes))


def test_files_directories_and_bytes_are_counted(tmp_path: Path) -> None:
    filled(tmp_path / "cache/package", 3)
    found = volume_of(tmp_path)
    assert found == Volume(2 + 3, 3 * 4096)
    assert found.fits(Volume(5, 3 * 4096)) and not found.fits(Volume(4, 10**9)) and not found.fits(Volume(10, 4096))


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    filled(tmp_path / "cache", 1)
    (tmp_path / "site").hardlink_to(tmp_path / "cache/0")
    assert volume_of(tmp_path) == Volume(2, 4096)


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside, work = tmp_path / "outside", tmp_path / "work"
    filled(outside, 50)
    work.mkdir()
    (work / "link").symlink_to(outside)
    assert volume_of(work).entries == 1
    remove(work)
    assert not work.exists() and len(list(outside.iterdir())) == 50


def test_a_tree_that_is_too_deep_counts_as_endless_and_is_removed(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.joinpath(*["d"] * (MAX_DEPTH - 1)).mkdir(parents=True)
    assert volume_of(tmp_path).entries == MAX_DEPTH
    deep.joinpath(*["d"] * 200).mkdir(parents=True)
    assert volume_of(tmp_path) == Volume(float("inf"), 0)
    remove(deep)
    assert not deep.exists()


def test_what_is_not_there_has_no_volume_and_need_not_be_removed(tmp_path: Path) -> None:
    assert volume_of(tmp_path / "none") == Volume()
    remove(tmp_path / "none")
