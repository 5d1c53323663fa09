"""Requests about files that transfer no content: describe, resolve, make a directory, move, remove.

Removing a directory is done in steps, one for each turn of the supervisor's loop.
"""

from __future__ import annotations

import errno
import os
import stat

from executor_api.limits import PATH_BYTES_MAX

from ..wire.messages import FileEntry
from .paths import READ_DIRECTORY, PathRefused, describe, refused, resolve
from .workspace import is_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Union

    from ..wire.messages import ManageFile
    from .paths import Place

# Entries that one step of a removal reads, steps of a removal, and directories within each other.
_ENTRIES_A_STEP = 256
_MAX_STEPS = 100_000
_MAX_DEPTH = 10_000
_MAX_SHOWN_CHARS = 200
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
# Errors for an entry that agent code removed or replaced since it was listed.
_SWAPPED = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


def manage(root: str, request: ManageFile) -> Union[FileEntry, Removal, None]:
    """Performs the request; the removal of a directory has only begun. Raises PathRefused."""
    return _ACTIONS[request.action](root, request)


def _stat(root: str, request: ManageFile) -> FileEntry:
    with resolve(root, request.path, follow=request.follow) as place:
        if place.status is None:
            raise _missing(place)
        target = place.link_target() if stat.S_ISLNK(place.status.st_mode) else None
        return describe(place.asked, place.status, target)


def _realpath(root: str, request: ManageFile) -> FileEntry:
    with resolve(root, request.path, partly=True) as place:
        path = place.path
        if not is_text(path) or len(path.encode()) > PATH_BYTES_MAX:
            raise PathRefused(f"{place.asked!r} leads to a path of more than {PATH_BYTES_MAX} bytes, or not UTF-8")
        if place.status is None:
            return FileEntry(path=path, size=0, directory=False, modified=0.0)
        return describe(path, place.status)


def _make_directory(root: str, request: ManageFile) -> FileEntry:
    with resolve(root, request.path, create=request.parents) as place:
        try:
            if place.status is None:
                os.mkdir(place.name, 0o755, dir_fd=place.directory)
            elif not (request.exist_ok and stat.S_ISDIR(place.status.st_mode)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        except OSError as error:
            raise refused(error, place.asked) from error
        place.enter_last()
        return describe(place.asked, os.fstat(place.directory))


def _move(root: str, request: ManageFile) -> FileEntry:
    with resolve(root, request.path, follow=False) as source, resolve(root, request.target, follow=False) as target:
        _require_name(source)
        _require_name(target)
        if source.status is None:
            raise _missing(source)
        try:
            os.rename(source.name, target.name, src_dir_fd=source.directory, dst_dir_fd=target.directory)
            status = os.stat(target.name, dir_fd=target.directory, follow_symlinks=False)
        except OSError as error:
            raise refused(error, target.asked) from error
        return describe(target.asked, status, target.link_target() if stat.S_ISLNK(status.st_mode) else None)


def _remove(root: str, request: ManageFile) -> Optional[Removal]:
    try:
        place = resolve(root, request.path, follow=False)
    except PathRefused as problem:
        if request.missing_ok and problem.reason == "file_not_found":
            return None
        raise
    with place:
        _require_name(place)
        if place.status is None:
            if request.missing_ok:
                return None
            raise _missing(place)
        if not stat.S_ISDIR(place.status.st_mode):
            try:
                os.unlink(place.name, dir_fd=place.directory)
            except OSError as error:
                raise refused(error, place.asked) from error
            return None
        if not request.recursive:
            raise PathRefused(f"{place.asked!r} is a directory: remove it with `recursive`", "file_is_directory")
        return Removal(place)


def _missing(place: Place) -> PathRefused:
    return refused(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), place.asked)


def _require_name(place: Place) -> None:
    if not place.name:
        raise PathRefused(f"{place.asked or '.'!r} names no entry of a directory, but a directory from within")


_ACTIONS = {"stat": _stat, "realpath": _realpath, "mkdir": _make_directory, "move": _move, "remove": _remove}


class Removal:
    """The removal of a directory with everything in it; follows no link.

    Only the directory that is being emptied is open, so that a deep tree needs no more descriptors than a flat one. The
    way back is "..", which counts only if it leads to the directory that we came from: agent code may move directories.
    """

    def __init__(self, place: Place) -> None:
        """The place stays its caller's. Raises PathRefused."""
        self._asked = place.asked
        self._fd = place.open(READ_DIRECTORY)  # the directory that is being emptied
        self._parent = os.dup(place.directory)
        # The directories from the top to the open one, with their identities.
        self._way = [(place.name, _identity(self._fd))]
        self._steps = 0
        self._name = ""  # of the last entry

    def step(self) -> bool:
        """Removes some entries; true when all is removed. Raises PathRefused for one that can't be."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise PathRefused(f"{self._asked!r} has too many entries, or gets new ones: run `rm -r`", "too_large")
        try:
            return self._step()
        except OSError as error:
            names = [self._asked, *(name for name, _ in self._way[1:]), self._name]
            raise refused(error, "/".join(filter(None, names))[-_MAX_SHOWN_CHARS:]) from error

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._parent)

    def _step(self) -> bool:
        left = _ENTRIES_A_STEP
        while left > 0:
            inner = ""
            with os.scandir(self._fd) as entries:
                for entry in entries:
                    left -= 1
                    self._name = entry.name
                    if not self._remove(entry):
                        inner = entry.name
                        break
                    if not left:
                        return False
            left -= 1
            if inner:
                self._go_down(inner)
            elif self._go_up():
                return True
        return False

    def _remove(self, entry: os.DirEntry[str]) -> bool:
        """Removes an entry; false for a directory that is not empty."""
        try:
            if entry.is_dir(follow_symlinks=False):
                os.rmdir(entry.name, dir_fd=self._fd)
            else:
                os.unlink(entry.name, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                return False
            if error.errno not in _SWAPPED:
                raise
        return True

    def _go_down(self, name: str) -> None:
        if len(self._way) == _MAX_DEPTH:
            raise PathRefused(f"{self._asked!r} is deeper than {_MAX_DEPTH} directories: run `rm -r`", "too_large")
        try:
            inner = os.open(name, READ_DIRECTORY, dir_fd=self._fd)
        except OSError as error:
            if error.errno in _SWAPPED:
                return
            raise
        os.close(self._fd)
        self._fd = inner
        self._way.append((name, _identity(inner)))

    def _go_up(self) -> bool:
        """Removes the open directory, which had no entries, and opens the one above; true if that was the top."""
        name, _ = self._way[-1]
        self._name, directory = "", self._parent
        if len(self._way) > 1:
            directory = os.open("..", READ_DIRECTORY, dir_fd=self._fd)
            if _identity(directory) != self._way[-2][1]:
                os.close(directory)
                raise PathRefused(f"{self._asked!r} was moved while it was removed")
            os.close(self._fd)
            self._fd = directory
            self._way.pop()
            self._name = name
        try:
            os.rmdir(name, dir_fd=directory)
        except OSError as error:
            if error.errno in _NOT_EMPTY:
                return False  # it got new entries
            if error.errno not in _SWAPPED:
                raise
        return len(self._way) == 1 and directory == self._parent


def _identity(directory: int) -> tuple[int, int]:
    status = os.fstat(directory)
    return status.st_dev, status.st_ino
