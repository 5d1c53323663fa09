"""Files of the sandbox, served by the supervisor while agent code may be changing them.

A place (paths.py) says where a file is: an open directory, and a name in it. The file is opened once, by that name,
without following a link, and is checked through its descriptor. Opening never blocks (a FIFO would), and only regular
files are read and written.

Below a directory that is archived, unpacked, watched or searched for artifacts no link is followed: paths there are
relative, and `open_directory` goes from descriptor to descriptor.
"""

from __future__ import annotations

import errno
import os
import stat

from executor_api.limits import DIRECTORY_ENTRIES_MAX

from .paths import (
    READ,
    READ_DIRECTORY,
    WRITE,
    PathRefused,
    describe,
    kind_of,
    link_target,
    refused,
    require_regular,
    start,
    status_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator, Optional

    from ..wire.messages import FileEntry
    from .paths import Place

MAX_PATH_CHARS = 1024
MAX_DEPTH = 32
MAX_LISTED = DIRECTORY_ENTRIES_MAX
# Entries of any kind that one listing reads: more would keep the supervisor from its other work.
_MAX_LOOKED_AT = 20_000

PART_PREFIX = ".executor-part-"
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
# Why an entry is missing in a listing. An entry that is not a file has its kind as the reason.
NOT_TEXT = f"its name is no text, or its path has more than {MAX_PATH_CHARS} characters"
UNREADABLE = "what is in it can't be read"
TOO_DEEP = f"what is in it is deeper than {MAX_DEPTH} directories"


def split_path(path: str) -> list[str]:
    """Splits a relative path. Raises PathRefused for an absolute, escaping, long or deep one."""
    if len(path) > MAX_PATH_CHARS or "\0" in path:
        raise PathRefused(f"a path has at most {MAX_PATH_CHARS} characters, none of them NUL")
    if path.startswith("/"):
        raise PathRefused("a path is relative to its directory")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise PathRefused("a path does not climb out of its directory")
    if len(parts) > MAX_DEPTH or any(len(os.fsencode(part)) > 255 for part in parts):
        raise PathRefused(f"a path has at most {MAX_DEPTH} parts of at most 255 bytes")
    return parts


def open_directory(root: str, path: str) -> tuple[int, str]:
    """Opens a directory below another, following no link; returns its descriptor and normalized path.

    The caller closes the descriptor. Raises PathRefused.
    """
    parts = split_path(path)
    with start(root) as top, top.below(parts) as place:
        return place.open(READ_DIRECTORY), "/".join(parts)


class Upload:
    """A file being written. Owns its place; `status` describes the file when it is finished.

    A file appears whole or not at all, as a new one that takes the place of the old. It is written in place if it
    belongs to another user, if no file can be made next to it, or with `append`: then a failure leaves the bytes that
    were written before it.
    """

    def __init__(self, place: Place, size: int, *, append: bool = False, mode: Optional[int] = None) -> None:
        """Without `mode`, an existing file keeps its mode."""
        self.place = place
        self.remaining = size
        self._part = ""
        try:
            old = place.status
            if old is not None and stat.S_ISLNK(old.st_mode):
                old = None  # only below a directory, where links are replaced
            if old is not None:
                require_regular(place.asked, old)
                if not os.access(place.name, os.W_OK, dir_fd=place.directory):
                    raise refused(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), place.asked)
            if append or not self._begin_new(old, mode):
                self._begin_in_place(mode, append=append)
        except BaseException:
            place.close()
            raise

    def _begin_new(self, old: Optional[os.stat_result], mode: Optional[int]) -> bool:
        """Opens a new file; false if the old one has to be written in place."""
        if old is not None and old.st_uid != os.geteuid():
            return False
        if old is not None and mode is None:
            mode = old.st_mode & 0o777
        # A name that agent code can't take first.
        part = PART_PREFIX + os.urandom(8).hex()
        try:
            self._fd = os.open(part, WRITE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=self.place.directory)
        except OSError as error:
            if old is not None and error.errno in _NO_RIGHT:
                return False
            raise refused(error, self.place.asked) from error
        self._part = part
        if mode is not None:
            try:
                os.fchmod(self._fd, mode)
            except OSError as error:
                os.close(self._fd)
                os.unlink(part, dir_fd=self.place.directory)
                raise refused(error, self.place.asked) from error
        return True

    def _begin_in_place(self, mode: Optional[int], *, append: bool) -> None:
        self._fd = self.place.open(WRITE | (os.O_APPEND | os.O_CREAT if append else 0), 0o644)
        try:
            require_regular(self.place.asked, os.fstat(self._fd))
            if mode is not None:
                os.fchmod(self._fd, mode)  # first: for another user's file it fails, and the content must stay
            if not append:
                os.ftruncate(self._fd, 0)
        except (OSError, PathRefused) as problem:
            os.close(self._fd)
            raise refused(problem, self.place.asked) from problem

    def write(self, data: memoryview) -> None:
        """Raises PathRefused when more comes than was announced, or the disk is full."""
        if len(data) > self.remaining:
            raise PathRefused("more data than announced")
        view = data
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise refused(error, self.place.asked) from error
        self.remaining -= len(data)

    def finish(self) -> FileEntry:
        """Puts the file in its place and describes it."""
        directory = self.place.directory
        try:
            if self._part:
                os.rename(self._part, self.place.name, src_dir_fd=directory, dst_dir_fd=directory)
            self.status = os.fstat(self._fd)
        except OSError as error:
            raise refused(error, self.place.asked) from error
        self.close()
        return describe(self.place.asked, self.status)

    def abandon(self) -> None:
        try:
            if self._part:
                os.unlink(self._part, dir_fd=self.place.directory)
        except OSError:
            pass  # agent code removed it first
        self.close()

    def close(self) -> None:
        os.close(self._fd)
        self.place.close()


