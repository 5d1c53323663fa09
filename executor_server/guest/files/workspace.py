"""The files of the workspace, served by the supervisor while agent code may be changing them.

The attack: agent code has the same uid and can swap a directory for a link between a check and its use. So no path
string is used twice. Each part of a path is opened relative to the descriptor of the part before it, never following a
link, and checks use the open descriptor. Opening never blocks (a FIFO would), and only regular files are read.
"""

from __future__ import annotations

import errno
import os
import stat

from executor_api.limits import DIRECTORY_ENTRIES_MAX

from ..wire.messages import MAX_TIME_S, MIN_TIME_S, FileEntry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator, Optional

MAX_PATH_CHARS = 1024
MAX_DEPTH = 32
MAX_LISTED = DIRECTORY_ENTRIES_MAX
# Entries of any kind that one listing reads: more would keep the supervisor from its other work.
_MAX_LOOKED_AT = 20_000

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
PART_PREFIX = ".executor-part-"
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class PathRefused(Exception):
    """The path names no usable file of the workspace; the message says why.

    The reason is "path_refused", "file_not_found" or "too_large".
    """

    def __init__(self, message: str, reason: str = "path_refused") -> None:
        super().__init__(message)
        self.reason = reason


def split_path(path: str) -> list[str]:
    """Splits a relative path. Raises PathRefused for an absolute, escaping, long or deep one."""
    if len(path) > MAX_PATH_CHARS or "\0" in path:
        raise PathRefused(f"a path has at most {MAX_PATH_CHARS} characters, none of them NUL")
    if path.startswith("/"):
        raise PathRefused("a path is relative to the workspace")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise PathRefused("a path does not climb out of the workspace")
    if len(parts) > MAX_DEPTH or any(len(os.fsencode(part)) > 255 for part in parts):
        raise PathRefused(f"a path has at most {MAX_DEPTH} parts of at most 255 bytes")
    return parts


def open_directory(root: str, path: str, *, create: bool = False) -> tuple[int, str]:
    """Opens a directory, which `create` makes when it is missing; returns its descriptor and normalized path.

    The caller closes the descriptor. Raises PathRefused.
    """
    parts = split_path(path)
    return _walk(root, parts, create), "/".join(parts)


