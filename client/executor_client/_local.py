"""Files on this side: read in pieces, written whole or not at all.

Names that came out of a sandbox are an attacker's. `place` is the only way from such a name to a path of this machine:
it stays below the directory that the caller chose, also where a link lies in its way.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from executor_client._limits import FILE_BYTES_MAX, PIECE_BYTES
from executor_client.errors import InvalidRequest, ProtocolError

NAME_CHARS_MAX = 1024
NAME_PARTS_MAX = 64
NAME_PART_BYTES_MAX = 255

LocalPath = str | os.PathLike[str]

# A terminal that lists such a name may be made to do anything; and what can't be encoded can't be a name.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Content:
    """What is to be put: how much, and in which pieces. The pieces can be had again, for another attempt."""

    size_bytes: int
    pieces: Callable[[], Iterator[bytes]]


def content_of(source: LocalPath | bytes | bytearray | memoryview) -> Content:
    """The content of a local file, or bytes themselves. Raises OSError, InvalidRequest for what is no regular file."""
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        view = memoryview(data)
        return Content(
            len(data), lambda: (bytes(view[start : start + PIECE_BYTES]) for start in range(0, len(view), PIECE_BYTES))
        )
    path = Path(source)
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size

    def pieces() -> Iterator[bytes]:
        with open_regular(path) as file:
            yield from read_exactly(file, size_bytes, path)

    return Content(size_bytes, pieces)


def open_regular(path: Path, *, follow: bool = True) -> BinaryIO:
    """Opens a regular file, without waiting for what is none. Raises OSError, InvalidRequest."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequest(f"{path} is not a regular file")
    return os.fdopen(fd, "rb", buffering=0)


def read_exactly(file: BinaryIO, size_bytes: int, path: Path) -> Iterator[bytes]:
    """So many bytes of a file, in pieces. Raises InvalidRequest when it has become shorter."""
    left = size_bytes
    while left:
        data = file.read(min(left, PIECE_BYTES))
        if not data:
            raise InvalidRequest(f"{path} became shorter while it was read")
        left -= len(data)
        yield data


class NewFile:
    """A file that appears under its name when it is committed; as a context manager it leaves nothing else behind.

    A link or a file of that name is replaced; a device or a pipe is not, nor a link to one: root would do without its
    /dev/null from then on. What is written is counted, and more than is accepted refused.
    """

    def __init__(self, path: LocalPath, *, executable: bool = False) -> None:
        self._path = Path(path)
        if self._path.is_dir() and not self._path.is_symlink():
            raise IsADirectoryError(f"{self._path} is a directory")
        if self._path.exists() and not (self._path.is_file() or self._path.is_dir()):
            raise FileExistsError(f"{self._path} is no regular file, and is not replaced by one")
        # Not made of the name, which may be as long as a name can be.
        self._part = self._path.with_name(f".executor-{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self._part, flags, 0o755 if executable else 0o644)
        except OSError as error:
            error.filename = str(self._path)  # the name that the caller knows
            raise
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._left = FILE_BYTES_MAX

    def write(self, data: bytes) -> None:
        """Raises OSError, ProtocolError past the limit."""
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError(f"a file has more than the accepted {FILE_BYTES_MAX} bytes")
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def commit(self) -> None:
        self._file.close()
        self._part.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def check_name(name: str) -> tuple[str, ...]:
    """The parts of a relative name that came out of a sandbox. Raises ProtocolError for one that is not safe here."""
    parts = tuple(name.split("/"))
    if _UNSAFE.search(name):
        raise ProtocolError(f"the name {name[:NAME_CHARS_MAX]!r} has control characters")
    if len(name) > NAME_CHARS_MAX or len(parts) > NAME_PARTS_MAX:
        raise ProtocolError(f"the name {name[:NAME_CHARS_MAX]!r} is too long or too deep")
    if any(part in ("", ".", "..") for part in parts):
        raise ProtocolError(f"the name {name!r} does not stay in its directory")
    if any(len(part.encode()) > NAME_PART_BYTES_MAX for part in parts):
        raise ProtocolError(f"the name {name!r} has a part of more than {NAME_PART_BYTES_MAX} bytes")
    return parts


def make_directory(root: Path, parts: tuple[str, ...]) -> Path:
    """The directory at these parts below the root, made when it is missing. Raises OSError when a link is in the way.

    The root itself may be a link: the caller chose it.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root
    for part in parts:
        path /= part
        try:
            path.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise NotADirectoryError(f"{path} is in the way: it is no directory, or a link to one") from None
    return path


def place(root: Path, name: str) -> Path:
    """Where a file of this name goes below the root; its directories are made. Raises ProtocolError, OSError."""
    parts = check_name(name)
    return make_directory(root, parts[:-1]) / parts[-1]
