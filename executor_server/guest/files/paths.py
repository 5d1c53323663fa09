"""Paths of the sandbox, resolved as the kernel does it, and the kernel's reasons for refusing them.

The attack: process 1 opens these paths, and agent code with the same uid makes the links in them and swaps files
meanwhile. Agent code can already use every file that this user can use, with one exception: procfs shows each process
to itself, and would show this one its own memory and descriptors. So links are followed here, part by part, from
descriptor to descriptor, and no directory of procfs is entered. All magic links are there too. A descriptor holds each
directory, so a directory that is put in its place after the check is not used.

openat2 could follow links without magic ones, but older kernels and gVisor lack it, and it allows /proc/self/mem.
"""

from __future__ import annotations

import errno
import os
import stat

from executor_api.limits import PATH_BYTES_MAX

from ..wire.messages import MAX_TIME_S, MIN_TIME_S, FileEntry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Optional, Union

MAX_LINKS = 40  # as in the kernel
# Parts of a path, including those of all its links.
MAX_PARTS = 4096

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | _FLAGS
WRITE = os.O_WRONLY | _FLAGS
READ_DIRECTORY = READ | os.O_DIRECTORY

_REASONS = {
    errno.ENOENT: "file_not_found",
    errno.EISDIR: "file_is_directory",
    errno.ENOTDIR: "file_not_directory",
    errno.EACCES: "file_permission_denied",
    errno.EPERM: "file_permission_denied",
    errno.EROFS: "file_permission_denied",
    errno.EEXIST: "file_exists",
    errno.ENOTEMPTY: "file_exists",
    errno.ENOSPC: "too_large",
    errno.EDQUOT: "too_large",
    errno.EFBIG: "too_large",
}
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class PathRefused(Exception):
    """A path that can't be used; the message says why, `reason` is one of `_REASONS` or "path_refused"."""

    def __init__(self, message: str, reason: str = "path_refused") -> None:
        super().__init__(message)
        self.reason = reason


def refused(error: Union[OSError, PathRefused], path: str) -> PathRefused:
    """Returns the refusal for an error of the kernel; a refusal as it is."""
    if isinstance(error, PathRefused):
        return error
    path = path or "."
    reason = _REASONS.get(error.errno or 0, "path_refused")
    if reason == "file_not_found":
        return PathRefused(f"there is no {path!r}", reason)
    if reason == "too_large":
        return PathRefused(f"{path!r} could not be written: {error.strerror}", reason)
    if error.errno == errno.EXDEV:
        return PathRefused(f"{path!r} is on another file system: copy it, or run `mv`")
    return PathRefused(f"{path!r} can't be used: {error.strerror}", reason)


def require_regular(path: str, status: os.stat_result) -> None:
    """Raises PathRefused for anything but a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise PathRefused(f"{path or '.'!r} is a directory, not a regular file", "file_is_directory")
    if not stat.S_ISREG(status.st_mode):
        raise PathRefused(f"{path!r} is not a regular file, but {kind_of(status)}")


def kind_of(status: os.stat_result) -> str:
    """Returns the kind of an entry that is neither a file nor a directory."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "of a kind that is not known")


class Place:
    """Where a path leads: an open directory and a name in it. Owns the descriptor; a context manager closes it."""

    def __init__(self, directory: int, above: list[str], asked: str) -> None:
        self.asked = asked  # the path as its caller wrote it, without empty parts
        self.directory = directory
        self.name = ""  # in the directory; empty: the directory itself
        self.status: Optional[os.stat_result] = None  # None: nothing has this name
        self._above = above

    @property
    def path(self) -> str:
        """The absolute path, without links."""
        return "/" + "/".join([*self._above, self.name] if self.name else self._above)

    def enter(self, name: str) -> None:
        """Goes to a directory in this one, or to "..". Raises OSError, and PathRefused on procfs."""
        inner = _enter(name, self.directory)
        os.close(self.directory)
        self.directory = inner
        if name != "..":
            self._above.append(name)
        elif self._above:
            self._above.pop()

    def enter_last(self, *, create: bool = False) -> None:
        """Goes into the directory to which this leads. Raises PathRefused."""
        name, self.name = self.name, ""
        if name:
            try:
                if create:
                    _make_directory(name, self.directory)
                self.enter(name)
            except OSError as error:
                raise refused(error, self.asked) from error
        self.status = os.fstat(self.directory)

    def go_to_top(self) -> None:
        os.close(self.directory)
        self.directory, self._above = _enter("/", None), []

    def below(self, parts: list[str], *, create: bool = False) -> Place:
        """Returns the place of a path below this directory, following no link. Raises PathRefused."""
        asked = "/".join(parts)
        place = Place(os.dup(self.directory), [*self._above], asked)
        try:
            for part in parts[:-1]:
                if create:
                    _make_directory(part, place.directory)
                place.enter(part)
            if parts:
                place.name = parts[-1]
                place.status = status_of(place.name, place.directory)
            else:
                place.status = os.fstat(place.directory)
        except (OSError, PathRefused) as problem:
            place.close()
            raise refused(problem, asked) from problem
        return place

    def open(self, flags: int, mode: int = 0) -> int:
        """Opens what the name stands for now, but no link; the caller closes it. Raises PathRefused."""
        try:
            fd = os.open(self.name or ".", flags, mode, dir_fd=self.directory)
        except OSError as error:
            raise refused(error, self.asked) from error
        return _outside_of_procfs(fd)

    def link_target(self) -> Optional[str]:
        """Returns where a link leads, as text; None for anything else."""
        return link_target(self.name, self.directory) if self.name else None

    def close(self) -> None:
        os.close(self.directory)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, _type: Optional[type[BaseException]], _error: Optional[BaseException], _where: Optional[TracebackType]
    ) -> None:
        self.close()


