"""Reads the bytecode of a first import from its sandbox, and writes it next to the sources.

Code of the packages ran in that sandbox, so the bytecode is hostile. What it does can't be checked, and need not be: a
program that imports these packages runs their code anyway. But it must stay inside the environment: each piece must
belong to an existing source, is written to a new file, and no link is followed.

The stream has, for each piece, the lengths of its name (2 bytes) and content (4 bytes), big-endian, then both.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from executor_server.core import SandboxFailure

MAX_PIECES = 50_000
MAX_PIECE_BYTES = 32 * 2**20
MAX_STREAM_BYTES = 512 * 2**20
_MAX_NAME_BYTES = 1024
_MAX_PARTS = 66

_HEADER = struct.Struct("!HI")
_PYC_HEADER = struct.Struct("<4sIII")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# No such source, a link on the way to it, a directory that a package has there, a name that no file can have.
_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_FILE_NAME = re.compile(r"(?P<module>[^/.]+)\.(?P<tag>cpython-[0-9]{2,4})\.pyc")


class BytecodeRefused(SandboxFailure):
    """The stream is not that of an honest first import. The message is for the log."""


@dataclass
class Written:
    """The result of a stream."""

    files: int = 0
    size_bytes: int = 0
    skipped: int = 0  # pieces without a source


class BytecodeWriter:
    """Takes the stream, in chunks of any size, and writes its files. Blocks; use it in a thread.

    `site_fd` is the directory of the packages, which tree.py has taken over. `tag` is the interpreter's:
    "cpython-312". Raises BytecodeRefused, OSError.
    """

    def __init__(self, site_fd: int, tag: str) -> None:
        self._site_fd = site_fd
        self._tag = tag
        self._buffer = bytearray()
        self._taken_bytes = 0
        self._pieces = 0
        self._magic: bytes | None = None
        self.written = Written()

    def take(self, chunk: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._taken_bytes += len(chunk)
        if self._taken_bytes > MAX_STREAM_BYTES:
            raise BytecodeRefused(f"more than {MAX_STREAM_BYTES:,} bytes of bytecode")
        self._buffer += chunk
        for name, content in self._complete():
            self._write(name, content)

    def end(self) -> Written:
        """Ends the stream. Raises BytecodeRefused if it stops in the middle of a piece."""
        if self._buffer:
            raise BytecodeRefused("the bytecode ends in the middle of a piece")
        return self.written

    def _complete(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the pieces that have arrived whole."""
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            name_bytes, content_bytes = _HEADER.unpack_from(self._buffer, at)
            if not 0 < name_bytes <= _MAX_NAME_BYTES or content_bytes > MAX_PIECE_BYTES:
                raise BytecodeRefused("a piece of bytecode with a length that is refused")
            start = at + _HEADER.size
            end = start + name_bytes + content_bytes
            if len(self._buffer) < end:
                break
            self._pieces += 1
            if self._pieces > MAX_PIECES:
                raise BytecodeRefused(f"more than {MAX_PIECES:,} pieces of bytecode")
            yield bytes(self._buffer[start : start + name_bytes]), bytes(self._buffer[start + name_bytes : end])
            at = end
        del self._buffer[:at]

    def _write(self, name: bytes, content: bytes) -> None:
        parts, module = self._read_name(name)
        try:
            with _directories(self._site_fd, parts[:-1]) as directory:
                source = os.stat(f"{module}.py", dir_fd=directory, follow_symlinks=False)
                if not stat.S_ISREG(source.st_mode) or not self._belongs(content, source):
                    self.written.skipped += 1
                    return
                with suppress(FileExistsError):
                    os.mkdir("__pycache__", 0o755, dir_fd=directory)
                with _directories(directory, ["__pycache__"]) as cache:
                    os.fchmod(cache, 0o755)  # the daemon's umask may have taken some of it
                    _write_new(cache, parts[-1], content)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            self.written.skipped += 1
            return
        self.written.files += 1
        self.written.size_bytes += len(content)

    def _read_name(self, name: bytes) -> tuple[list[str], str]:
        """Returns the parts of "package/module.cpython-312.pyc", and the module. Raises BytecodeRefused."""
        try:
            parts = name.decode().split("/")
        except UnicodeDecodeError as error:
            raise BytecodeRefused("a name of bytecode that is not UTF-8") from error
        match = _FILE_NAME.fullmatch(parts[-1])
        is_plain = all(part not in ("", ".", "..") and part.isprintable() for part in parts)
        if match is None or match["tag"] != self._tag or not is_plain or len(parts) > _MAX_PARTS:
            raise BytecodeRefused("a name of bytecode that is refused")
        return parts, match["module"]

    def _belongs(self, content: bytes, source: os.stat_result) -> bool:
        """True if its header names this source, and the same interpreter as the other pieces."""
        if len(content) < _PYC_HEADER.size:
            return False
        magic, flags, modified_s, size_bytes = _PYC_HEADER.unpack_from(content)
        self._magic = self._magic or magic
        is_of_source = (modified_s, size_bytes) == (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)
        return magic == self._magic and magic[2:] == b"\r\n" and flags == 0 and is_of_source


@contextmanager
def _directories(top: int, parts: list[str]) -> Iterator[int]:
    """Opens a directory below `top`, part by part, following no link."""
    with ExitStack() as stack:
        fd = top
        for part in parts:
            fd = os.open(part, _DIRECTORY, dir_fd=fd)
            stack.callback(os.close, fd)
        yield fd


def _write_new(directory: int, name: str, content: bytes) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)  # one that came with the package
    fd = os.open(name, _NEW_FILE, 0o644, dir_fd=directory)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o644)
        file.write(content)
