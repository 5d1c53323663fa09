"""Measures what builds write, so that an archive that unpacks without end is stopped before the disk is full.

It removes what killed builds left, too.

uv unpacks a wheel into a directory of the cache, moves it to its archives when it is complete, and links its files to
where they are installed; places.py has the names. What has come there since a build began counts. Builds that run at
the same time can't be distinguished, so the bound is for all of them together.

The directories belong to the workshops' user and change while they are looked at: no link is followed, and what
vanishes is not counted.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from executor_server.environments.places import has_archives, is_unpacking
from executor_server.environments.uv import INSTALLING

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 256

_Archive = tuple[str, str]  # the directory of the cache that it is in, and its name


@dataclass(frozen=True)
class Volume:
    """Files and directories, and the bytes in them."""

    entries: int = 0
    size_bytes: int = 0

    def __add__(self, other: Volume) -> Volume:
        return Volume(self.entries + other.entries, self.size_bytes + other.size_bytes)

    def fits(self, limit: Volume) -> bool:
        return self.entries <= limit.entries and self.size_bytes <= limit.size_bytes


class DiskWatch:
    """Watches the directory of workshops for the builds that run. Its methods block; one call at a time."""

    def __init__(self, work: str, cache: str) -> None:
        """`work` is a path, `cache` the name of uv's cache in it."""
        self._work = work
        self._cache = cache
        self._before: set[_Archive] = set()  # those that were there when the first of the builds began
        self._complete: dict[_Archive, Volume] = {}  # those that came since; they do not change any more

    def begin(self) -> None:
        """Begins again: no build runs, so archives that are there do not count, and unfinished work is removed."""
        self._complete.clear()
        with _opened(self._work, None) as work:
            if work is not None:
                remove_tree(INSTALLING, work)
        with self._opened_cache() as cache:
            if cache is None:
                self._before = set()
                return
            for name in _names(cache):
                if is_unpacking(name):
                    remove_tree(name, cache)
            self._before = {archive for archive, _ in _archives(cache)}

    def measure(self, limit: Volume) -> Volume:
        """Returns what has come; stops measuring where that is more than the limit."""
        total = Volume()
        with self._opened_cache() as cache:
            if cache is None:
                return total
            for name in _names(cache):
                if is_unpacking(name):
                    total += _volume(cache, name, limit)
            for archive, folder in _archives(cache):
                if archive not in self._before and archive not in self._complete:
                    self._complete[archive] = _volume(folder, archive[1], limit)
        return sum(self._complete.values(), total)

    @contextmanager
    def _opened_cache(self) -> Iterator[int | None]:
        with _opened(self._work, None) as work:
            if work is None:
                yield None
                return
            with _opened(self._cache, work) as cache:
                yield cache


@contextmanager
def _opened(name: str, directory: int | None) -> Iterator[int | None]:
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=directory)
    except OSError:  # not there yet, or not a directory any more
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def remove_tree(name: str, directory: int) -> None:
    """Removes a directory and all that is in it, following no link. Raises OSError; nothing there is fine."""
    try:
        shutil.rmtree(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # deeper than any package is, or than there are descriptors
        subprocess.run(["rm", "-rf", "--", f"/proc/self/fd/{directory}/{name}"], pass_fds=[directory], check=True)


def _archives(cache: int) -> Iterator[tuple[_Archive, int]]:
    """Yields the archives, each with a descriptor of the directory that it is in."""
    for folder in filter(has_archives, _names(cache)):
        with _opened(folder, cache) as archives:
            if archives is not None:
                for name in _names(archives):
                    yield (folder, name), archives


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries]


def _volume(parent: int, name: str, limit: Volume, depth: int = 0) -> Volume:
    """Returns the volume of a directory, or a part of it that is beyond the limit already."""
    entries = size_bytes = 0
    with _opened(name, parent) as fd:
        if fd is None or depth > _MAX_DEPTH:
            return Volume(1, 0)
        with os.scandir(fd) as listed:
            for entry in listed:
                entries += 1
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        below = _volume(fd, entry.name, limit, depth + 1)
                        entries, size_bytes = entries + below.entries, size_bytes + below.size_bytes
                    else:
                        size_bytes += found.st_blocks * 512
                if entries > limit.entries or size_bytes > limit.size_bytes:
                    break
    return Volume(entries, size_bytes)
