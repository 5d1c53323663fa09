"""A watched directory and, when it is recursive, those below it: the events of their files as paths.

The attack: agent code makes directories by the thousand, swaps them for links, moves them about while they are read.
Each directory is opened part by part without following a link, and watched by its descriptor. All numbers are bounded;
where a bound is reached, or the kernel has dropped events, changes are reported as missed.
"""

from __future__ import annotations

import os
import stat

from ..files.workspace import PART_PREFIX, PathRefused, is_text, open_directory
from . import inotify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .changes import Changes

MAX_DIRECTORIES = 2048
"""Directories of one watch."""
# Entries that are looked at for the directories among them, at the start and for each new directory.
_MAX_LOOKED_AT = 20_000
# Reads in a turn of the loop, each of some thousand events at most.
_READS_PER_EVENT = 4


class TooManyDirectories(Exception):
    """There are more than one watch may have."""


class Tree:
    """The directories of one watch, by their numbers. Raises PathRefused, TooManyDirectories, OSError."""

    def __init__(self, root: str, path: str, changes: Changes, *, recursive: bool) -> None:
        self._root = root
        self._changes = changes
        self._recursive = recursive
        self._paths: dict[int, str] = {}  # relative to the workspace
        self._inotify = inotify.Inotify()
        self.fd = self._inotify.fd
        self.gone = False
        try:
            directory, self._path = open_directory(root, path)
            os.close(directory)
            self._look(self._path, new=False)
        except BaseException:
            self._inotify.close()
            raise

    def close(self) -> None:
        self._inotify.close()

    def read(self) -> None:
        """Notes what has happened. `gone` is true then when the directory itself is no more where it was."""
        for _ in range(_READS_PER_EVENT):
            events = list(self._inotify.read())
            for watch, mask, name in events:
                self._take(watch, mask, name)
            if not events:
                return

    def _take(self, watch: int, mask: int, raw_name: bytes) -> None:
        if mask & inotify.OVERFLOW:
            self._changes.overflow()
            self._look_again()
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
            self._changes.note(path, "created", directory=directory)
            if directory and self._recursive:
                self._adopt(path)
        elif mask & (inotify.DELETE | inotify.MOVED_FROM):
            self._changes.note(path, "deleted", directory=directory)
            if directory:
                self._forget(path)
        elif mask & inotify.MODIFY:
            self._changes.note(path, "changed", directory=directory)

    def _forget(self, path: str) -> None:
        """Ends the watches of a directory that is gone from its place, and of those below it."""
        for watch, known in tuple(self._paths.items()):
            if known == path or known.startswith(f"{path}/"):
                del self._paths[watch]
                self._inotify.remove(watch)

    def _adopt(self, path: str) -> None:
        """Watches a directory that is new, and notes what is in it: it may have come before the watch."""
        try:
            self._look(path, new=True)
        except (TooManyDirectories, OSError):
            self._changes.overflow()
        except PathRefused:
            pass  # gone again, or no directory any more, which its own events say

    def _look_again(self) -> None:
        """Finds the directories again after lost events. A listing shows what is in them: no event says what is new."""
        known, self._paths = self._paths, {}
        try:
            self._look(self._path, new=False)
        except (TooManyDirectories, OSError):
            pass  # the overflow has been noted
        except PathRefused:
            self.gone = True
        for watch in known:
            if watch not in self._paths:  # deleted meanwhile, and the event that said so is lost
                self._inotify.remove(watch)

    def _look(self, path: str, *, new: bool) -> None:
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
                        self._look_at(entry, directory, here, waiting, new=new)
            finally:
                os.close(directory)

    def _look_at(self, entry: os.DirEntry[str], directory: int, here: str, waiting: list[str], *, new: bool) -> None:
        name = entry.name
        if name.startswith(PART_PREFIX) or not is_text(name):
            return
        try:
            mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        except OSError:
            return  # gone again
        path = f"{here}/{name}" if here else name
        if new:
            self._changes.note(path, "created", directory=stat.S_ISDIR(mode))
        if stat.S_ISDIR(mode) and self._recursive:
            waiting.append(path)

    def _watch(self, directory: int, path: str) -> None:
        if len(self._paths) >= MAX_DIRECTORIES and path not in self._paths.values():
            raise TooManyDirectories
        self._paths[self._inotify.add(directory)] = path
