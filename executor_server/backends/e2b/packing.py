"""Packs an environment into a compressed archive, whose bytes are the same for the same environment.

A machine unpacks it as root (guest/cloud/environment.py), with the files' times, from which Python knows that their
bytecode is current.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

# Higher levels do not pay off: 6 takes three times as long as this one, for a tenth fewer bytes.
_COMPRESSION = 1


class TooLarge(Exception):
    """The archive has too many bytes."""


class Stopped(Exception):
    """The packing was ended from outside."""


@dataclass
class Walk:
    """The progress of a packing that runs in a thread: read in the event loop, stopped from there."""

    done: int = 0
    total: int = 0
    is_stopped: bool = False

    def go_on(self) -> None:
        """Raises Stopped when it is to end."""
        if self.is_stopped:
            raise Stopped


def pack(directory: Path, target: BinaryIO, max_bytes: int, walk: Walk) -> None:
    """Writes the environment to `target`. Blocks.

    Raises OSError, Stopped; TooLarge as soon as it has too many bytes.
    """
    walk.go_on()
    paths = list(_below(directory / "site"))
    walk.total = len(paths)
    bounded = cast("BinaryIO", _Bounded(target, max_bytes))
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=bounded, mtime=0) as compressed,
        tarfile.open(mode="w", fileobj=compressed, format=tarfile.GNU_FORMAT) as archive,
    ):
        for path in paths:
            walk.go_on()
            _add(archive, path, str(path.relative_to(directory)))
            walk.done += 1


class _Bounded:
    """A file with a maximum size in bytes."""

    def __init__(self, target: BinaryIO, max_bytes: int) -> None:
        self._target = target
        self._left = max_bytes

    def write(self, data: Any) -> int:
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge
        return self._target.write(data)

    def flush(self) -> None:
        self._target.flush()


def _below(directory: Path) -> Iterator[Path]:
    """Yields the directory and all below it; each directory comes before what is in it."""
    yield directory
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path))
        else:
            yield Path(entry.path)


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Adds one entry, as root's. A file with several names becomes several files."""
    status = path.lstat()
    member = tarfile.TarInfo(name)
    member.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        archive.addfile(member)
    elif stat.S_ISREG(status.st_mode):
        member.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        member.size = status.st_size
        with path.open("rb") as file:
            archive.addfile(member, file)
    else:
        raise OSError(f"{name} is neither a file nor a directory")
