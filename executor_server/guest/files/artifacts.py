"""Artifacts: the regular files of the workspace that an execution made or changed.

The supervisor scans the workspace itself, before the code starts and after it has ended, so the program has no say in
it. A file counts when its size, modification time or inode has changed. Files that the supervisor writes meanwhile, for
a client, do not count.

Like `workspace`, a scan goes from descriptor to descriptor and follows no link. It looks at a bounded number of
entries: a workspace of a million files must not hold up a result.
"""

from __future__ import annotations

import os
import stat

from executor_api.limits import ARTIFACTS_MAX

from .workspace import (
    MAX_DEPTH,
    MAX_PATH_CHARS,
    PART_PREFIX,
    PathRefused,
    describe,
    is_text,
    open_directory,
    open_inner,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..wire.messages import FileEntry

    State = tuple[int, int, int]
    """Inode, size and time of modification."""

# Entries that a scan looks at, about 3 µs each: at the end, and at the start, while the program waits.
MAX_LOOKED_AT = 5_000
MAX_REMEMBERED = 2_000


class Scan:
    """The regular files of a workspace by path, as they were at one time; not all of them when `truncated`."""

    def __init__(self, root: str, at_most: int) -> None:
        self.files: dict[str, os.stat_result] = {}
        self.truncated = False
        self._left = at_most
        try:
            fd, _ = open_directory(root, "")
        except PathRefused:
            self.truncated = True
        else:
            self._look(fd, "", 1)

    def _look(self, directory: int, prefix: str, depth: int) -> None:
        """Scans a directory, and closes it."""
        inner: list[str] = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if not self._left:
                        self.truncated = True
                        return
                    self._left -= 1
                    if entry.is_dir(follow_symlinks=False):
                        inner.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        self._add(prefix + entry.name, entry)
            for name in inner:
                if depth == MAX_DEPTH:
                    self.truncated = True
                    return
                fd = open_inner(name, directory)
                if fd is not None:
                    self._look(fd, f"{prefix}{name}/", depth + 1)
        finally:
            os.close(directory)

    def _add(self, path: str, entry: os.DirEntry[str]) -> None:
        if entry.name.startswith(PART_PREFIX) or len(path) > MAX_PATH_CHARS:
            return
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return  # removed since it was listed
        if stat.S_ISREG(status.st_mode):
            self.files[path] = status


class Artifacts:
    """The files of one execution, which starts when this is made."""

    def __init__(self, root: str) -> None:
        self._root = root
        scan = Scan(root, MAX_REMEMBERED)
        self._known: dict[str, State] = {path: _state(status) for path, status in scan.files.items()}
        self._knows_all = not scan.truncated
        self._started_ns = 0 if self._knows_all else stamp_ns()

    def put_by_client(self, path: str, status: os.stat_result) -> None:
        """Records a file that the supervisor wrote while the code ran."""
        self._known[path] = _state(status)

    def found(self) -> tuple[list[FileEntry], bool]:
        """Returns descriptions of the files, by path, and whether there may be more."""
        scan = Scan(self._root, MAX_LOOKED_AT)
        changed = sorted(path for path, status in scan.files.items() if self._is_changed(path, status))
        shown = [path for path in changed if is_text(path)]
        truncated = scan.truncated or len(shown) > ARTIFACTS_MAX
        return [describe(path, scan.files[path]) for path in shown[:ARTIFACTS_MAX]], truncated

    def _is_changed(self, path: str, status: os.stat_result) -> bool:
        known = self._known.get(path)
        if known is not None:
            return known != _state(status)
        # A file that the first scan did not reach: the time of its last change decides, which no program can set.
        return self._knows_all or status.st_ctime_ns >= self._started_ns


def stamp_ns() -> int:
    """Returns the time that a file would be stamped with now; on newer kernels that is no clock of the system."""
    fd = os.memfd_create("now", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_ctime_ns
    finally:
        os.close(fd)


def _state(status: os.stat_result) -> State:
    return status.st_ino, status.st_size, status.st_mtime_ns
