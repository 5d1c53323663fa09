"""Directories of the workspace as tar archives: packed while they are sent, unpacked while they arrive.

The supervisor does both itself, a piece at a time: nothing here waits, forks or holds more than a piece and a header.
Both ends of a transfer are hostile. Agent code may change the directory meanwhile: `workspace` opens every file again
by its parts and follows no link, and a file that shrinks while it is read ends the transfer. A received archive may
hold anything: a member that is not a regular file or directory, or has no safe relative name, is refused by name. Files
appear whole or not at all. Directories do not: the members before a refused one stay.

The format is POSIX ustar, with pax headers for what it has no room for. GNU's long names are read too.
"""

from __future__ import annotations

import os

from executor_api.tar import (
    BLOCK_BYTES,
    END,
    PAX_BYTES_MAX,
    TarError,
    decimal,
    header,
    padding,
    parse_header,
    parse_records,
)

from ..wire.frames import CHUNK_BYTES
from .paths import PathRefused, describe
from .workspace import MAX_DEPTH, MAX_LISTED, Download, Upload, list_files, split_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Generator, Iterator, Optional

    from ..wire.messages import FileEntry
    from .paths import Place

MAX_MEMBERS = MAX_LISTED
# At most this many omitted entries of an archive are named.
MAX_OMITTED = 256
# Extension headers before one member.
_MAX_EXTENSIONS = 4
_MAX_SHOWN_CHARS = 200
# Parts in one read: opening a file takes longer than reading a small one, and the loop has to wait.
_PARTS_AT_A_TIME = 128


# ---------------------------------------------------------------------------------------------------------------------
# Out


class ArchiveDownload:
    """A directory being read: its regular files and directories; everything else is omitted.

    Raises PathRefused, before anything is sent, for a directory that is too large or too deep.
    """

    def __init__(self, place: Place, max_bytes: int, excluded: frozenset[str] = frozenset()) -> None:
        """Owns the place, whose descriptor keeps the directory. Leaves out `excluded` names and paths below."""
        self._place = place
        self.omitted: list[dict[str, str]] = []  # the first entries that are left out, with the reason
        self._left = max_bytes
        self._rest = b""
        self._memory = 0
        try:
            place.enter_last()
            self.info = describe(place.asked, os.fstat(place.directory))
            entries, truncated = list_files(place, self._leave_out, excluded=excluded)
            if truncated:
                raise PathRefused(f"the directory has more than {MAX_MEMBERS} entries", "too_large")
            entries = [entry for entry in entries if self._is_packed(entry)]
            self._check(entries, max_bytes)
        except BaseException:
            place.close()
            raise
        self.files = self.file_bytes = 0  # packed so far
        self._parts = self._make_parts(entries)

    def read(self, max_bytes: int) -> bytes:
        """Returns the next piece, empty at the end. Raises PathRefused when a file has shrunk or there is too much."""
        piece = bytearray(self._rest)
        for _ in range(_PARTS_AT_A_TIME):
            self._memory = max_bytes - len(piece)
            if self._memory <= 0:
                break
            part = next(self._parts, None)
            if part is None:
                break
            piece += part
        self._rest = bytes(piece[max_bytes:])
        return bytes(piece[:max_bytes])

    def close(self) -> None:
        self._parts.close()
        self._place.close()

    def _is_packed(self, entry: FileEntry) -> bool:
        if entry.target is not None:
            self._leave_out(entry.path, "a symbolic link")
        return entry.target is None

    def _leave_out(self, path: str, why: str) -> None:
        if len(self.omitted) < MAX_OMITTED:
            name = path.encode("utf-8", "backslashreplace").decode()
            self.omitted.append({"name": name[:_MAX_SHOWN_CHARS], "reason": why})

    def _check(self, entries: list[FileEntry], max_bytes: int) -> None:
        total = len(END)
        for entry in entries:
            if entry.directory:
                total += BLOCK_BYTES
                if entry.path.count("/") + 1 >= MAX_DEPTH:
                    raise PathRefused(f"{_shown(entry.path)} is too deep: a path has at most {MAX_DEPTH} parts")
            else:
                total += BLOCK_BYTES + entry.size + padding(entry.size)
            if total > max_bytes:
                message = f"the directory has more than {max_bytes} bytes, with {_shown(entry.path)}"
                raise PathRefused(message, "too_large")

    def _make_parts(self, entries: list[FileEntry]) -> Generator[bytes, None, None]:
        for entry in entries:
            if entry.directory:
                yield self._counted(header(entry.path + "/", b"5", 0o755, 0, entry.modified))
            else:
                yield from self._file(entry.path)
        yield END

    def _file(self, name: str) -> Iterator[bytes]:
        try:
            with self._place.below(split_path(name)) as place:
                download = Download(place, self._left)
        except PathRefused as refused:
            if refused.reason == "too_large":
                raise
            self._leave_out(name, "it can't be read")  # or it was removed or replaced
            return
        try:
            size = download.info.size
            mode = 0o755 if download.executable else 0o644
            yield self._counted(header(name, b"0", mode, size, download.info.modified))
            self._left -= size
            while True:
                data = download.read(max(1, min(self._memory, CHUNK_BYTES)))
                if not data:
                    break
                yield data
            yield self._counted(bytes(padding(size)))
            self.files += 1
            self.file_bytes += size
        finally:
            download.close()

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        return data


