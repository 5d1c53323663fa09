"""Takes over an installed tree: checks each entry, and makes it the daemon's own.

This is trusted code on the host that works on a directory filled by hostile archives. The sandbox that wrote there is
gone by then, and no other has seen the directory, so it does not change meanwhile. Names are untrusted: no path with
more than one part is opened, and no link is followed.

Packages list their files with hashes (RECORD). A file that differs from its package's list was replaced by another
package, or changed on the disk. Files without a SHA-256 hash can't be compared.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from executor_server.core import SandboxFailure
from executor_server.packages.disk import Walk

MAX_ENTRIES = 300_000
"""Files and directories of one environment. PyTorch with its libraries has 25,000."""
MAX_DEPTH = 64
MAX_LISTS_BYTES = 64 * 2**20
"""Bytes of all lists of an environment. PyTorch's list has 2 MB."""
_MAX_NAME_BYTES = 255
_MAX_SHOWN_CHARS = 200
_MAX_SCRIPT_BYTES = 65_536
_SCRIPTS = "bin"
_INFO = ".dist-info"
_LIST = "RECORD"
_ALGORITHM = "sha256="
_PORTABLE_PYTHON = b"#!/usr/bin/env python3\n"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# uv's lock of the directory, which only uv needs.
_LOCK_NAME = ".lock"


class TreeRefused(SandboxFailure):
    """The tree is not allowed in an environment. The message is a clause for a client: "it has a symbolic link"."""


@dataclass
class Tree:
    """The contents of a tree."""

    entries: int = 0
    size_bytes: int = 0
    modules: list[str] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)
    infos: list[str] = field(default_factory=list)  # directories with the metadata of a package
    hashes: dict[str, str] = field(default_factory=dict)  # of files, by their paths, as RECORD has them


def take_over(
    parent_fd: int, name: str, max_bytes: int, max_entries: int = MAX_ENTRIES, walk: Walk | None = None
) -> Tree:
    """Checks the directory `name` in `parent_fd` with its content, sets owners and modes, and hashes the files.

    Blocks. Raises TreeRefused, OSError, Stopped.
    """
    tree = Tree()
    with opened_directory(name, parent_fd) as top:
        _take_directory(top, "", tree, (max_bytes, max_entries), walk or Walk())
        _check_lists(top, tree)
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


def _take_directory(fd: int, path: str, tree: Tree, limits: tuple[int, int], walk: Walk, depth: int = 0) -> None:
    """`path` is relative to the top, with a slash at its end; `limits` are bytes and entries."""
    max_bytes, max_entries = limits
    if depth > MAX_DEPTH:
        raise TreeRefused(f"it has directories more than {MAX_DEPTH} deep")
    _make_own(fd, 0o755)
    with os.scandir(fd) as entries:
        for entry in entries:
            walk.step()
            tree.entries += 1
            if tree.entries > max_entries:
                raise TreeRefused(f"it has more than {max_entries:,} files and directories")
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
                if tree.size_bytes > max_bytes:
                    raise TreeRefused(f"it has more than {max_bytes:,} bytes")
                tree.hashes[path + entry.name] = _take_file(entry.name, fd)
                if depth == 0:
                    _note_top(tree, entry.name, is_directory=False)


def _check_name(name: str) -> None:
    """Refuses unprintable names: not UTF-8, of several lines, or with another system's separator."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise TreeRefused("it has a file whose name is not UTF-8") from error
    if len(encoded) > _MAX_NAME_BYTES or not name.isprintable() or "\\" in name:
        raise TreeRefused("it has a file with a name that is refused")


def _take_file(name: str, directory: int) -> str:
    """Hashes a file, and sets its mode, which depends only on whether it is executable."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, "rb", buffering=0) as file:
        _make_own(fd, 0o755 if os.fstat(fd).st_mode & 0o111 else 0o644)
        digest = hashlib.file_digest(file, "sha256").digest()
    return _ALGORITHM + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _make_own(fd: int, mode: int) -> None:
    if os.geteuid() == 0:
        os.fchown(fd, 0, 0)
    os.fchmod(fd, mode)


