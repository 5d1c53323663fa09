"""Watches a directory, and those below it if the watch is recursive: turns events of their files into paths.

The attack: agent code creates thousands of directories, replaces them with links, and moves them during the reading.
Each directory is opened part by part without following links, and watched by its descriptor. All numbers are bounded.
If a bound is reached, or the kernel drops events, changes are reported as missed. One event may require reading
thousands of entries, so the work is split over turns of the supervisor's loop, which has deadlines to keep.
"""

from __future__ import annotations

import os
import time

from ..files.paths import PathRefused, resolve
from ..files.workspace import PART_PREFIX, is_text, open_directory
from . import inotify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

    from .changes import Changes

MAX_DIRECTORIES = 2048
"""Directories of one watch."""
# Entries to search for directories, at the start and in each new directory.
_MAX_LOOKED_AT = 20_000
# Seconds of work in a turn of the loop.
_TURN_TIME_S = 0.005


class TooManyDirectories(Exception):
    """A watch would need more directories than it may have."""


class Tree:
    """The directories of one watch, by their numbers. Raises PathRefused, TooManyDirectories, OSError."""

    def __init__(self, root: str, path: str, changes: Changes, *, recursive: bool) -> None:
        self._changes = changes
        self._recursive = recursive
        self._paths: dict[int, str] = {}  # relative to the root
        self._inotify = inotify.Inotify()
        self.fd = self._inotify.fd
        self.gone = False
        self.busy = False
        self._new: dict[str, None] = {}  # directories to watch, in order
        self._lost = False  # the kernel has dropped events
        self._steps: Iterator[None] = iter(())
        try:
            # An absolute path may contain links; changes are reported below the directory that it leads to.
            self._root, self._prefix = root, ""
            if path.startswith("/"):
                with resolve(root, path) as place:
                    self._root, self._prefix, path = "/", "/", place.path.lstrip("/")
            directory, self._path = open_directory(self._root, path)
            os.close(directory)
            for _ in self._look(self._path, new=False):
                pass
        except BaseException:
            self._inotify.close()
            raise

    def close(self) -> None:
        self._steps = iter(())  # closes what it reads
        self._inotify.close()

    def read(self) -> None:
        """Notes changes for one turn of the loop.

        Afterwards `busy` is true if there is more to do, and `gone` if the directory itself is no longer in its place.
        """
        until = time.monotonic() + _TURN_TIME_S
        if not self.busy:
            self._steps = self._noting()
        self.busy = True
        for _ in self._steps:
            if time.monotonic() >= until:
                return
        self.busy = False

    def _noting(self) -> Iterator[None]:
        """Processes the events of one read, then the new directories. Yields after each small step."""
        for watch, mask, name in self._inotify.read():
            self._take(watch, mask, name)
            yield
        if self._lost:
            self._lost = False
            yield from self._look_again()
        while self._new:
            path = next(iter(self._new))
            del self._new[path]
            yield from self._adopt(path)

    def _take(self, watch: int, mask: int, raw_name: bytes) -> None:
        if mask & inotify.OVERFLOW:
            self._changes.overflow()
            self._lost = True
            return
        parent = self._paths.get(watch)
        if parent is None:
            return  # its directory was moved away
        if mask & inotify.IGNORED:
            del self._paths[watch]
        elif mask & (inotify.DELETE_SELF | inotify.MOVE_SELF):
            self.gone = self.gone or parent == self._path
        else:
            self._note(parent, mask, os.fsdecode(raw_name))

    def _note(self, parent: str, mask: int, name: str) -> None:
        path = f"{parent}/{name}" if parent else name
        if not name or name.startswith(PART_PREFIX) or not is_text(name):
            return  # as in listings
        directory = bool(mask & inotify.IS_DIRECTORY)
        if mask & (inotify.CREATE | inotify.MOVED_TO):
            self._changes.note(self._prefix + path, "created", directory=directory)
            if directory and self._recursive:
                self._new[path] = None
        elif mask & (inotify.DELETE | inotify.MOVED_FROM):
            self._changes.note(self._prefix + path, "deleted", directory=directory)
            if directory:
                self._new.pop(path, None)
                self._forget(path)
        elif mask & inotify.MODIFY:
            self._changes.note(self._prefix + path, "changed", directory=directory)

    def _forget(self, path: str) -> None:
        """Ends the watches of a directory that left its place, and of those below it."""
        for watch, known in tuple(self._paths.items()):
            if known == path or known.startswith(f"{path}/"):
                del self._paths[watch]
                self._inotify.remove(watch)

    def _adopt(self, path: str) -> Iterator[None]:
        """Watches a new directory, and notes its content, which may be older than the watch."""
        try:
            yield from self._look(path, new=True)
        except (TooManyDirectories, OSError):
            self._changes.overflow()
        except PathRefused:
            pass  # gone, or no longer a directory, as its own events report

    def _look_again(self) -> Iterator[None]:
        """Finds the directories again after lost events. No event names the new files, so clients have to list them."""
        known, self._paths = self._paths, {}
        try:
            yield from self._look(self._path, new=False)
        except (TooManyDirectories, OSError):
            pass  # the overflow has been noted
        except PathRefused:
            self.gone = True
        for watch in known:
            if watch not in self._paths:  # deleted meanwhile, and the event about it is lost
                self._inotify.remove(watch)

    def _look(self, path: str, *, new: bool) -> Iterator[None]:
        waiting, looked_at = [path], 0
        while waiting:
            here = waiting.pop()
            try:
                directory, _ = open_directory(self._root, here)
            except PathRefused:
                if here == path:
                    raise
                continue
            try:
                self._watch(directory, here)
                if not (self._recursive or new):
                    return
                with os.scandir(directory) as entries:
                    for entry in entries:
                        looked_at += 1
                        if looked_at > _MAX_LOOKED_AT:
                            raise TooManyDirectories
                        self._look_at(entry, here, waiting, new=new)
                        yield
            finally:
                os.close(directory)

    def _look_at(self, entry: os.DirEntry[str], here: str, waiting: list[str], *, new: bool) -> None:
        name = entry.name
        if name.startswith(PART_PREFIX) or not is_text(name):
            return
        try:
            directory = entry.is_dir(follow_symlinks=False)
        except OSError:
            return  # this file system does not report the type with the name, and the entry is gone
        path = f"{here}/{name}" if here else name
        if new:
            self._changes.note(self._prefix + path, "created", directory=directory)
        if directory and self._recursive:
            waiting.append(path)

    def _watch(self, directory: int, path: str) -> None:
        if len(self._paths) >= MAX_DIRECTORIES and path not in self._paths.values():
            raise TooManyDirectories
        self._paths[self._inotify.add(directory)] = path