# ---------------------------------------------------------------------------------------------------------------------
# In


class _Member:
    """A member, from its header and the extensions before it."""

    __slots__ = ("executable", "is_directory", "name", "size")

    def __init__(self, name: str, size: int, is_directory: bool, executable: bool) -> None:
        self.name = name
        self.size = size
        self.is_directory = is_directory
        self.executable = executable


class ArchiveUpload:
    """A directory being written, which is created if it is missing."""

    def __init__(self, place: Place, size: int) -> None:
        """Owns the place, whose descriptor keeps the directory."""
        try:
            place.enter_last(create=True)
        except BaseException:
            place.close()
            raise
        self.place = place
        self.remaining = size
        self._members = 0
        self._extensions: dict[str, bytes] = {}
        self._extension_count = 0
        self._file: Optional[Upload] = None
        self._content_left = 0  # bytes of the file that is being written
        self._padding_left = 0
        # A header or an extension, gathered until it is whole, and the function that takes it then.
        self._gathered = bytearray()
        self._needed = BLOCK_BYTES
        self._take: Callable[[bytes], None] = self._take_header
        self._ended = False
        self.on_file: Callable[[Upload], None] = lambda _file: None

    def write(self, data: memoryview) -> None:
        """Raises PathRefused, with the member's name, for a member that can't be unpacked here."""
        if len(data) > self.remaining:
            raise PathRefused("more data than announced")
        while data:
            if self._content_left:
                data = self._write_content(data)
            elif self._padding_left:
                skipped = min(len(data), self._padding_left)
                self._padding_left -= skipped
                data = self._passed(data, skipped)
            else:
                data = self._gather(data)

    def finish(self) -> FileEntry:
        """Describes the directory. Raises PathRefused when the archive has no end."""
        if not self._ended or self._gathered:
            raise PathRefused("the archive breaks off before its end, or is none")
        described = describe(self.place.asked, os.fstat(self.place.directory))
        self.close()
        return described

    def abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()
            self._file = None
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self.place.close()

    def _passed(self, data: memoryview, count: int) -> memoryview:
        self.remaining -= count
        return data[count:]

    def _write_content(self, data: memoryview) -> memoryview:
        assert self._file is not None
        count = min(len(data), self._content_left)
        try:
            self._file.write(data[:count])
            self._content_left -= count
            if not self._content_left:
                self._finish_file()
        except PathRefused as refused:
            raise _of_member(self._file.place.asked, refused) from refused
        return self._passed(data, count)

    def _finish_file(self) -> None:
        assert self._file is not None
        self._file.finish()
        file, self._file = self._file, None
        self.on_file(file)

    def _gather(self, data: memoryview) -> memoryview:
        count = min(len(data), self._needed - len(self._gathered))
        self._gathered += data[:count]
        data = self._passed(data, count)
        if len(self._gathered) == self._needed:
            whole, self._gathered = bytes(self._gathered), bytearray()
            take, self._take, self._needed = self._take, self._take_header, BLOCK_BYTES
            try:
                take(whole)
            except TarError as error:
                raise PathRefused(str(error)) from error
        return data

    def _take_header(self, block: bytes) -> None:
        if not any(block):
            self._ended = True
        elif self._ended:
            raise PathRefused("the archive goes on after its end")
        else:
            kind, name, size, mode = parse_header(block)
            if kind in (b"x", b"g", b"L"):
                self._expect_extension(kind, size)
            else:
                self._begin(_member(kind, name, size, mode, self._extensions))
                self._extensions, self._extension_count = {}, 0

    def _expect_extension(self, kind: bytes, size: int) -> None:
        self._extension_count += 1
        if size > PAX_BYTES_MAX or self._extension_count > _MAX_EXTENSIONS:
            raise PathRefused(f"the headers before a member have more than {PAX_BYTES_MAX} bytes", "too_large")
        self._needed = size + padding(size)

        def take(data: bytes) -> None:
            if kind == b"L":
                self._extensions["path"] = data[:size].split(b"\0", 1)[0]
            elif kind == b"x":
                self._extensions.update(parse_records(data[:size]))
            elif _MATTERS & parse_records(data[:size]).keys():
                raise PathRefused("the archive has a global header that changes its members")

        if self._needed:
            self._take = take
        else:
            self._needed = BLOCK_BYTES  # an empty extension

    def _begin(self, member: _Member) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise PathRefused(f"the archive has more than {MAX_MEMBERS} members", "too_large")
        if member.size > self.remaining:
            raise PathRefused(f"member {_shown(member.name)} is larger than the archive")
        try:
            place = self.place.below(split_path(member.name), create=True)
            if member.is_directory:
                with place:
                    place.enter_last(create=True)
                return
            self._file = Upload(place, member.size, mode=0o755 if member.executable else 0o644)
            self._content_left, self._padding_left = member.size, padding(member.size)
            if not member.size:
                self._finish_file()
        except PathRefused as refused:
            raise _of_member(member.name, refused) from refused