def _note_top(tree: Tree, name: str, *, is_directory: bool) -> None:
    """Notes a module, or a distribution, by the name of an entry of the top directory."""
    if is_directory and name.endswith(_INFO):
        tree.infos.append(name)
        distribution, _, version = name.removesuffix(_INFO).rpartition("-")
        if distribution:
            tree.pins.append(f"{distribution.lower().replace('_', '-')}=={version}")
        return
    module = name if is_directory else name.partition(".")[0]
    is_code = is_directory or name.endswith((".py", ".so"))
    if is_code and module.isidentifier() and module not in (_SCRIPTS, "__pycache__"):
        tree.modules.append(module)


def _check_lists(site_fd: int, tree: Tree) -> None:
    """Compares the files with the lists of their packages. Raises TreeRefused, OSError."""
    owners: dict[str, tuple[str, str]] = {}  # the first package that lists a file, and the hash in its list
    misfits: dict[str, str] = {}  # files that differ from a list, and the package of the list
    left_bytes = MAX_LISTS_BYTES
    for info in sorted(tree.infos):
        text = _read_list(site_fd, info, left_bytes) if f"{info}/{_LIST}" in tree.hashes else b""
        left_bytes -= len(text)
        is_whole = False
        for path, listed in _rows(text):
            is_whole = is_whole or path == f"{info}/{_LIST}"
            if not listed.startswith(_ALGORITHM) or (path not in tree.hashes and _may_be_missing(path)):
                continue
            owner, first = owners.setdefault(path, (info, listed))
            if first != listed and owner != info:
                raise TreeRefused(
                    f"two of its packages, {_shown(owner)} and {_shown(info)}, have the file {_cut(path)} with "
                    "different contents; request only one of them"
                )
            if tree.hashes.get(path) != listed:
                misfits.setdefault(path, info)
        if not is_whole:
            misfits.setdefault(f"{info}/{_LIST}", info)
    for path, info in misfits.items():
        raise TreeRefused(f"{_cut(path)} is not the file that {_shown(info)} lists")


def _read_list(site_fd: int, info: str, max_bytes: int) -> bytes:
    with opened_directory(info, site_fd) as directory:
        fd = os.open(_LIST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(fd, "rb") as file:
            text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise TreeRefused(f"its lists of files have more than {MAX_LISTS_BYTES:,} bytes")
    return text


def _rows(text: bytes) -> Iterator[tuple[str, str]]:
    """Yields paths and hashes, up to the first invalid row."""
    try:
        for row in csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline="")):
            if len(row) >= 2:
                yield row[0], row[1]
    except csv.Error:
        return


def _may_be_missing(path: str) -> bool:
    """True for bytecode, and for paths outside the directory, whose files are installed elsewhere."""
    return path.endswith(".pyc") or path.startswith("/") or ".." in path.split("/")


def _shown(info: str) -> str:
    """Returns "numpy 2.4.6"."""
    return info.removesuffix(_INFO).replace("-", " ", 1)[:_MAX_SHOWN_CHARS]


def _cut(path: str) -> str:
    return repr(path[:_MAX_SHOWN_CHARS])


def make_scripts_portable(site_fd: int, python: str) -> None:
    """Makes console scripts run with the first Python on PATH instead of the build sandbox's.

    uv writes the interpreter's path into each script, but other images may have Python elsewhere. Blocks. Must be
    called after `take_over`. Raises OSError.
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
    os.unlink(name, dir_fd=scripts)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=scripts)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(_PORTABLE_PYTHON + rest)


def _after_shebang(text: bytes, python: bytes) -> bytes | None:
    """Returns the text after the line (two lines for a long path) that names the interpreter."""
    first, _, rest = text.partition(b"\n")
    if first == b"#!" + python:
        return rest
    second, _, rest = rest.partition(b"\n")
    third, _, rest = rest.partition(b"\n")
    if first == b"#!/bin/sh" and second.startswith(b"'''exec' ") and python in second and third == b"' '''":
        return rest
    return None
