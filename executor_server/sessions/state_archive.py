"""Archives of a session's state: the format, the signature, and the spool files.

    magic | u32 length of the header | header (JSON) | variables | files | HMAC-SHA256 of all before it

The variables are pickled, the files are a tar archive. The daemon reads neither: they are for sandboxes only, and count
as hostile there. The header has the lengths and digests of both, the tenant, and a manifest for people. Only the header
is parsed, and it is bounded. An archive that was not signed with this daemon's key is refused unless the policy allows
foreign states.

During a transfer, an archive is in an unnamed file, so memory stays small and nothing is left when the daemon dies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import struct
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from executor_api.disk import is_disk_full
from executor_api.limits import PIECE_BYTES
from executor_server.core import (
    ExecutorError,
    Forbidden,
    InvalidRequest,
    Reason,
    ResourceExhausted,
    StateManifest,
    StateOmission,
)

MAGIC = b"\x89executor-state\r\n\x1a\n"
VERSION = 1
MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_MANIFEST_BYTES = 1536 * 1024
"""JSON bytes that a guest may send about variables, and about files; two such parts fit into a header."""
MAX_AT_A_TIME = 16
"""Concurrent transfers; each takes space on the disk."""

MAX_OF_TENANT = 2
"""Concurrent transfers of one tenant."""

_HASHED_BYTES = 4 * 1024 * 1024
_LENGTH = struct.Struct("!I")
_SIGNATURE_BYTES = 32
_KEY_ID_CHARS = 16
_DIGEST_CHARS = 64
_RETRY_S = 2.0


@dataclass(frozen=True)
class Part:
    """One part of an archive: its size and its SHA-256."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """The header of an archive."""

    tenant: str
    session_id: str
    key_id: str
    created_s: float
    variables: Part
    files: Part
    manifest: StateManifest


class StateArchives:
    """Owns the directory of the spool files, and the key that signs archives."""

    def __init__(self, directory: Path, key: bytes) -> None:
        """`directory` is the daemon's own, and is created if it is missing."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        self._open: Counter[str] = Counter()
        self.use_key(key)

    def use_key(self, key: bytes) -> None:
        """Sets the key for signatures."""
        self._key = key
        self.key_id = hashlib.sha256(b"key of states:" + key).hexdigest()[:_KEY_ID_CHARS]

    @contextmanager
    def spool(self, tenant: str, max_bytes: int) -> Iterator[Spool]:
        """Opens a file for one archive. Raises ResourceExhausted when too many are open, or the disk is full."""
        if self._open[tenant] >= MAX_OF_TENANT or self._open.total() >= MAX_AT_A_TIME:
            message = "too many states are being exported or restored; try again later"
            raise ResourceExhausted(Reason.QUEUE_FULL, message, retry_after_s=_RETRY_S)
        self._open[tenant] += 1
        try:
            with _refused_when_full():
                # Unbuffered, so that a write itself fails when the disk is full.
                file = tempfile.TemporaryFile(dir=self._directory, prefix="state-", buffering=0)  # noqa: SIM115 (below)
            with file:
                yield Spool(cast("BinaryIO", file), max_bytes)
        finally:
            self._open[tenant] -= 1
            self._open += Counter()  # drops tenants that have none

    async def signed(self, header: Header, parts: Spool) -> AsyncIterator[bytes]:
        """Yields the archive of the two parts in a spool."""
        text = json.dumps(_header_values(header)).encode("ascii")
        assert len(text) <= MAX_HEADER_BYTES, f"a header of {len(text)} bytes"
        signature = hmac.new(self._key, digestmod="sha256")
        prefix = MAGIC + _LENGTH.pack(len(text)) + text
        for start in range(0, len(prefix), PIECE_BYTES):
            piece = prefix[start : start + PIECE_BYTES]
            signature.update(piece)
            yield piece
        async for piece in parts.read(0, parts.size_bytes):
            signature.update(piece)
            yield piece
        yield signature.digest()

    async def opened(self, archive: Spool, tenant: str, *, allow_foreign: bool) -> Opened:
        """Checks a received archive.

        Raises InvalidRequest for a damaged archive or other bytes; Forbidden for an archive of another daemon or
        tenant, unless those are allowed.
        """
        signed_bytes = archive.size_bytes - _SIGNATURE_BYTES
        text, begin = await asyncio.to_thread(_header_text, archive)
        # The signature is checked before the JSON is parsed: parsing costs more than hashing.
        is_ours = await asyncio.to_thread(self._is_signed, archive, signed_bytes)
        header = await asyncio.to_thread(_read_header, text)
        if begin + header.variables.size_bytes + header.files.size_bytes != signed_bytes:
            raise _invalid("its size is not the one in its header")
        if not is_ours and header.key_id == self.key_id:
            raise _invalid("it is damaged, or this daemon did not sign it")
        is_foreign = not is_ours or header.tenant != tenant
        if is_foreign and not allow_foreign:
            whose = "another daemon" if not is_ours else "another tenant"
            raise Forbidden(
                Reason.STATE_FOREIGN,
                f"this state was written for {whose}, and the policy does not allow foreign states",
            )
        opened = Opened(archive, header, begin, is_foreign)
        if not is_ours:
            await asyncio.to_thread(_check_parts, opened)
        return opened

    @property
    def overhead_bytes(self) -> int:
        """The most bytes that an archive has in addition to its parts."""
        return len(MAGIC) + _LENGTH.size + MAX_HEADER_BYTES + _SIGNATURE_BYTES

    def _is_signed(self, archive: Spool, signed_bytes: int) -> bool:
        signature = hmac.new(self._key, digestmod="sha256")
        for piece in archive.pieces(0, signed_bytes, _HASHED_BYTES):
            signature.update(piece)
        return hmac.compare_digest(signature.digest(), archive.at(signed_bytes, _SIGNATURE_BYTES))


