"""The files of one recording: a directory in the daemon's state directory.

    about.json      what it is: tenant, rules, begin, end
    entries         records, each with the checksum of all records up to it
    blobs/SHA256    payloads of more than 1 KiB
    incoming/N      payloads whose pieces are incomplete, or that no entry names yet

Everything here blocks, and may raise OSError. A record that a kill has torn is cut off when the next daemon goes on; a
damaged one ends the recording there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from executor_api.recordings import BLOBS_MAX

ENTRY, REFERENCED, UNKNOWN, ENDED = range(4)
"""Types of records: an entry; a thing that is only referenced, or unknown; the reason for an early end."""
RECORD_BYTES_MAX = 64 << 20

_HEAD = struct.Struct("<IIB")  # size of the body, checksum, type
_ABOUT_BYTES_MAX = 64 << 10
_ABOUT, _ENTRIES, _BLOBS, _INCOMING = "about.json", "entries", "blobs", "incoming"


class BlobsFull(Exception):
    """The recording has as many blobs as a recording may have."""


@dataclass(frozen=True)
class About:
    """What a recording is. Times are seconds since 1970; `end_time_s` is None while the session goes on."""

    session_id: str
    tenant: str
    mode: str
    redact_tools: tuple[str, ...]
    retention_s: float
    total_bytes: int  # that all recordings of the tenant may have
    create_time_s: float
    end_time_s: float | None = None
    ended: str = ""  # why it ended before its session
    size_bytes: int = 0  # at its end

    @property
    def expire_time_s(self) -> float | None:
        return None if self.end_time_s is None else self.end_time_s + self.retention_s


def read_about(directory: Path) -> About:
    """Reads what a recording is. Raises OSError, ValueError."""
    with _opened(directory / _ABOUT) as file:
        found = json.loads(file.read(_ABOUT_BYTES_MAX))
    if not isinstance(found, dict) or not isinstance(found.get("redact_tools"), list):
        raise ValueError("it is not an object")
    about = About(**{**found, "redact_tools": tuple(map(str, found["redact_tools"]))})  # a TypeError names the field
    texts = (about.session_id, about.tenant, about.mode, about.ended)
    numbers = (about.create_time_s, about.retention_s, about.end_time_s or 0.0, about.size_bytes, about.total_bytes)
    if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, int | float) for each in numbers):
        raise ValueError("a field has another type")
    if about.session_id != directory.name:
        raise ValueError("it is of another session")
    return about


class Incoming:
    """A payload that arrives in pieces. Without `keeps`, only its hash is computed."""

    def __init__(self, path: Path, files: RecordingFiles, *, keeps: bool) -> None:
        self.path = path
        self.keeps = keeps
        self.size_bytes = 0
        self._files = files
        self._digest = hashlib.sha256()

    @property
    def name(self) -> str:
        """The SHA-256 of all pieces, in hex."""
        return self._digest.hexdigest()

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self.size_bytes += len(data)
        if self.keeps:
            self._files.incoming_bytes += len(data)
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write(fd, data)
            finally:
                os.close(fd)

    def read(self) -> bytes:
        """Returns the pieces."""
        return self.path.read_bytes() if self.size_bytes else b""

    def drop(self) -> None:
        """Removes it."""
        self._files.incoming_bytes -= self.size_bytes if self.keeps else 0
        self.path.unlink(missing_ok=True)


class RecordingFiles:
    """Writes one recording."""

    def __init__(self, directory: Path) -> None:
        self.incoming_bytes = 0  # of payloads that no entry names yet
        self._directory = directory
        self._fd = -1
        self._checksum = zlib.crc32(directory.name.encode())
        self._entries_bytes = 0
        self._blobs_bytes = 0
        self._blobs: set[str] = set()
        self._incoming = 0

    @property
    def size_bytes(self) -> int:
        return self._entries_bytes + self._blobs_bytes

    def create(self, about: About) -> None:
        self._begin(about, is_new=True)

    def reopen(self, about: About) -> Iterator[tuple[int, bytes]]:
        """Yields the records of an earlier daemon, and then goes on after the last whole one.

        That daemon may have been killed at any step of `create`; the steps that it lacks are done here.
        """
        shutil.rmtree(self._directory / _INCOMING, ignore_errors=True)
        self._begin(about, is_new=False)
        for blob in os.scandir(self._directory / _BLOBS):
            self._blobs.add(blob.name)
            self._blobs_bytes += blob.stat(follow_symlinks=False).st_size
        for end, checksum, kind, body in _records(self._directory):
            self._entries_bytes, self._checksum = end, checksum
            yield kind, body
        os.ftruncate(self._fd, self._entries_bytes)

    def _begin(self, about: About, *, is_new: bool) -> None:
        for path in (self._directory, self._directory / _BLOBS, self._directory / _INCOMING):
            path.mkdir(mode=0o700, exist_ok=not is_new)
        self.write_about(about)
        self._fd = _open(self._directory / _ENTRIES, os.O_CREAT | (os.O_EXCL if is_new else 0))

    def write_about(self, about: About) -> None:
        part = self._directory / f"{_ABOUT}.part"
        part.write_text(json.dumps(asdict(about)))
        part.chmod(0o600)
        part.replace(self._directory / _ABOUT)

    def append(self, kind: int, body: bytes) -> None:
        checksum = zlib.crc32(body, self._checksum)
        _write(self._fd, _HEAD.pack(len(body), checksum, kind) + body)
        self._checksum = checksum
        self._entries_bytes += _HEAD.size + len(body)

    def incoming(self, *, keeps: bool = True) -> Incoming:
        self._incoming += 1
        return Incoming(self._directory / _INCOMING / str(self._incoming), self, keeps=keeps)

    def keep(self, incoming: Incoming) -> str:
        """Makes a payload that has arrived a blob. Returns its name. Raises BlobsFull."""
        name = incoming.name
        if name in self._blobs:
            incoming.drop()
        elif len(self._blobs) >= BLOBS_MAX:
            raise BlobsFull
        else:
            incoming.path.replace(self._directory / _BLOBS / name)
            self._blobs.add(name)
            self._blobs_bytes += incoming.size_bytes
            self.incoming_bytes -= incoming.size_bytes
        return name

    def drop_incoming(self) -> None:
        """Removes all payloads that no entry names yet."""
        self.incoming_bytes = 0
        shutil.rmtree(self._directory / _INCOMING, ignore_errors=True)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._directory, self._entries_bytes, tuple(self._blobs))

    def close(self) -> None:
        """Closes the files. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        self.drop_incoming()


