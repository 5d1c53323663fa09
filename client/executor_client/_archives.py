"""Directories as tar archives, on this side: made from a local directory, and unpacked into one.

What is unpacked was written in a sandbox. All of its members are looked at before the first is written: regular files
and directories with safe relative names, none twice, no more than so many. Nothing else of a member is used but whether
a file can be executed. tarfile, which writes the headers here, never reads one (`_tar.py` says why), and nothing is
written through a link.
"""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from executor_client._limits import ARCHIVE_ENTRIES_MAX, PIECE_BYTES
from executor_client._local import Content, NewFile, check_name, make_directory, open_regular, place, read_exactly
from executor_client._tar import BLOCK_BYTES, Member, padding, read_members
from executor_client.errors import InvalidRequest, ProtocolError

_END = bytes(2 * BLOCK_BYTES)


@dataclass(frozen=True)
class _Entry:
    """A local file or directory, and its header."""

    path: Path
    header: bytes
    size_bytes: int | None  # None: a directory


def directory_content(directory: Path) -> Content:
    """A local directory as an archive. Raises OSError, InvalidRequest for what is neither file nor directory."""
    entries = list(_walk(directory))
    size_bytes = len(_END)
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
    """Everything below a directory; a directory comes before what is in it."""
    pending = [directory]
    count = 0
    while pending:
        for path in sorted(pending.pop().iterdir()):
            count += 1
            if count > ARCHIVE_ENTRIES_MAX:
                raise InvalidRequest(f"{directory} has more than {ARCHIVE_ENTRIES_MAX:,} entries")
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            elif not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"{path} is neither a regular file nor a directory, and cannot be put")
            yield _entry(directory, path, status)


def _entry(directory: Path, path: Path, status: os.stat_result) -> _Entry:
    member = tarfile.TarInfo(path.relative_to(directory).as_posix())
    member.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
    else:
        member.size, member.mode = status.st_size, 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    try:
        header = member.tobuf(tarfile.PAX_FORMAT, errors="strict")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the name of {str(path)!r} is not UTF-8 text") from error
    return _Entry(path, header, None if member.isdir() else status.st_size)


def _parts(entries: list[_Entry]) -> Iterator[bytes]:
    for entry in entries:
        yield entry.header
        if entry.size_bytes is not None:
            with open_regular(entry.path, follow=False) as file:
                yield from read_exactly(file, entry.size_bytes, entry.path)
            yield bytes(padding(entry.size_bytes))
    yield _END


def spool_for(directory: Path) -> BinaryIO:
    """A nameless file for an archive that is to be unpacked into this directory, on the same disk if there is one."""
    existing = next((path for path in (directory, *directory.absolute().parents) if path.is_dir()), None)
    return cast("BinaryIO", tempfile.TemporaryFile(dir=existing))


def unpack(archive: BinaryIO, directory: Path) -> None:
    """Unpacks an archive of a sandbox into a local directory, which is made when it is missing.

    Raises ProtocolError before anything is written when there is a member that must not be; OSError when something
    local is in the way: what was written before stays.
    """
    members = list(_checked(archive))
    make_directory(directory, ())
    for member in members:
        if member.is_directory:
            make_directory(directory, check_name(member.name))
        else:
            _write(archive, member, place(directory, member.name))


def _checked(archive: BinaryIO) -> Iterator[Member]:
    """The members, each of them looked at. Raises ProtocolError with the name of one that is refused."""
    directories: set[str] = set()
    files: set[str] = set()
    for count, member in enumerate(read_members(archive), start=1):
        if count > ARCHIVE_ENTRIES_MAX:
            raise ProtocolError(f"the archive has more than {ARCHIVE_ENTRIES_MAX:,} members")
        parts = check_name(member.name)
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if member.name in files or above & files or (not member.is_directory and member.name in directories):
            raise ProtocolError(f"the archive's member {member.name!r} is in the way of another one")
        directories |= above
        (directories if member.is_directory else files).add(member.name)
        yield member


def _write(archive: BinaryIO, member: Member, path: Path) -> None:
    archive.seek(member.offset)
    with NewFile(path, executable=member.is_executable) as file:
        left = member.size_bytes
        while left:
            data = archive.read(min(left, PIECE_BYTES))
            if not data:
                raise ProtocolError(f"the archive breaks off within {member.name!r}")
            file.write(data)
            left -= len(data)
        file.commit()
