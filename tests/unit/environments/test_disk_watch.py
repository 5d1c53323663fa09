"""Builds are measured for what they write, and what killed ones left is removed."""

from __future__ import annotations

from pathlib import Path

from executor_server.environments.disk_watch import DiskWatch, Volume

LIMIT = Volume(1000, 10**9)


def filled(directory: Path, files: int, size_bytes: int = 4096) -> None:
    directory.mkdir(parents=True)
    for number in range(files):
        (directory / str(number)).write_bytes(bytes(size_bytes))


def test_what_comes_after_the_beginning_counts(tmp_path: Path) -> None:
    watch = DiskWatch(str(tmp_path), "cache")
    filled(tmp_path / "cache/archive-v0/old", 5)
    watch.begin()
    assert watch.measure(LIMIT) == Volume()
    filled(tmp_path / "cache/.tmpA/package", 3)
    filled(tmp_path / "cache/archive-v0/new", 2)
    found = watch.measure(LIMIT)
    assert found.entries == 3 + 1 + 2 and 5 * 4096 <= found.size_bytes < 6 * 4096 + 65536
    assert found.fits(LIMIT) and not found.fits(Volume(5, 10**9)) and not found.fits(Volume(1000, 4096))


def test_every_form_of_the_archives_is_watched(tmp_path: Path) -> None:
    """A newer uv may keep them in another directory, beside that of an older one."""
    watch = DiskWatch(str(tmp_path), "cache")
    filled(tmp_path / "cache/archive-v0/same", 5)
    filled(tmp_path / "cache/archive-v1/old", 5)
    watch.begin()
    assert watch.measure(LIMIT) == Volume()
    filled(tmp_path / "cache/archive-v1/same", 2)
    assert watch.measure(LIMIT).entries == 2


def test_measuring_stops_at_the_limit(tmp_path: Path) -> None:
    watch = DiskWatch(str(tmp_path), "cache")
    watch.begin()
    filled(tmp_path / "cache/.tmpA", 500, 0)
    assert watch.measure(Volume(10, 10**9)).entries == 11


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    filled(outside, 50)
    watch = DiskWatch(str(tmp_path / "work"), "cache")
    cache = tmp_path / "work/cache"
    cache.mkdir(parents=True)
    (cache / ".tmpA").symlink_to(outside)
    (cache / "archive-v0").symlink_to(outside)
    assert watch.measure(LIMIT).entries <= 1


def test_unfinished_work_is_removed_however_deep(tmp_path: Path) -> None:
    watch = DiskWatch(str(tmp_path), "cache")
    filled(tmp_path / "installing/x/site", 3)
    filled(tmp_path / "cache/.tmpA", 3)
    filled(tmp_path / "cache/archive-v0/kept", 1)
    deep = tmp_path / "deep"
    deep.mkdir()
    for number in range(10):  # from below, as one path may not be that long
        chain = tmp_path / f"chain-{number}"
        bottom = chain.joinpath(*["d"] * 150)
        bottom.mkdir(parents=True)
        deep.rename(bottom / "d")
        deep = chain
    deep.rename(tmp_path / "cache/.tmpB")
    watch.begin()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["archive-v0"]
