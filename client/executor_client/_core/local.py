"""Files on this machine: read in pieces, written whole or not at all.

An attacker may choose the names from a sandbox. Only `path_below`, and `make_directory` after `check_name`,
make a path of this machine from such a name: it stays below the directory that the caller chose, even if a link is in
its way.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from executor_api.limits import PIECE_BYTES
from executor_client._core.limits import FILE_BYTES_MAX
from executor_client.errors import InvalidRequest, ProtocolError

NAME_CHARS_MAX = 1024
NAME_PARTS_MAX = 64
NAME_PART_BYTES_MAX = 255

LocalPath = str | os.PathLike[str]

# Control characters, line separators, marks that reorder other letters, lone surrogates. The marks U+200E, U+200F and
# U+061C are in honest names, such as those of chat exports.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Content:
    """The content to put: its size, and its pieces. The pieces can be read again, for another attempt."""

    size_bytes: int
    pieces: Callable[[], Iterator[bytes]]


def content_of(source: LocalPath | bytes | bytearray | memoryview) -> Content:
    """Returns the content of a local file, or of bytes. Raises OSError; InvalidRequest for one that is not regular."""
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
    """Opens a regular file; does not block on a pipe or a device. Raises OSError, InvalidRequest."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        advice = "; put_directory copies a directory" if stat.S_ISDIR(mode) else ""
        raise InvalidRequest(f"{path} is not a regular file{advice}")
    return os.fdopen(fd, "rb", buffering=0)


def read_exactly(file: BinaryIO, size_bytes: int, path: Path) -> Iterator[bytes]:
    """Yields `size_bytes` of a file in pieces. Raises InvalidRequest when it has become shorter."""
    left = size_bytes
    while left:
        data = file.read(min(left, PIECE_BYTES))
        if not data:
            raise InvalidRequest(f"{path} became shorter while it was read")
        left -= len(data)
        yield data


class NewFile:
    """A file that appears under its name when it is committed. As a context manager it removes its temporary file.

    A link or a file of that name is replaced. A device or a pipe is not, nor a link to one: otherwise root could
    replace /dev/null by a file. Bytes past the limit of a file are refused.
    """

    def __init__(self, path: LocalPath, *, mode: int = 0o644) -> None:
        self._path = Path(path)
        if self._path.is_dir() and not self._path.is_symlink():
            raise IsADirectoryError(f"{self._path} is a directory")
        if self._path.exists() and not (self._path.is_file() or self._path.is_dir()):
            raise FileExistsError(f"{self._path} is not a regular file, so it is not replaced")
        # Not derived from the name, which may already have the maximum length.
        self._part = self._path.with_name(f".executor-{secrets.token_hex(8)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with naming(self._path):
            fd = os.open(self._part, flags, mode)
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._left = FILE_BYTES_MAX

    def write(self, data: bytes) -> None:
        """Appends to the file. Raises OSError; ProtocolError past the limit."""
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError(f"a file has more than the accepted {FILE_BYTES_MAX} bytes")
        write_all(self._file, data, self._path)

    def commit(self) -> None:
        self._file.close()
        self._part.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError the name that the caller knows: a write has none, and a temporary file another one."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_all(file: BinaryIO, data: bytes, path: Path) -> None:
    """Appends to an unbuffered file, which belongs to this path. Raises OSError with the path."""
    view = memoryview(data)
    with naming(path):
        while view:
            view = view[file.write(view) :]


def check_name(name: str) -> tuple[str, ...]:
    """Returns the parts of a relative name from a sandbox. Raises ProtocolError for a name that is not safe here."""
    parts = tuple(name.split("/"))
    # It could control the terminal that lists it, or show another name; surrogates cannot be encoded.
    if _UNSAFE.search(name):
        raise ProtocolError(f"the name {name[:NAME_CHARS_MAX]!r} has control characters or reorders its letters")
    if len(name) > NAME_CHARS_MAX or len(parts) > NAME_PARTS_MAX:
        raise ProtocolError(f"the name {name[:NAME_CHARS_MAX]!r} is too long or too deep")
    if any(part in ("", ".", "..") for part in parts):
        raise ProtocolError(f"the name {name!r} does not stay in its directory")
    if any(len(part.encode()) > NAME_PART_BYTES_MAX for part in parts):
        raise ProtocolError(f"the name {name!r} has a part of more than {NAME_PART_BYTES_MAX} bytes")
    return parts


def make_directory(root: Path, parts: tuple[str, ...]) -> Path:
    """Returns the directory at these parts below the root; creates it if missing. Raises OSError for a link in the way.

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
                raise NotADirectoryError(f"{path} is in the way: it is not a directory, or it is a link") from None
    return path


def path_below(root: Path, name: str) -> Path:
    """Returns the path for this name below the root, and creates its directories. Raises ProtocolError, OSError."""
    parts = check_name(name)
    return make_directory(root, parts[:-1]) / parts[-1]