class Download:
    """A part of a regular file being read, piece by piece; all of it without `length`."""

    def __init__(self, place: Place, max_bytes: int, *, offset: int = 0, length: Optional[int] = None) -> None:
        # Checked before it is opened: opening a device or a FIFO can have effects of its own.
        if place.status is not None:
            require_regular(place.asked, place.status)
        self._fd = place.open(READ)
        try:
            status = os.fstat(self._fd)
            require_regular(place.asked, status)
            left = max(0, status.st_size - offset)
            self._remaining = left if length is None else min(left, length)
            if self._remaining > max_bytes:
                message = f"{place.asked!r} has {self._remaining} bytes; at most {max_bytes} can be read at a time"
                raise PathRefused(message, "too_large")
            if self._remaining:
                os.lseek(self._fd, offset, os.SEEK_SET)
        except (OSError, PathRefused) as problem:
            os.close(self._fd)
            raise refused(problem, place.asked) from problem
        self.info = describe(place.asked, status)
        self.executable = bool(status.st_mode & stat.S_IXUSR)

    def read(self, max_bytes: int) -> bytes:
        """Returns the next piece, empty at the end, which is at the announced size even if the file grows.

        Raises PathRefused when it shrinks.
        """
        if not self._remaining:
            return b""
        try:
            data = os.read(self._fd, min(max_bytes, self._remaining))
        except OSError as error:
            raise refused(error, self.info.path) from error
        if not data:
            raise PathRefused(f"{self.info.path!r} shrank while it was read")
        self._remaining -= len(data)
        return data

    def close(self) -> None:
        os.close(self._fd)


def list_files(
    place: Place,
    leave_out: Callable[[str, str], object],
    *,
    recursive: bool = True,
    excluded: frozenset[str] = frozenset(),
) -> tuple[list[FileEntry], bool]:
    """Lists regular files, directories and links in a directory, sorted by path below it; true when there are more.

    `leave_out` gets the path of each omitted entry and the reason, but not the `excluded` ones: names, or paths.
    """
    depth = 1 if recursive else MAX_DEPTH + 1
    found: list[FileEntry] = []
    entries = _entries(place.open(READ_DIRECTORY), "", depth, leave_out, excluded)
    for looked_at, entry in enumerate(entries, start=1):
        if len(found) == MAX_LISTED or looked_at > _MAX_LOOKED_AT:
            return sorted(found, key=_path), True
        if entry is not None:
            found.append(entry)
    return sorted(found, key=_path), False


def _path(entry: FileEntry) -> str:
    return str(entry.path)


def _entries(
    directory: int, prefix: str, depth: int, leave_out: Callable[[str, str], object], excluded: frozenset[str]
) -> Iterator[Optional[FileEntry]]:
    """Yields descriptions, and None for each entry that is not listed."""
    try:
        # One by one: a list of a million names would take more memory than the sandbox may have left.
        with os.scandir(directory) as names:
            for entry in names:
                name = entry.name
                status = _status(name, directory)
                path = prefix + name
                if status is None or name.startswith(PART_PREFIX) or name in excluded or path in excluded:
                    yield None
                elif len(path) > MAX_PATH_CHARS or not is_text(name):
                    leave_out(path, NOT_TEXT)
                    yield None
                elif stat.S_ISREG(status.st_mode):
                    yield describe(path, status)
                elif stat.S_ISLNK(status.st_mode):
                    yield describe(path, status, link_target(name, directory))
                elif stat.S_ISDIR(status.st_mode):
                    yield describe(path, status)
                    if depth < MAX_DEPTH:
                        inner = open_inner(name, directory)
                        if inner is not None:
                            yield from _entries(inner, f"{path}/", depth + 1, leave_out, excluded)
                        else:
                            leave_out(path, UNREADABLE)
                    elif depth == MAX_DEPTH:
                        leave_out(path, TOO_DEEP)
                else:
                    leave_out(path, kind_of(status))
                    yield None
    finally:
        os.close(directory)


def _status(name: str, directory: int) -> Optional[os.stat_result]:
    try:
        return status_of(name, directory)
    except OSError:
        return None


def open_inner(name: str, directory: int) -> Optional[int]:
    """Opens a directory in a directory; the caller closes the descriptor. None when it can't be opened."""
    try:
        return os.open(name, READ_DIRECTORY, dir_fd=directory)
    except OSError:
        return None  # replaced since it was listed, or unreadable


def is_text(name: str) -> bool:
    """True when a name can be sent as text. A name that is not UTF-8 can't be requested either."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
