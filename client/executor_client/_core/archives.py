"""Directories as tar archives, on this machine: made from a local directory, and unpacked into one.

An archive to unpack was written in a sandbox, so it is hostile. All members are checked before the first is written:
only regular files and directories with safe relative names, without duplicates, up to a limit. The only attribute used
is the executable bit. Nothing is written through a link.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from executor_api.limits import DIRECTORY_ENTRIES_MAX, PIECE_BYTES
from executor_api.tar import END, header, padding
from executor_client._core.local import (
    Content,
    NewFile,
    check_name,
    make_directory,
    open_regular,
    path_below,
    read_exactly,
)
from executor_client._core.tar import Member, read_members
from executor_client.errors import InvalidRequest, ProtocolError


@dataclass(frozen=True)
class _Entry:
    """A local file or directory, and the header that is sent for it."""

    path: Path
    header: bytes
    size_bytes: int | None  # None: a directory


def directory_content(directory: Path) -> Content:
    """Archives a local directory. Raises OSError; InvalidRequest for an entry that is neither file nor directory."""
    entries = list(_walk(directory))
    size_bytes = len(END)
    for entry in entries:
        size_bytes += len(entry.header) + (entry.size_bytes or 0) + padding(entry.size_bytes or 0)

    def pieces() -> Iterator[bytes]:
        gathered = b""
        for part in _parts(entries):
            gathered += part
            while len(gathered) >= PIECE_BYTES:
                yield gathered[:PIECE_BYTES]
                gathered = gathered[PIECE_BYTES:]
        yield gathered

    return Content(size_bytes, pieces)


def _walk(directory: Path) -> Iterator[_Entry]:
    """Yields everything below a directory; a directory comes before its entries."""
    pending = [directory]
    count = 0
    while pending:
        for path in sorted(pending.pop().iterdir()):
            count += 1
            if count > DIRECTORY_ENTRIES_MAX:
                raise InvalidRequest(f"{directory} has more than {DIRECTORY_ENTRIES_MAX:,} entries")
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            elif not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"{path} is neither a regular file nor a directory, and cannot be put")
            yield _entry(directory, path, status)


def _entry(directory: Path, path: Path, status: os.stat_result) -> _Entry:
    name = path.relative_to(directory).as_posix()
    try:
        if stat.S_ISDIR(status.st_mode):
            return _Entry(path, header(name + "/", b"5", 0o755, 0, status.st_mtime), None)
        mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        return _Entry(path, header(name, b"0", mode, status.st_size, status.st_mtime), status.st_size)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the name of {str(path)!r} is not UTF-8 text") from error


def _parts(entries: list[_Entry]) -> Iterator[bytes]:
    for entry in entries:
        yield entry.header
        if entry.size_bytes is not None:
            with open_regular(entry.path, follow=False) as file:
                yield from read_exactly(file, entry.size_bytes, entry.path)
            yield bytes(padding(entry.size_bytes))
    yield END


def spool_for(directory: Path) -> BinaryIO:
    """Opens an unnamed, unbuffered file for an archive, on the disk of the directory that it will be unpacked into."""
    existing = next((path for path in (directory, *directory.absolute().parents) if path.is_dir()), None)
    return cast("BinaryIO", tempfile.TemporaryFile(dir=existing, buffering=0))


def unpack(archive: BinaryIO, directory: Path) -> None:
    """Unpacks an archive from a sandbox into a local directory; creates the directory if it is missing.

    Raises ProtocolError for a refused member before anything is written. Raises OSError if a local file is in the way;
    the files before it stay.
    """
    members = list(_checked(archive))
    make_directory(directory, ())
    for member in members:
        if member.is_directory:
            make_directory(directory, check_name(member.name))
        else:
            _write(archive, member, path_below(directory, member.name))


def _checked(archive: BinaryIO) -> Iterator[Member]:
    """Yields the checked members. Raises ProtocolError with the name of a refused one."""
    directories: set[str] = set()
    files: set[str] = set()
    for count, member in enumerate(read_members(archive), start=1):
        if count > DIRECTORY_ENTRIES_MAX:
            raise ProtocolError(f"the archive has more than {DIRECTORY_ENTRIES_MAX:,} members")
        parts = check_name(member.name)
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if member.name in files or above & files or (not member.is_directory and member.name in directories):
            raise ProtocolError(f"the archive's member {member.name!r} is in the way of another one")
        directories |= above
        (directories if member.is_directory else files).add(member.name)
        yield member


def _write(archive: BinaryIO, member: Member, path: Path) -> None:
    archive.seek(member.offset)
    with NewFile(path, mode=0o755 if member.is_executable else 0o644) as file:
        left = member.size_bytes
        while left:
            data = archive.read(min(left, PIECE_BYTES))
            if not data:
                raise ProtocolError(f"the archive breaks off within {member.name!r}")
            file.write(data)
            left -= len(data)
        file.commit()
