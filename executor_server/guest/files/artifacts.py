"""Artifacts: the regular files of the workspace that an execution made or changed.

The supervisor scans the workspace itself, before the code starts and after it has ended, so the program can't influence
the scan. A file counts when its size, modification time or inode has changed. Files that the supervisor writes for a
client meanwhile do not count.

An empty workspace, which most sessions have, is scanned once: it stays empty until the directory changes. No program
can set the time of that change, but the kernel's clock is coarse. So the time is trusted only when it is old enough
that a new change would get another one.

Like `workspace`, a scan goes from descriptor to descriptor and follows no link. It reads a bounded number of entries: a
workspace of a million files must not delay a result.
"""

from __future__ import annotations

import os
import stat
import time

from executor_api.limits import ARTIFACTS_MAX

from .paths import PathRefused, describe
from .workspace import MAX_DEPTH, MAX_PATH_CHARS, PART_PREFIX, is_text, open_directory, open_inner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..wire.messages import FileEntry

    State = tuple[int, int, int]
    """Inode, size and time of modification; of the directory, the time of any change."""

# Entries that a scan reads, about 3 µs each: at the end, and at the start, while the program waits.
MAX_LOOKED_AT = 5_000
MAX_REMEMBERED = 2_000
# Longer than one step of the kernel's coarse clock, which stamps files.
_STAMP_NS = 100_000_000


class Scan:
    """The regular files of a workspace by path at one time; incomplete when `truncated`."""

    def __init__(self, root: str, at_most: int) -> None:
        self.files: dict[str, os.stat_result] = {}
        self.truncated = False
        self._at_most = self._left = at_most
        try:
            fd, _ = open_directory(root, "")
        except PathRefused:
            self.truncated = True
        else:
            self._look(fd, "", 1)

    @property
    def is_empty(self) -> bool:
        """True when the directory has no entry of any kind."""
        return self._left == self._at_most and not self.truncated

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


class ArtifactFinder:
    """Finds the artifacts of executions, and remembers an empty workspace."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._empty: Optional[State] = None  # the directory when it was empty

    def begin(self) -> Artifacts:
        """Begins an execution. Returns the object that finds its files."""
        state = self._settled_state()
        if state is not None and state == self._empty:
            return Artifacts(self._root, state)
        scan = Scan(self._root, MAX_REMEMBERED)
        self._empty = state if scan.is_empty else None
        return Artifacts(self._root, self._empty, scan)

    def _settled_state(self) -> Optional[State]:
        """Returns the directory's state; None when a change now might leave the same state."""
        state = _directory_state(self._root)
        return state if state is not None and time.time_ns() - state[2] >= _STAMP_NS else None


class Artifacts:
    """The files of one execution, which starts when this is created.

    `empty` is the trusted state of an empty directory; otherwise `scan` has its files.
    """

    def __init__(self, root: str, empty: Optional[State] = None, scan: Optional[Scan] = None) -> None:
        self._root = root
        self._empty = empty
        if scan is None and empty is None:
            scan = Scan(root, MAX_REMEMBERED)
        files = {} if scan is None else scan.files
        self._known: dict[str, State] = {path: _state(status) for path, status in files.items()}
        self._knows_all = scan is None or not scan.truncated
        self._started_ns = 0 if self._knows_all else stamp_ns()

    def put_by_client(self, path: str, status: os.stat_result) -> None:
        """Records a file that the supervisor wrote while the code ran."""
        self._known[path] = _state(status)

    def found(self) -> tuple[list[FileEntry], bool]:
        """Returns descriptions of the files, by path, and whether there may be more."""
        if self._empty is not None and _directory_state(self._root) == self._empty:
            return [], False
        scan = Scan(self._root, MAX_LOOKED_AT)
        changed = sorted(path for path, status in scan.files.items() if self._is_changed(path, status))
        shown = [path for path in changed if is_text(path)]
        truncated = scan.truncated or len(shown) > ARTIFACTS_MAX
        return [describe(path, scan.files[path]) for path in shown[:ARTIFACTS_MAX]], truncated

    def _is_changed(self, path: str, status: os.stat_result) -> bool:
        known = self._known.get(path)
        if known is not None:
            return known != _state(status)
        # The first scan did not reach this file. The time of its last change decides; no program can set it.
        return self._knows_all or status.st_ctime_ns >= self._started_ns


def stamp_ns() -> int:
    """Returns the kernel's present time stamp for files; on newer kernels no system clock has it."""
    fd = os.memfd_create("now", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_ctime_ns
    finally:
        os.close(fd)


def _state(status: os.stat_result) -> State:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _directory_state(root: str) -> Optional[State]:
    try:
        status = os.stat(root, follow_symlinks=False)
    except OSError:  # agent code may have removed its own permission
        return None
    return (status.st_ino, status.st_size, status.st_ctime_ns) if stat.S_ISDIR(status.st_mode) else None
