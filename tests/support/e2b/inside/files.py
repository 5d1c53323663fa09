"""Requests of the server about a machine's files. As in the cloud, root does them, for the user who asked."""

from __future__ import annotations

import base64
import errno
import os
import pwd
from typing import Any

FILE_PIECE_BYTES = 256 * 1024


class Refused(Exception):
    """A request that can't be done; `code` is one of Connect's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Files:
    """Operations `do_NAME`; each raises Refused or OSError."""

    def __init__(self) -> None:
        self._files: set[int] = set()  # open ones

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


def code_of(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return "not_found"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "resource_exhausted"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
        return "invalid_argument"
    return "internal"
