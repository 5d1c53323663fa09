"""The disk that environments and the cache take, where hard links let them share files.

Each inode counts once, however many names it has. An environment's own bytes are so few that its removal alone frees
next to nothing: its packages stay in the cache. So archives of the cache that no environment has any more go first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from executor_server.environments.places import Places

_BLOCK_BYTES = 512  # the unit of st_blocks

Inodes = dict[tuple[int, int], int]
"""Bytes on disk by device and inode."""


@dataclass(frozen=True)
class DiskUse:
    """A measurement: everything below the root of environments."""

    total_bytes: int
    environments: Mapping[str, Inodes]
    archives: Mapping[Path, Inodes]  # unpacked wheels of the cache, the oldest first
    others: Inodes = field(repr=False)


def measure(places: Places) -> DiskUse:
    """Walks all directories. Blocks: about a second for 100,000 files. Raises OSError."""
    environments = {path.name: inodes_of(path) for path in places.ready.iterdir()}
    archives = {path: inodes_of(path) for path in places.archives()}
    others: Inodes = {}
    for directory in places.root.iterdir():
        if directory != places.ready:
            others.update(inodes_of(directory, archives))
    everything = dict(others)
    for inodes in (*environments.values(), *archives.values()):
        everything.update(inodes)
    return DiskUse(sum(everything.values()), environments, archives, others)


@dataclass(frozen=True)
class Removal:
    """Something to remove, and what it frees when all before it have been removed."""

    what: str | Path  # an environment by its id, or an archive of the cache
    freed_bytes: int


def to_remove(use: DiskUse, max_bytes: int, unused: Sequence[str]) -> list[Removal]:
    """Chooses what to remove until `max_bytes` are left, or nothing more can be.

    First the archives that no environment has, then environments, as `unused` orders them, each with the archives that
    no other has.
    """
    left = _Remaining(use)
    chosen = [left.remove(path) for path in left.unlinked(use.archives) if left.total_bytes > max_bytes]
    for environment_id in unused:
        if left.total_bytes <= max_bytes:
            break
        if environment_id in use.environments:
            chosen.append(left.remove(environment_id))
            chosen += [left.remove(path) for path in left.unlinked(left.archives_of(environment_id))]
    return chosen


class _Remaining:
    """Counts who has each inode, while environments and archives are removed in thought."""

    def __init__(self, use: DiskUse) -> None:
        self.total_bytes = use.total_bytes
        self._parts: dict[str | Path, Inodes] = dict([*use.environments.items(), *use.archives.items()])
        self._archive_of = {inode: path for path, inodes in use.archives.items() for inode in inodes}
        self._in_environments = Counter(inode for inodes in use.environments.values() for inode in inodes)
        self._users = self._in_environments + Counter(inode for part in use.archives.values() for inode in part)
        self._users.update(use.others.keys())
        self._removed: set[Path] = set()

    def remove(self, what: str | Path) -> Removal:
        freed_bytes = 0
        for inode, size_bytes in self._parts[what].items():
            self._users[inode] -= 1
            if not self._users[inode]:
                freed_bytes += size_bytes
            if isinstance(what, str):
                self._in_environments[inode] -= 1
        if isinstance(what, Path):
            self._removed.add(what)
        self.total_bytes -= freed_bytes
        return Removal(what, freed_bytes)

    def unlinked(self, archives: Iterable[Path]) -> Iterator[Path]:
        """Yields those that are left and share no file with an environment."""
        for path in archives:
            if path not in self._removed and not any(self._in_environments[inode] for inode in self._parts[path]):
                yield path

    def archives_of(self, environment_id: str) -> list[Path]:
        shared = (self._archive_of.get(inode) for inode in self._parts[environment_id])
        return list(dict.fromkeys(path for path in shared if path is not None))


def inodes_of(path: Path, skipped: Iterable[Path] = ()) -> Inodes:
    """Returns all inodes below a path, and its own. What is removed meanwhile is left out. Raises OSError."""
    skip = set(skipped)
    found: Inodes = {}
    try:
        status = path.lstat()
    except FileNotFoundError:
        return found
    found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    waiting = [path] if path.is_dir() and not path.is_symlink() else []
    while waiting:
        for entry in _listed(waiting.pop()):
            if Path(entry.path) in skip:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
    return found


def _listed(directory: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as listing:
            yield from listing
    except FileNotFoundError:
        return


def archives_of(places: Places, environment: Path) -> list[Path]:
    """Returns the archives of the cache that share a file with an environment. Blocks. Raises OSError."""
    wanted = inodes_of(environment).keys()
    return [path for path in places.archives() if not wanted.isdisjoint(inodes_of(path))]


def archives_with(places: Places, infos: Collection[str]) -> list[Path]:
    """Returns the archives that have a directory of metadata with one of these names. Blocks. Raises OSError."""
    return [path for path in places.archives() if any((path / info).is_dir() for info in infos)]
