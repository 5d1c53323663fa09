"""Takes over what uv installed: checks each entry of the tree, and makes it the daemon's own.

Trusted code, on the host, of a directory that hostile archives filled. When it begins, the sandbox that wrote there is
gone, and the tree was moved out of the directory that other workshops can write to. One of those may still have a
descriptor of a directory in it. So each directory is made the daemon's own before it is listed: from then on no other
user can add, remove or replace an entry. Nothing is opened by a path with more than one part, and no link is followed.

The content of files can't be protected in the same way: they are hard links to files of uv's cache, and the kernel lets
a user make hard links only to files that are its own. So the workshops' user stays the owner of these, as it is of the
cache; no code of a package runs as that user where it could write (docs/architecture.md).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from executor_server.core import SandboxFailure
from executor_server.environments.file_list import Digest, Walk

MAX_ENTRIES = 300_000
"""Files and directories of one environment. PyTorch with its libraries has 25,000."""
MAX_DEPTH = 64
_MAX_NAME_BYTES = 255
_MAX_SCRIPT_BYTES = 65_536
_SCRIPTS = "bin"
_PORTABLE_PYTHON = b"#!/usr/bin/env python3\n"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# uv's lock of the directory, which only uv needs.
_LOCK_NAME = ".lock"


class TreeRefused(SandboxFailure):
    """The tree is not what an environment may be. The message is a clause for a client: "it has a symbolic link"."""


@dataclass
class Tree:
    """The contents of a tree."""

    entries: int = 0
    size_bytes: int = 0
    modules: list[str] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)  # directories with the metadata of a package
    digests: dict[str, Digest] = field(default_factory=dict)  # by the paths of files


@dataclass(frozen=True)
class _Limits:
    size_bytes: int
    entries: int


def take_over(
    parent_fd: int, name: str, max_bytes: int, max_entries: int = MAX_ENTRIES, walk: Walk | None = None
) -> Tree:
    """Checks the directory `name` in `parent_fd` and all that is in it, sets owners and modes, and hashes the files.

    Blocks. Raises TreeRefused, OSError, Stopped.
    """
    tree = Tree()
    with opened_directory(name, parent_fd) as top:
        _take_directory(top, "", tree, _Limits(max_bytes, max_entries), walk or Walk())
    tree.modules = sorted(set(tree.modules))
    tree.pins.sort()
    return tree


@contextmanager
def opened_directory(name: str, directory: int) -> Iterator[int]:
    """Opens a directory in another one, following no link."""
    fd = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _take_directory(fd: int, path: str, tree: Tree, limits: _Limits, walk: Walk, depth: int = 0) -> None:
    """`path` is that of the directory below the top, with a slash at its end."""
    if depth > MAX_DEPTH:
        raise TreeRefused(f"it has directories more than {MAX_DEPTH} deep")
    # Before it is listed: see the module's docstring.
    if os.geteuid() == 0:
        os.fchown(fd, 0, 0)
    os.fchmod(fd, 0o755)
    with os.scandir(fd) as entries:
        for entry in entries:
            walk.step()
            tree.entries += 1
            if tree.entries > limits.entries:
                raise TreeRefused(f"it has more than {limits.entries:,} files and directories")
            _check_name(entry.name)
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                if depth == 0:
                    _note_top(tree, entry.name, is_directory=True)
                with opened_directory(entry.name, fd) as below:
                    _take_directory(below, f"{path}{entry.name}/", tree, limits, walk, depth + 1)
            elif not stat.S_ISREG(found.st_mode):
                kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "an entry that is no file"
                raise TreeRefused(f"it has {kind}")
            elif depth == 0 and entry.name == _LOCK_NAME:
                os.unlink(entry.name, dir_fd=fd)
            else:
                tree.size_bytes += found.st_size
                if tree.size_bytes > limits.size_bytes:
                    raise TreeRefused(f"it has more than {limits.size_bytes:,} bytes")
                tree.digests[path + entry.name] = _take_file(entry.name, fd)
                if depth == 0:
                    _note_top(tree, entry.name, is_directory=False)


def _check_name(name: str) -> None:
    """Refuses names that can't be written down: not UTF-8, of several lines, or with another system's separator."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise TreeRefused("it has a file whose name is not UTF-8") from error
    if len(encoded) > _MAX_NAME_BYTES or not name.isprintable() or "\\" in name:
        raise TreeRefused("it has a file with a name that is refused")


def _take_file(name: str, directory: int) -> Digest:
    """Hashes a file, and gives it the one mode of programs or the one of others; that of its link in the cache too."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb", buffering=0) as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise TreeRefused("it has an entry that is no file")
        wanted = 0o755 if found.st_mode & 0o111 else 0o644
        if stat.S_IMODE(found.st_mode) != wanted:
            os.fchmod(fd, wanted)
        return Digest.of(file, found)


def _note_top(tree: Tree, name: str, *, is_directory: bool) -> None:
    """Notes a module, or a distribution, by the name of an entry of the top directory."""
    if is_directory and name.endswith(".dist-info"):
        tree.infos.append(name)
        distribution, _, version = name.removesuffix(".dist-info").rpartition("-")
        if distribution:
            tree.pins.append(f"{distribution.lower().replace('_', '-')}=={version}")
        return
    module = name if is_directory else name.partition(".")[0]
    is_code = is_directory or name.endswith((".py", ".so"))
    if is_code and module.isidentifier() and module not in (_SCRIPTS, "__pycache__"):
        tree.modules.append(module)


def make_scripts_portable(site_fd: int, python: str) -> None:
    """Lets the console scripts be run by whichever Python is first on PATH, in place of the workshop's own.

    uv writes the interpreter's path into each, and the same environment may serve images that have it elsewhere.
    Blocks. Call it after `take_over`. Raises OSError.
    """
    try:
        with opened_directory(_SCRIPTS, site_fd) as scripts, os.scandir(scripts) as entries:
            for name in [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]:
                _make_portable(name, scripts, python)
    except FileNotFoundError:
        return


def _make_portable(name: str, scripts: int, python: str) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=scripts)
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_SCRIPT_BYTES + 1)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
    rest = _after_shebang(text, python.encode())
    if rest is None or len(text) > _MAX_SCRIPT_BYTES:
        return
    # A new file: the old one may be a link into the cache.
    os.unlink(name, dir_fd=scripts)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=scripts)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(_PORTABLE_PYTHON + rest)


def _after_shebang(text: bytes, python: bytes) -> bytes | None:
    """Returns what follows the line, or the two of them for a long path, that names the interpreter."""
    first, _, rest = text.partition(b"\n")
    if first == b"#!" + python:
        return rest
    second, _, rest = rest.partition(b"\n")
    third, _, rest = rest.partition(b"\n")
    if first == b"#!/bin/sh" and second.startswith(b"'''exec' ") and python in second and third == b"' '''":
        return rest
    return None
