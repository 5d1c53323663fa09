"""Copies of the workspace's files in the interpreter's memory, for its savepoints.

A fork shares memory, so eight savepoints hold an unchanged file once. The paths are agent code's, so no link is
followed out of the workspace, and nothing that could block is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Optional, Union

    Copy = dict[str, "Entry"]

MAX_FILES = 2000
"""The most files and directories that a savepoint holds; with more, it holds none."""
# Entries that a restoration reads; a directory with more stays as it is.
_MAX_SEEN = 20_000
_NO_FOLLOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TooMany(Exception):
    """The workspace holds more than a savepoint may; the message has the details."""


class Entry:
    """A file (its bytes), a symbolic link (its target) or a directory (None).

    Without `is_whole`, its content is not in the copy: a pipe, a socket, a device, or a file or directory that this
    user can't read. Such entries, and what is in such directories, stay as they are.
    """

    __slots__ = ("data", "is_whole", "key", "kind", "mode", "times")

    def __init__(self, status: os.stat_result, data: Union[bytes, str, None], *, is_whole: bool = True) -> None:
        self.kind = stat.S_IFMT(status.st_mode)
        self.mode = stat.S_IMODE(status.st_mode)
        self.times = status.st_atime_ns, status.st_mtime_ns
        self.key = _key(status)  # changes with the content
        self.data = data
        self.is_whole = is_whole


class WorkspaceCopies:
    """Makes copies. It keeps the last one, so that only changed files are read again."""

    def __init__(self, workspace: str) -> None:
        self._root = workspace
        self._last: Copy = {}

    def save(self, max_bytes: int) -> Copy:
        """Returns a copy of all files. Raises TooMany, OSError."""
        copy: Copy = {}
        closed: set[str] = set()
        left = max_bytes
        for path, status in _walk(self._root, closed):
            if len(copy) >= MAX_FILES:
                raise TooMany(f"the workspace has more than {MAX_FILES} files")
            kind = stat.S_IFMT(status.st_mode)
            last = self._last.get(path)
            if kind == stat.S_IFDIR:
                copy[path] = Entry(status, None)
            elif kind == stat.S_IFLNK:
                copy[path] = Entry(status, os.readlink(os.path.join(self._root, path)))
            elif kind == stat.S_IFREG:
                left -= status.st_size
                if left < 0:
                    raise TooMany(f"the files of the workspace have more than {max_bytes} bytes")
                if last is not None and last.is_whole and last.key == _key(status):
                    copy[path] = last
                    continue
                found = self._read(path, status, left + status.st_size)
                if found is not None:
                    copy[path] = found
                    left += status.st_size - len(found.data or b"")
            else:
                copy[path] = Entry(status, None, is_whole=False)
        if "" in closed:
            raise PermissionError(errno.EACCES, "its directory can't be listed")
        for path in closed:
            copy[path].is_whole = False
        self._last = copy
        return copy

    def changes(self) -> tuple[list[str], list[str], list[str], list[str]]:
        """Returns the paths added, changed and removed since the last copy was made, and those not seen."""
        added, changed = [], []
        now, closed = self._present(self._last)
        for path, status in now.items():
            entry = self._last.get(path)
            if entry is None:
                added.append(path)
            elif _key(status) != entry.key or not _same_kind(status, entry):
                changed.append(path)
        missing = self._last.keys() - now.keys()
        unknown = {path for path in missing if _is_below(path, closed)}
        return added, changed, sorted(missing - unknown), sorted(unknown)

    def _present(self, copy: Copy) -> tuple[dict[str, os.stat_result], set[str]]:
        """Returns the entries to compare with the copy, and the directories whose entries are not among them.

        The workspace itself, as "", is one of these if it has too many entries.
        """
        closed = {path for path, entry in copy.items() if entry.kind == stat.S_IFDIR and not entry.is_whole}
        now: dict[str, os.stat_result] = {}
        for path, status in _walk(self._root, closed):
            if len(now) >= _MAX_SEEN:
                closed.add("")
                break
            now[path] = status
        return now, closed

    def restore_last(self) -> int:
        """Restores the last copy. Returns the number of failures."""
        return self.restore(self._last)

    def _read(self, path: str, status: os.stat_result, max_bytes: int) -> Optional[Entry]:
        """Reads a file; None when it is gone. Raises TooMany when it has grown meanwhile."""
        try:
            fd = os.open(os.path.join(self._root, path), os.O_RDONLY | _NO_FOLLOW)
        except FileNotFoundError:
            return None
        except OSError:
            return Entry(status, None, is_whole=False)
        with open(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Entry(status, None, is_whole=False)
            pieces, size = [], 0
            while piece := file.read(min(max_bytes - size, 1024 * 1024) + 1):
                size += len(piece)
                if size > max_bytes:
                    raise TooMany("the files of the workspace grow while they are copied")
                pieces.append(piece)
        return Entry(status, b"".join(pieces))

    def restore(self, copy: Copy) -> int:
        """Restores the workspace. Returns the number of failures."""
        self._open_directories(copy)
        now, closed = self._present(copy)
        if "" in closed:
            return max(1, len(copy))
        failed = {path for path in closed if path in copy and copy[path].is_whole}  # what is new in them is not removed
        for path in sorted(now, reverse=True):  # a directory comes after its entries
            entry = copy.get(path)
            if entry is not None and _same_kind(now[path], entry):
                continue
            if not _removed(os.path.join(self._root, path), now.pop(path)):
                failed.add(path)
        for path, entry in copy.items():  # a directory comes before what is in it
            status_now = now.get(path)
            if status_now is not None and _key(status_now) == entry.key:
                continue
            if not entry.is_whole:
                failed.add(path)
                continue
            try:
                self._put(os.path.join(self._root, path), entry, exists=status_now is not None)
            except OSError:
                failed.add(path)
        failed |= self._restore_modes(copy)
        self._last = self._renewed(copy, failed)
        return len(failed)

    def _directories(self, copy: Copy) -> Iterator[tuple[str, int]]:
        """Yields the whole directories of the copy that exist, each before those in it, with their present modes."""
        found = {""}
        for path, entry in copy.items():
            if entry.kind != stat.S_IFDIR or not entry.is_whole or os.path.dirname(path) not in found:
                continue
            try:
                status = os.lstat(os.path.join(self._root, path))
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):  # a link may lead out of the workspace
                found.add(path)
                yield path, stat.S_IMODE(status.st_mode)

    def _open_directories(self, copy: Copy) -> None:
        """Makes the directories accessible, which the program may have closed. Those that stay closed fail later."""
        for path, mode in self._directories(copy):
            if mode & stat.S_IRWXU != stat.S_IRWXU:
                with contextlib.suppress(OSError):
                    os.chmod(os.path.join(self._root, path), copy[path].mode | stat.S_IRWXU)

    def _restore_modes(self, copy: Copy) -> set[str]:
        """Restores the modes of the directories, after their entries. Returns the paths that failed."""
        failed = set()
        for path, mode in reversed([*self._directories(copy)]):
            if mode != copy[path].mode:
                try:
                    os.chmod(os.path.join(self._root, path), copy[path].mode)
                except OSError:
                    failed.add(path)
        return failed

    def _renewed(self, copy: Copy, failed: set[str]) -> Copy:
        """Returns the copy with the present keys of its files, so that they are not read again.

        Those that failed have other contents than the copy.
        """
        for path, entry in copy.items():
            try:
                entry.key = () if path in failed else _key(os.lstat(os.path.join(self._root, path)))
            except OSError:
                entry.key = ()
        return copy

    def _put(self, path: str, entry: Entry, *, exists: bool) -> None:
        if entry.data is None:
            if not exists:
                os.mkdir(path, stat.S_IRWXU)
        elif isinstance(entry.data, str):
            if exists:
                os.unlink(path)
            os.symlink(entry.data, path)
        else:
            # In place, so that hard links and open descriptors of the file see it, too.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _NO_FOLLOW, 0o600)
            with open(fd, "wb", buffering=0) as file:
                view = memoryview(entry.data)
                while view:
                    view = view[file.write(view) :]
                os.fchmod(fd, entry.mode)
                os.utime(fd, ns=entry.times)


def _walk(root: str, closed: set[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yields each entry with its status, a directory before what is in it.

    Does not enter the directories `closed`, and adds those that this user can't list.
    """
    pending = [""]
    while pending:
        folder = pending.pop()
        if folder in closed:
            continue
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except FileNotFoundError:
            continue
        except OSError:
            closed.add(folder)
            continue
        for entry in entries:
            path = os.path.join(folder, entry.name)
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                closed.add(folder)
                break
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)


def _key(status: os.stat_result) -> tuple[int, ...]:
    if stat.S_ISDIR(status.st_mode):
        return (stat.S_IMODE(status.st_mode),)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        return (status.st_ino,)  # the times of a pipe change when it is used
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _same_kind(status: os.stat_result, entry: Entry) -> bool:
    return stat.S_IFMT(status.st_mode) == entry.kind


def _is_below(path: str, folders: set[str]) -> bool:
    while path:
        path = os.path.dirname(path)
        if path in folders:
            return True
    return False


def _removed(path: str, status: os.stat_result) -> bool:
    try:
        (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
