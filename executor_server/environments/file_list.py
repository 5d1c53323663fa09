"""The content of a directory tree as a list: each file with size, mode and SHA-256, and the check of a tree against it.

The bytes came out of a workshop once, where hostile wheels were unpacked, and lie on a disk that may lose or change
them. So nothing is followed: a link is recorded with its target, and a file is opened only where no link stands.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

_DIRECTORY = "directory"
_LINK = "link to "

T = TypeVar("T")


class TreeError(Exception):
    """A tree is not what it should be. The message names the first difference, by its path in the tree."""


class Stopped(Exception):
    """The walk was ended from outside."""


@dataclass(frozen=True)
class Entry:
    """A file, directory or symbolic link of a tree."""

    mode: int  # permission bits; 0 of a link
    size_bytes: int  # 0 except of files
    content: str  # SHA-256 of a file in hex; what else it is

    @classmethod
    def read(cls, values: Any) -> Entry:
        """Reads what `written` gave. Raises ValueError."""
        if not isinstance(values, list) or [type(value) for value in values] != [int, int, str]:
            raise ValueError("an entry of another form")
        return cls(*values)

    def written(self) -> list[object]:
        return [self.mode, self.size_bytes, self.content]


@dataclass(frozen=True)
class Digest:
    """The SHA-256 of a file's content, and by what that file is recognized."""

    inode: int
    modified_ns: int
    size_bytes: int
    sha256: str  # in hex

    @classmethod
    def of(cls, file: BinaryIO | FileIO, status: os.stat_result) -> Digest:
        """Reads an open file. Raises OSError."""
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # typeshed knows no FileIO
        return cls(status.st_ino, status.st_mtime_ns, status.st_size, sha256)

    def fits(self, status: os.stat_result) -> bool:
        found = (status.st_ino, status.st_mtime_ns, status.st_size)
        return found == (self.inode, self.modified_ns, self.size_bytes)


@dataclass
class Walk:
    """The progress of a walk that runs in a thread: read in the event loop, stopped from there."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False

    def step(self) -> None:
        """Counts one entry. Raises Stopped."""
        self.done += 1
        if self.is_stopped:
            raise Stopped


async def to_its_end(walk: Walk, function: Callable[[], T]) -> T:
    """Runs a function in a thread. When the caller is cancelled, the walk is stopped and the thread waited for."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        walk.is_stopped = True
        await asyncio.gather(running, return_exceptions=True)
        raise


def read_tree(root: Path, walk: Walk, known: Mapping[str, Digest] | None = None) -> dict[str, Entry]:
    """Returns all that is below `root`, by relative paths. Blocks. Raises TreeError, OSError, Stopped.

    `known` are digests by the same paths; a file that is as it was when its digest was made is not read again.
    """
    found = {}
    for path, status in _entries(root):
        walk.step()
        digest = known.get(path) if known else None
        if digest is not None and stat.S_ISREG(status.st_mode) and digest.fits(status):
            found[path] = Entry(stat.S_IMODE(status.st_mode), status.st_size, digest.sha256)
        else:
            found[path] = _entry(root, path, status)
    return found


def check_tree(root: Path, expected: Mapping[str, Entry], walk: Walk) -> None:
    """Compares all that is below `root` with the list. Blocks. Raises TreeError, OSError, Stopped."""
    walk.total = len(expected)
    missing = set(expected)
    for path, status in _entries(root):
        walk.step()
        wanted = expected.get(path)
        if wanted is None:
            raise TreeError(f"{path!r} is new")
        if stat.S_ISREG(status.st_mode) and status.st_size != wanted.size_bytes:
            raise TreeError(f"{path!r} has another size")  # before its content is read
        if _entry(root, path, status) != wanted:
            raise TreeError(f"{path!r} has changed")
        missing.discard(path)
    if missing:
        raise TreeError(f"{min(missing)!r} is missing")


def _entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    waiting = [""]  # and no recursion: a tree may be as deep as a path is long
    while waiting:
        directory = waiting.pop()
        with os.scandir(root / directory) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            yield path, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)


def _entry(root: Path, path: str, status: os.stat_result) -> Entry:
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode):
        return Entry(mode, status.st_size, _sha256(root / path))
    if stat.S_ISDIR(status.st_mode):
        return Entry(mode, 0, _DIRECTORY)
    if stat.S_ISLNK(status.st_mode):
        return Entry(0, 0, _LINK + os.readlink(root / path))  # noqa: PTH115 - the text as it is
    raise TreeError(f"{path!r} is neither a file nor a directory")


def _sha256(path: Path) -> str:
    # O_NONBLOCK: a named pipe that took the file's place must not hang the thread.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