@dataclass(frozen=True)
class Snapshot:
    """A recording as it is at one moment: later entries and blobs are not part of it."""

    directory: Path
    entries_bytes: int
    blobs: tuple[str, ...]

    @classmethod
    def of_ended(cls, directory: Path) -> Snapshot:
        entries_bytes = (directory / _ENTRIES).stat().st_size
        return cls(directory, entries_bytes, tuple(sorted(each.name for each in os.scandir(directory / _BLOBS))))

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yields the records; the last one is ENDED if they are damaged."""
        end = 0
        for end, _, kind, body in _records(self.directory):
            yield kind, body
            if end >= self.entries_bytes:
                return
        if end < self.entries_bytes:
            yield ENDED, b"its file is damaged: what follows is lost"

    def blob_pieces(self, name: str, piece_bytes: int) -> Iterator[bytes]:
        with _opened(self.directory / _BLOBS / name) as file:
            while piece := file.read(piece_bytes):
                yield piece


def _records(directory: Path) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields the valid records: the position after each, the checksum there, type and body."""
    position, checksum = 0, zlib.crc32(directory.name.encode())
    with _opened(directory / _ENTRIES) as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, expected, kind = _HEAD.unpack(head)
            if size > RECORD_BYTES_MAX:
                return
            body = file.read(size)
            checksum = zlib.crc32(body, checksum)
            if len(body) != size or checksum != expected or kind > ENDED:
                return
            position += _HEAD.size + size
            yield position, checksum, kind, body


def _opened(path: Path):  # type: ignore[no-untyped-def]  # a file object
    # A pipe must not hang the reader, and a link must not lead elsewhere.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
