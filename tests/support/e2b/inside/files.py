"""Requests of the server about a machine's files. As in the cloud, root does them, for the user who asked."""

from __future__ import annotations

import base64
import contextlib
import errno
import grp
import os
import pwd
import shutil
import stat
from collections.abc import Callable
from typing import Any

FILE_PIECE_BYTES = 256 * 1024
ENTRIES_MAX = 10_000


class Refused(Exception):
    """A request that can't be done; `code` is one of Connect's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Files:
    """Operations `do_NAME`; each raises Refused or OSError."""

    def __init__(self) -> None:
        self._files: set[int] = set()  # open ones

    def do_open_read(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = resolve(asked["path"], user_of(asked["user"]))
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise Refused("invalid_argument", f"path '{path}' is {kind}")
        self._files.add(fd)
        return {"file": fd, "size": found.st_size}

    def do_open_write(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = user_of(asked["user"])
        path = resolve(asked["path"], user)
        if os.path.isdir(path):
            raise Refused("invalid_argument", f"path is a directory: {path}")
        _make_directories(os.path.dirname(path), user)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        os.fchown(fd, user.pw_uid, user.pw_gid)
        self._files.add(fd)
        return {"file": fd, "path": path, "name": os.path.basename(path), "type": "file"}

    def do_read(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"data": base64.b64encode(os.read(self._open(asked), FILE_PIECE_BYTES)).decode()}

    def do_write(self, asked: dict[str, Any]) -> dict[str, Any]:
        data = memoryview(base64.b64decode(asked["data"]))
        while data:
            data = data[os.write(self._open(asked), data) :]
        return {}

    def do_close(self, asked: dict[str, Any]) -> dict[str, Any]:
        fd = self._open(asked)
        self._files.discard(fd)
        os.close(fd)
        return {}

    def _open(self, asked: dict[str, Any]) -> int:
        if asked["file"] not in self._files:
            raise Refused("not_found", "no such open file")
        return int(asked["file"])

    def do_stat(self, asked: dict[str, Any]) -> dict[str, Any]:
        return _entry(resolve(asked["path"], user_of(asked["user"])))

    def do_list_dir(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        path = resolve(asked["path"], user_of(asked["user"]))
        if not os.path.isdir(path):
            _entry(path)  # or it does not exist
            raise Refused("invalid_argument", f"path is not a directory: {path}")
        found: list[dict[str, Any]] = []
        level = [path]
        for _ in range(max(1, asked["depth"])):
            inner = [os.path.join(place, name) for place in level for name in sorted(os.listdir(place))]
            found += [_entry(place) for place in inner[:ENTRIES_MAX]]
            level = [place for place in inner if os.path.isdir(place) and not os.path.islink(place)]
        return found[:ENTRIES_MAX]

    def do_make_dir(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = user_of(asked["user"])
        path = resolve(asked["path"], user)
        if os.path.isdir(path):
            raise Refused("already_exists", f"directory already exists: {path}")
        if os.path.lexists(path):
            raise Refused("invalid_argument", f"path already exists but it is not a directory: {path}")
        _make_directories(path, user)
        return _entry(path)

    def do_move(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = user_of(asked["user"])
        source, destination = resolve(asked["source"], user), resolve(asked["destination"], user)
        _make_directories(os.path.dirname(destination), user)
        os.rename(source, destination)
        return _entry(destination)

    def do_remove(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = resolve(asked["path"], user_of(asked["user"]))
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return {}


def user_of(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name or "user")
    except KeyError:
        raise Refused("unauthenticated", f"error looking up user '{name}': user: unknown user {name}") from None


def resolve(path: str, user: pwd.struct_passwd) -> str:
    if "\0" in path:
        raise Refused("invalid_argument", "path contains a null byte")
    if path == "~" or path.startswith("~/"):
        path = user.pw_dir + path[1:]
    return os.path.normpath(os.path.join(user.pw_dir, path))


def _make_directories(path: str, user: pwd.struct_passwd) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        os.mkdir(directory)
        os.chown(directory, user.pw_uid, user.pw_gid)


def _entry(path: str) -> dict[str, Any]:
    own = os.lstat(path)
    is_link = stat.S_ISLNK(own.st_mode)
    kind = "FILE_TYPE_FILE"
    if is_link:
        kind = "FILE_TYPE_SYMLINK"
    elif stat.S_ISDIR(own.st_mode):
        kind = "FILE_TYPE_DIRECTORY"
    entry = {
        "name": os.path.basename(path) or "/",
        "type": kind,
        "path": path,
        "size": str(own.st_size),
        "mode": stat.S_IMODE(own.st_mode),
        "permissions": stat.filemode(own.st_mode),
        "owner": _name_of(pwd.getpwuid, own.st_uid),
        "group": _name_of(grp.getgrgid, own.st_gid),
        "modified_s": own.st_mtime,
    }
    if is_link:
        entry["symlinkTarget"] = os.readlink(path)
    return entry


def _name_of(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def code_of(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return "not_found"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "resource_exhausted"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
        return "invalid_argument"
    return "internal"