def start(root: str, asked: str = "") -> Place:
    """Returns the place of a directory by an absolute path. Raises PathRefused."""
    try:
        directory = _enter(root, None)
    except OSError as error:  # agent code may have taken away its own right to it
        raise refused(error, asked) from error
    place = Place(directory, [part for part in root.split("/") if part], asked)
    place.status = os.fstat(directory)
    return place


def resolve(root: str, path: str, *, follow: bool = True, create: bool = False, partly: bool = False) -> Place:
    """Finds the place of a path, which is absolute or relative to `root`. Raises PathRefused.

    With `follow`, a link at the end is followed, too, even a dangling one. If directories before the end are missing,
    `create` makes them and `partly` keeps them in the name; otherwise the path is refused.
    """
    if "\0" in path or len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise PathRefused(f"a path has at most {PATH_BYTES_MAX} bytes, none of them NUL")
    top = path.startswith("/")
    asked = ("/" if top else "") + "/".join(reversed(_parts(path)))
    place = start("/" if top else root, asked)
    try:
        _walk(place, path, follow, create, partly)
    except (OSError, PathRefused) as problem:
        place.close()
        raise refused(problem, asked) from problem
    return place


def _walk(place: Place, path: str, follow: bool, create: bool, partly: bool) -> None:
    todo = _parts(path)
    missing: list[str] = []
    links = 0
    for _ in range(MAX_PARTS):
        if not todo:
            place.name, place.status = "/".join(missing), None if missing else os.fstat(place.directory)
            return
        part = todo.pop()
        if missing and part == "..":
            missing.pop()
            continue
        if missing:
            missing.append(part)
            continue
        if part == "..":
            place.enter(part)
            continue
        status = status_of(part, place.directory)
        if status is not None and stat.S_ISLNK(status.st_mode) and (todo or follow):
            links += 1
            if links > MAX_LINKS:
                break
            target = os.readlink(part, dir_fd=place.directory)
            if target.startswith("/"):
                place.go_to_top()
            todo += _parts(target)
            continue
        if status is None and partly:
            missing.append(part)
        elif not todo:
            place.name, place.status = part, status
            return
        else:
            if status is None and not create:
                raise PathRefused(f"there is no {place.asked!r}: its directory {part!r} is missing", "file_not_found")
            if status is None:
                _make_directory(part, place.directory)
            place.enter(part)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _parts(path: str) -> list[str]:
    """Returns the parts of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _make_directory(name: str, directory: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=directory)
    except FileExistsError:
        pass


def status_of(name: str, directory: int) -> Optional[os.stat_result]:
    """Returns the status of an entry, or of a link itself; None if it does not exist. Raises OSError."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _enter(name: str, directory: Optional[int]) -> int:
    return _outside_of_procfs(os.open(name, _ENTER, dir_fd=directory))


def _outside_of_procfs(fd: int) -> int:
    """Returns a descriptor, or closes it and raises PathRefused."""
    try:
        device = os.stat("/proc").st_dev
    except OSError:
        return fd  # there is none
    if os.fstat(fd).st_dev != device:
        return fd
    os.close(fd)
    raise PathRefused("the files of /proc can't be used here: run a command that reads them")


def link_target(name: str, directory: int) -> Optional[str]:
    try:
        target = os.readlink(name, dir_fd=directory)
    except OSError:
        return None
    return target.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")[:PATH_BYTES_MAX]


def describe(path: str, status: os.stat_result, target: Optional[str] = None) -> FileEntry:
    """Describes an entry. Agent code can set any time, so it is cut to what a timestamp can hold."""
    modified_s = min(max(status.st_mtime, MIN_TIME_S), MAX_TIME_S)
    is_directory, mode = stat.S_ISDIR(status.st_mode), stat.S_IMODE(status.st_mode)
    return FileEntry(
        path=path,
        size=status.st_size,
        directory=is_directory,
        modified=modified_s,
        mode=mode,
        target=target,
        uid=status.st_uid,
        gid=status.st_gid,
    )