class Spool:
    """The bytes of one archive, in an unnamed file."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._sha256 = hashlib.sha256()
        self._part = hashlib.sha256()
        self._part_begin = 0
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of all written bytes, in hexadecimal."""
        return self._sha256.hexdigest()

    @property
    def left_bytes(self) -> int:
        return self._max_bytes - self.size_bytes

    async def write(self, data: bytes) -> None:
        """Appends bytes. Raises ResourceExhausted if there are too many, or the disk is full."""
        if len(data) > self.left_bytes:
            raise ResourceExhausted(Reason.TOO_LARGE, f"a state has at most {self._max_bytes:,} bytes")
        self._sha256.update(data)
        self._part.update(data)
        self.size_bytes += len(data)
        with _refused_when_full():
            await asyncio.to_thread(self._write_all, data)

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def end_part(self) -> Part:
        """Ends a part, and returns its size and digest."""
        part = Part(self.size_bytes - self._part_begin, self._part.hexdigest())
        self._part, self._part_begin = hashlib.sha256(), self.size_bytes
        return part

    async def read(self, begin: int, size: int) -> AsyncIterator[bytes]:
        """Yields a range in pieces."""
        pieces = self.pieces(begin, size)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def pieces(self, begin: int, size: int, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        for start in range(begin, begin + size, piece_bytes):
            yield self.at(start, min(piece_bytes, begin + size - start))

    def at(self, begin: int, size: int) -> bytes:
        self._file.seek(begin)
        data = self._file.read(size)
        self._file.seek(0, 2)
        if len(data) != size:
            raise OSError("a spool is shorter than the bytes written to it")
        return data


@contextmanager
def _refused_when_full() -> Iterator[None]:
    """Turns a full disk into a refusal that may be retried."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        message = "the daemon's disk has no room for this state; try again later"
        raise ResourceExhausted(Reason.QUEUE_FULL, message, retry_after_s=_RETRY_S) from error


@dataclass(frozen=True)
class Opened:
    """A checked archive, and whether it is foreign."""

    spool: Spool
    header: Header
    begin: int
    is_foreign: bool

    @property
    def sha256(self) -> str:
        return self.spool.sha256

    def variables(self) -> AsyncIterator[bytes]:
        return self.spool.read(self.begin, self.header.variables.size_bytes)

    def files(self) -> AsyncIterator[bytes]:
        return self.spool.read(self.begin + self.header.variables.size_bytes, self.header.files.size_bytes)


def header_of(tenant: str, session_id: str, key_id: str, parts: tuple[Part, Part], manifest: StateManifest) -> Header:
    """Returns the header of a new archive."""
    return Header(tenant, session_id, key_id, round(time.time(), 3), *parts, manifest)


def _check_parts(opened: Opened) -> None:
    """Checks the parts of an archive without a known signature against the digests of its header."""
    begin = opened.begin
    for part in (opened.header.variables, opened.header.files):
        digest = hashlib.sha256()
        for piece in opened.spool.pieces(begin, part.size_bytes, _HASHED_BYTES):
            digest.update(piece)
        if digest.hexdigest() != part.sha256:
            raise _invalid("it is damaged")
        begin += part.size_bytes


def _invalid(why: str) -> ExecutorError:
    return InvalidRequest(Reason.STATE_INVALID, f"this state can't be restored: {why}")


# ---------------------------------------------------------------------------------------------------------------------
# The header


def _header_values(header: Header) -> dict[str, Any]:
    return {"version": VERSION, **asdict(header)}


def _header_text(archive: Spool) -> tuple[bytes, int]:
    """Returns the bytes of the header, and the position of the parts. Raises InvalidRequest."""
    start = len(MAGIC) + _LENGTH.size
    if archive.size_bytes < start + _SIGNATURE_BYTES:
        raise _invalid("it is too short")
    prefix = archive.at(0, start)
    (length,) = _LENGTH.unpack(prefix[len(MAGIC) :])
    if not prefix.startswith(MAGIC):
        raise _invalid("it does not begin like one")
    if length > min(MAX_HEADER_BYTES, archive.size_bytes - start - _SIGNATURE_BYTES):
        raise _invalid("its header is too large")
    return archive.at(start, length), start + length


def _read_header(text: bytes) -> Header:
    """Parses the header. Raises InvalidRequest."""
    try:
        values = bounded_object(text, MAX_HEADER_BYTES)
        if values.get("version") != VERSION:
            raise _invalid(f"its version is not {VERSION}")
        return Header(
            tenant=_text(values, "tenant", 256),
            session_id=_text(values, "session_id", 64),
            key_id=_text(values, "key_id", _KEY_ID_CHARS),
            created_s=_number(values, "created_s"),
            variables=_part(values["variables"]),
            files=_part(values["files"]),
            manifest=manifest_from(values["manifest"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid("its header can't be read") from error


def bounded_object(text: bytes, max_bytes: int) -> dict[str, Any]:
    """Parses a JSON object of hostile origin. Raises ValueError, RecursionError.

    Counts brackets and commas before it parses, including those in strings: each byte of "[[],[],…" may become thirty
    bytes of objects.
    """
    if len(text) > max_bytes:
        raise ValueError(f"{len(text)} bytes of JSON, over {max_bytes}")
    if text.count(b"[") + text.count(b"{") > MAX_PARTS or text.count(b",") > MAX_PARTS:
        raise ValueError("JSON of too many parts")
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return values


MAX_PARTS = 448 * 1024
"""Lists and objects, and separately values, in a header or a manifest. Enough for all names and reasons that a guest
may send, even if these consist of brackets and commas only."""

MAX_NAMES = 4096
_MAX_NAME_CHARS = 256
_MAX_REASON_CHARS = 512


def manifest_from(values: Any) -> StateManifest:
    """Reads a manifest from JSON of hostile origin. Raises ValueError, KeyError, TypeError."""
    return StateManifest(
        variables=tuple(_listed(values["variables"], _name)),
        omitted_variables=_omissions(values["omitted_variables"]),
        files=_count(values["files"]),
        file_bytes=_count(values["file_bytes"]),
        omitted_files=_omissions(values["omitted_files"]),
        python_version=_text(values, "python_version", 64),
    )


def _omissions(values: Any) -> tuple[StateOmission, ...]:
    return tuple(_listed(values, _omission))


def _omission(values: Any) -> StateOmission:
    return StateOmission(_name(values["name"]), _text(values, "reason", _MAX_REASON_CHARS))


def _listed(values: Any, read: Any) -> list[Any]:
    if not isinstance(values, list) or len(values) > MAX_NAMES:
        raise ValueError(f"not a list of at most {MAX_NAMES}")
    return [read(each) for each in values]


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME_CHARS:
        raise ValueError("not a name")
    value.encode()  # raises for half of a surrogate pair
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a count")
    return value


def _part(values: Any) -> Part:
    return Part(_count(values["size_bytes"]), _text(values, "sha256", _DIGEST_CHARS))


def _text(values: Mapping[str, Any], name: str, max_chars: int) -> str:
    value = values[name]
    if not isinstance(value, str) or len(value) > max_chars:
        raise ValueError(f"{name} is not a text of at most {max_chars} characters")
    value.encode()
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise ValueError(f"{name} is not a time")
    return float(value)