def _walk(root: str, parts: list[str], create: bool) -> int:
    """Opens the directory at these parts; the caller closes the descriptor."""
    try:
        fd = os.open(root, _DIRECTORY)
    except OSError as error:  # agent code may have taken away its own right to it
        raise _refused(error, ".") from error
    try:
        for part in parts:
            if create:
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
            inner = os.open(part, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError as error:
        os.close(fd)
        raise _refused(error, "/".join(parts)) from error
    return fd


def _refused(error: OSError, path: str) -> PathRefused:
    if isinstance(error, FileNotFoundError):
        return PathRefused(f"there is no {path!r} in the workspace", "file_not_found")
    if error.errno in _FULL:
        return PathRefused(f"{path!r} could not be written: {error.strerror}", "too_large")
    return PathRefused(f"{path!r} is not a file of the workspace that can be used: {error.strerror}")


class Upload:
    """A file being written. It appears under its name whole or not at all; then `status` describes it."""

    def __init__(self, root: str, path: str, size: int, serial: int, *, executable: bool = False) -> None:
        parts = split_path(path)
        if not parts:
            raise PathRefused("the path of a file is not empty")
        self.path = "/".join(parts)
        self.remaining = size
        self._name = parts[-1]
        self._part = f"{PART_PREFIX}{serial}"
        self._directory = _walk(root, parts[:-1], create=True)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = os.open(self._part, flags, 0o755 if executable else 0o644, dir_fd=self._directory)
        except OSError as error:
            os.close(self._directory)
            raise _refused(error, self.path) from error

    def write(self, data: memoryview) -> None:
        """Raises PathRefused when more comes than was announced, or the disk is full."""
        if len(data) > self.remaining:
            raise PathRefused("more data than announced")
        view = data
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            reason = "too_large" if error.errno in _FULL else "path_refused"
            raise PathRefused(f"the file could not be written: {error.strerror}", reason) from error
        self.remaining -= len(data)

    def finish(self) -> FileEntry:
        """Puts the file in its place and describes it."""
        try:
            os.rename(self._part, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            self.status = os.fstat(self._fd)
        except OSError as error:
            raise _refused(error, self.path) from error
        self.close()
        return describe(self.path, self.status)

    def abandon(self) -> None:
        try:
            os.unlink(self._part, dir_fd=self._directory)
        except OSError:
            pass  # agent code removed it first
        self.close()

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._directory)


class Download:
    """A regular file being read, piece by piece."""

    def __init__(self, root: str, path: str, max_bytes: int) -> None:
        parts = split_path(path)
        if not parts:
            raise PathRefused("the path of a file is not empty")
        name = "/".join(parts)
        directory = _walk(root, parts[:-1], create=False)
        try:
            # Checked before it is opened for reading: opening a device or a FIFO can have effects of its own.
            probe = os.open(parts[-1], os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            try:
                status = os.fstat(probe)
                _require_regular(name, status, max_bytes)
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._fd = os.open(parts[-1], flags, dir_fd=directory)
            finally:
                os.close(probe)
        except OSError as error:
            raise _refused(error, name) from error
        finally:
            os.close(directory)
        try:
            status = os.fstat(self._fd)
            _require_regular(name, status, max_bytes)
        except PathRefused:
            os.close(self._fd)
            raise
        self.info = describe(name, status)
        self.executable = bool(status.st_mode & stat.S_IXUSR)
        self._remaining: int = status.st_size

    def read(self, max_bytes: int) -> bytes:
        """Returns the next piece, empty at the end, which is at the announced size even if the file grows.

        Raises PathRefused when it shrinks.
        """
        if not self._remaining:
            return b""
        try:
            data = os.read(self._fd, min(max_bytes, self._remaining))
        except OSError as error:
            raise _refused(error, self.info.path) from error
        if not data:
            raise PathRefused(f"{self.info.path!r} shrank while it was read")
        self._remaining -= len(data)
        return data

    def close(self) -> None:
        os.close(self._fd)


def _require_regular(name: str, status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PathRefused(f"{name!r} is not a regular file")
    if status.st_size > max_bytes:
        raise PathRefused(f"{name!r} has {status.st_size} bytes; at most {max_bytes} can be read", "too_large")


def describe(path: str, status: os.stat_result) -> FileEntry:
    """Describes a file or a directory. Agent code can set any time, so it is cut to what a timestamp can hold."""
    modified_s = min(max(status.st_mtime, MIN_TIME_S), MAX_TIME_S)
    return FileEntry(path=path, size=status.st_size, directory=stat.S_ISDIR(status.st_mode), modified=modified_s)


def _say_nothing(_path: str, _why: str) -> None:
    return


def list_files(
    root: str, path: str, leave_out: Callable[[str, str], object] = _say_nothing
) -> tuple[list[FileEntry], bool]:
    """Lists regular files and directories below a directory, sorted by path; true when there are more.

    `leave_out` gets the path of each omitted entry and the reason.
    """
    parts = split_path(path)
    found: list[FileEntry] = []
    entries = _entries(_walk(root, parts, create=False), "/".join(parts), len(parts), leave_out)
    for looked_at, entry in enumerate(entries, start=1):
        if len(found) == MAX_LISTED or looked_at > _MAX_LOOKED_AT:
            return sorted(found, key=_path), True
        if entry is not None:
            found.append(entry)
    return sorted(found, key=_path), False


def _path(entry: FileEntry) -> str:
    return str(entry.path)


def _entries(
    directory: int, prefix: str, depth: int, leave_out: Callable[[str, str], object]
) -> Iterator[Optional[FileEntry]]:
    """Yields descriptions, and None for each entry that is not listed."""
    try:
        # One by one: a list of a million names would take more memory than the sandbox may have left.
        with os.scandir(directory) as names:
            for entry in names:
                name = entry.name
                status = _status(name, directory)
                path = f"{prefix}/{name}" if prefix else name
                if status is None or name.startswith(PART_PREFIX):
                    yield None
                elif len(path) > MAX_PATH_CHARS or not is_text(name):
                    leave_out(path, f"its name is no text, or its path has more than {MAX_PATH_CHARS} characters")
                    yield None
                elif stat.S_ISREG(status.st_mode):
                    yield describe(path, status)
                elif stat.S_ISDIR(status.st_mode):
                    yield describe(path, status)
                    if depth + 1 < MAX_DEPTH:
                        inner = open_inner(name, directory)
                        if inner is not None:
                            yield from _entries(inner, path, depth + 1, leave_out)
                        else:
                            leave_out(path, "what is in it can't be read")
                else:
                    leave_out(path, _KINDS.get(stat.S_IFMT(status.st_mode), "a device"))
                    yield None
    finally:
        os.close(directory)


def _status(name: str, directory: int) -> Optional[os.stat_result]:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None  # removed since it was listed


def open_inner(name: str, directory: int) -> Optional[int]:
    """Opens a directory in a directory; the caller closes the descriptor. None when it can't be opened."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    except OSError:
        return None  # replaced since it was listed, or unreadable


def is_text(name: str) -> bool:
    """True when a name can be sent as text. A name that is not UTF-8 can't be requested either."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