def _of_member(name: str, refused: PathRefused) -> PathRefused:
    return PathRefused(f"member {_shown(name)}: {refused}", refused.reason)


_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a FIFO",
    b"K": "a link",
    b"S": "a sparse file",
}
# Keys of a pax header that change the meaning of a member.
_SPARSE = "GNU.sparse."
_MATTERS = frozenset(("path", "size", "linkpath"))


def _member(kind: bytes, name: bytes, size: int, mode: int, extensions: dict[str, bytes]) -> _Member:
    """Makes a member. Raises PathRefused for anything but a regular file or a directory."""
    raw = extensions.get("path", name)
    try:
        path = raw.decode()
    except UnicodeDecodeError:
        raise PathRefused(f"member {_shown(raw.decode('utf-8', 'replace'))} has a name that is not UTF-8") from None
    if any(key.startswith(_SPARSE) for key in extensions):
        kind = b"S"
    # Before POSIX, a directory was a file whose name ends with a slash.
    is_directory = kind == b"5" or (kind == b"\0" and path.endswith("/"))
    if not is_directory and kind not in (b"0", b"\0", b"7"):
        what = _KINDS.get(kind, "of a kind that is not known")
        raise PathRefused(f"member {_shown(path)} is {what}; only regular files and directories are unpacked")
    if "size" in extensions:
        size = decimal(extensions["size"])
    return _Member(path, 0 if is_directory else size, is_directory, bool(mode & 0o100))


def _shown(name: str) -> str:
    return repr(name if len(name) <= _MAX_SHOWN_CHARS else name[:_MAX_SHOWN_CHARS] + "...")
