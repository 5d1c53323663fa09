"""Recordings of sessions: one file with everything a session was asked and everything it answered.

    with client.create_session() as session, session.record("run.rxr"):
        session.execute("1 + 1")

    with Recording("run.rxr") as recording:
        for step in recording.steps():
            print(step.request.code, recording.result(step).output)

A recording is a zip file with `events.jsonl`, `blobs/SHA256` and `manifest.json`. A line of `events.jsonl` is an entry:
its time, its kind, the execution it belongs to, and the fields of a message of our protocol
(`executor_api.recordings.KINDS`), as protobuf writes them in JSON. Payloads of more than 1 KiB are blobs; their
`blob_id` is their SHA-256. The manifest has the head of a hash chain over the lines, and says what was captured, what
was only referenced and what is unknown. The zip's comment is the SHA-256 of the file up to the end of its directory.

The hashes show damage and careless edits. They don't show who wrote a recording: whoever edits one can compute new
hashes. So a reader treats every file as hostile: it bounds what it reads, executes nothing and unpickles nothing.

A `Recorder` writes next to the final path, and renames the file when it is closed. Until then its entries are the bytes
of messages, in a file without a name: JSON takes ten times as long. A recorder never fails the run that it records: if
the disk is full, it logs a warning and removes its file; at `RECORDING_BYTES_MAX` it ends the recording, which is then
incomplete.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import struct
import sys
import tempfile
import threading
import time
import weakref
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from google.protobuf import json_format
from google.protobuf.message import Message

from executor_api import strict_json
from executor_api.limits import BLOB_BYTES_MAX
from executor_api.recordings import (
    BLOBS_MAX,
    ENTRY_LENGTH,
    INLINE_BYTES_MAX,
    KINDS,
    LINE_BYTES_MAX,
    LINES_BYTES_MAX,
    RECORDING_BYTES_MAX,
    fields_of,
    payload_of,
)
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client._core.assembler import Assembler
from executor_client._core.local import LocalPath, open_regular
from executor_client._core.short_repr import ShortRepr
from executor_client._core.values import unpack_or_opaque
from executor_client.errors import InvalidRequest, ProtocolError, RecordingError
from executor_client.results import ExecutionResult

VERSION = 1
"""Increased when an older reader would misunderstand a file."""
HELD_BYTES_MAX = 2 << 30
"""Bytes of the entries that `Recording.in_order` holds at one time. A zip bomb has as many in a small file."""
_ENTRY_BYTES = 1_000
"""Bytes that an entry takes in memory, in addition to its line."""
TIME_S_MAX = 1 << 36
"""Seconds since 1970; a larger number is no time."""
_MANIFEST_BYTES_MAX = 1 << 20

_LINES, _MANIFEST, _BLOBS = "events.jsonl", "manifest.json", "blobs/"
_BEGIN = hashlib.sha256(b"").digest()
_END = struct.Struct("<4s4H2LH")  # the end of a zip's central directory
_COMMENT_BYTES = 64
_LOCATOR_BYTES = 20  # bytes of the locator of a large zip (ZIP64), which precedes the end
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)

_read_json = strict_json.reader()
_write_json = strict_json.writer(ascii_only=False)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Manifest:
    """What a recording is, and what it lacks.

    `captured` counts entries by kind. `referenced` counts things whose names and hashes alone are in the file, and
    `unknown` counts things that happened but were not seen, both by a description. `ended` is the reason for an
    incomplete recording. `chain` is the head of the hash chain over the entries, in hex.
    """

    version: int
    writer: str
    entries: int
    chain: str
    complete: bool
    ended: str
    redacted_tools: tuple[str, ...]
    captured: Mapping[str, int]
    referenced: Mapping[str, int]
    unknown: Mapping[str, int]


@dataclass(frozen=True)
class Entry:
    """One line of a recording. `time_s` is in seconds since 1970; `step` counts executions, 0 is outside of them.

    A `redacted` entry lacks its payloads: the tool's arguments or its answer.
    """

    number: int
    time_s: float
    kind: str
    step: int
    fields: Mapping[str, Any]
    redacted: bool = False

    def message(self) -> Any:
        """Returns the fields as a message of the type in `KINDS`. Raises RecordingError if they are not one."""
        made = KINDS[self.kind]
        assert made is not None, f"a {self.kind} entry has no message"
        fields = {name: value for name, value in self.fields.items() if name != "content"}
        return _message(fields, made, f"entry {self.number} ({self.kind})")


@dataclass(frozen=True)
class Step:
    """One recorded execution. `entries` begins with its request; `is_ended` is False if its result is missing."""

    number: int
    request: service_pb.ExecuteRequest
    entries: tuple[Entry, ...]
    is_ended: bool

    @property
    def time_s(self) -> float:
        return self.entries[0].time_s

    def answers(self) -> Iterator[tuple[Entry, Any]]:
        """Yields the answers of host tools: `SubmitToolResultRequest`, with its entry."""
        return ((each, each.message()) for each in self.entries if each.kind == "answer")


def _message(fields: Mapping[str, Any], made: type[Message], what: str) -> Any:
    try:
        return json_format.ParseDict(dict(fields), made())
    except (json_format.ParseError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise RecordingError(f"the recording can't be read: {what} has invalid fields: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Recording(ShortRepr):
    """Reads a recording. Opening it checks every hash and bound; as a context manager, closes the file.

    Raises RecordingError for a file that is cut, damaged, edited, too large or of a newer version, and OSError.
    """

    _shows = ("path",)

    def __init__(self, path: LocalPath) -> None:
        self.path = Path(path)
        with ExitStack() as on_failure:
            try:
                file = on_failure.enter_context(open_regular(self.path))
            except InvalidRequest as error:
                raise RecordingError(error.message) from error
            self._sizes = self._checked_zip(file)
            self.manifest = self._read_manifest()
            self._check_lines()
            self._close = on_failure.pop_all()

    def entries(self) -> Iterator[Entry]:
        """Yields the entries in order. Raises RecordingError at one that is not valid."""
        return (entry for entry, _ in self._sized_entries())

    def steps(self) -> Iterator[Step]:
        """Yields the executions in the order of their requests. Raises as `in_order` does."""
        return (item for item in self.in_order() if isinstance(item, Step))

    def in_order(self) -> Iterator[Entry | Step]:
        """Yields the executions in the order of their requests, and in between the entries outside of them.

        Raises RecordingError, also if more than `HELD_BYTES_MAX` of entries wait for the end of an earlier execution.
        """
        waiting: deque[_Waiting] = deque()
        running: dict[int, _Waiting] = {}
        held = 0
        for entry, line_bytes in self._sized_entries():
            if (item := running.get(entry.step)) is None:
                if entry.step and entry.kind != "execute":
                    continue  # it came after the end of its execution
                item = _Waiting(is_over=not entry.step)
                waiting.append(item)
            if entry.step:
                running[entry.step] = item
            item.entries.append(entry)
            item.size_bytes += line_bytes + _ENTRY_BYTES
            held += line_bytes + _ENTRY_BYTES
            if held > HELD_BYTES_MAX:
                raise self._broken(f"more than {HELD_BYTES_MAX:,} bytes of entries are of unended executions")
            if entry.step and (entry.kind == "broken" or item.has_result):
                item.is_over = True
                del running[entry.step]
            while waiting and waiting[0].is_over:
                held -= waiting[0].size_bytes
                yield waiting.popleft().item()
        for left in waiting:
            yield left.item()

    def _sized_entries(self) -> Iterator[tuple[Entry, int]]:
        """Yields the entries with the sizes of their lines in bytes."""
        steps = 0
        for number, line in enumerate(self._lines(), 1):
            entry = _entry(number, line)
            if entry.kind == "execute":
                steps += 1
                if entry.step != steps:
                    raise self._broken(f"entry {number} begins execution {entry.step} after {steps - 1}")
            elif not 0 <= entry.step <= steps:
                raise self._broken(f"entry {number} is of execution {entry.step}, which has not begun")
            yield entry, len(line)

    def result(self, step: Step) -> ExecutionResult | None:
        """Returns the result of an execution, as the client returned it; None without one.

        A final answer that couldn't be packed is None. Raises RecordingError.
        """
        assembler = Assembler(step.request.execution_id)
        assembler.final_answers = self.final_answers(step)
        try:
            for event in self.events(step):
                assembler.feed(event)
        except ProtocolError as error:
            raise self._broken(f"execution {step.number} is not valid: {error}") from error
        return assembler.result

    def final_answers(self, step: Step) -> dict[str, Any]:
        """Returns the values of the tools' answers by call, for an `Assembler`."""
        return {
            answer.call_id: unpack_or_opaque(self.payload(answer.value.packed)) if answer.HasField("value") else None
            for _, answer in step.answers()
        }

    def events(self, step: Step) -> Iterator[pb.Event]:
        """Yields the events of an execution, with all payloads inline and numbered from 1."""
        number = 0
        for entry in step.entries:
            if entry.kind == "event":
                number += 1
                event: pb.Event = entry.message()
                event.number = number
                if (payload := payload_of(event)) is not None:
                    payload.inline = b"" if entry.redacted else self.payload(payload)
                yield event

    def payload(self, payload: pb.Payload | Mapping[str, Any]) -> bytes:
        """Returns the bytes of a payload: of a message, or in its JSON form. Raises RecordingError."""
        at: pb.Payload = payload if isinstance(payload, pb.Payload) else _message(payload, pb.Payload, "a payload")
        if at.WhichOneof("content") != "blob":
            return at.inline
        name, size = at.blob.blob_id, at.blob.size_bytes
        if self._sizes.get(_BLOBS + name) != size:
            raise self._broken(f"a blob of {size:,} bytes is missing")
        data = self._read(_BLOBS + name, BLOB_BYTES_MAX)
        if hashlib.sha256(data).hexdigest() != name:
            raise self._broken("a blob has another SHA-256 than its name")
        return data

    def close(self) -> None:
        self._close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _checked_zip(self, file: BinaryIO) -> dict[str, int]:
        """Checks the file's hash and structure before `zipfile` reads it, since it may be a zip bomb."""
        size = os.fstat(file.fileno()).st_size
        if size > RECORDING_BYTES_MAX:
            raise RecordingError(f"{self.path} has {size:,} bytes; a recording has at most {RECORDING_BYTES_MAX:,}")
        at = size - _END.size - _COMMENT_BYTES
        file.seek(max(at, 0))
        tail = file.read(_END.size + _COMMENT_BYTES)
        if at < 0 or tail[:4] != b"PK\5\6":
            raise RecordingError(
                f"{self.path} is not a whole recording: its end is missing. It was cut, or is another kind of file"
            )
        _, _, _, _, members, directory_bytes, directory_at, comment_bytes = end = _END.unpack(tail[: _END.size])
        if end[1:4] != (0, 0, members) or directory_at + directory_bytes != at or comment_bytes != _COMMENT_BYTES:
            raise self._broken("its end is not as a recorder writes it")
        if tail[_END.size :] != _digest(file, at):
            raise self._broken("its SHA-256 is another one than it says: it was edited or damaged")
        file.seek(max(at - _LOCATOR_BYTES, 0))
        # After a locator, `zipfile` takes the number and the bytes of the parts from elsewhere.
        if members > BLOBS_MAX + 2 or directory_bytes > 200 * members or file.read(4) == b"PK\6\7":
            raise self._broken("it has too many parts")
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
            raise self._broken(f"it is not a zip file: {error}") from error
        parts = self._zip.infolist()
        sizes = {each.filename: each.file_size for each in parts}
        stored = sum(size for name, size in sizes.items() if name.startswith(_BLOBS))
        if len(sizes) != members or stored > size or not sizes.keys() >= {_LINES, _MANIFEST}:
            raise self._broken("its parts are not those of a recording")
        # A compressed part yields gigabytes if it is read at once, whatever size it says. The lines are read in pieces.
        if any(each.compress_type != zipfile.ZIP_STORED for each in parts if each.filename != _LINES) or (
            self._zip.getinfo(_LINES).compress_type != zipfile.ZIP_DEFLATED
        ):
            raise self._broken("its parts are not compressed as a recorder does it")
        return sizes

    def _read(self, name: str, bytes_max: int) -> bytes:
        if self._sizes[name] > bytes_max:
            raise self._broken(f"{name} has {self._sizes[name]:,} bytes; the limit is {bytes_max:,}")
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
            raise self._broken(f"{name} can't be read: {error}") from error

    def _read_manifest(self) -> Manifest:
        try:
            found = _read_json(self._read(_MANIFEST, _MANIFEST_BYTES_MAX))
        except strict_json.NotJson as error:
            raise self._broken(f"its manifest is not JSON: {error}") from error
        number = found.get("version") if isinstance(found, dict) else None
        if type(number) is not int or number < 1:
            raise self._broken("its manifest has no version")
        if number > VERSION:
            raise RecordingError(
                f"{self.path} is of version {number}, and this program reads versions up to {VERSION}: "
                "update remote-executor"
            )
        if not _is_manifest(found):
            raise self._broken("its manifest is not as a recorder writes it")
        return Manifest(**{**found, "redacted_tools": tuple(found["redacted_tools"])})

    def _lines(self) -> Iterator[bytes]:
        if self._sizes[_LINES] > LINES_BYTES_MAX:
            raise self._broken(f"its entries have {self._sizes[_LINES]:,} bytes; the limit is {LINES_BYTES_MAX:,}")
        try:
            with self._zip.open(_LINES) as lines:
                while line := lines.readline(LINE_BYTES_MAX + 1):
                    if len(line) > LINE_BYTES_MAX or not line.endswith(b"\n"):
                        raise self._broken("an entry is too long, or cut")
                    yield line
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
            raise self._broken(f"its entries can't be read: {error}") from error

    def _check_lines(self) -> None:
        chain, count = _BEGIN, 0
        for line in self._lines():
            chain, count = _linked(chain, line), count + 1
        if chain.hex() != self.manifest.chain or count != self.manifest.entries:
            raise self._broken("its entries are not those that were recorded: the hash chain has another head")

    def _broken(self, why: str) -> RecordingError:
        return RecordingError(f"{self.path} can't be used: {why}")


def _entry(number: int, line: bytes) -> Entry:
    try:
        found = _read_json(line[:-1])
    except strict_json.NotJson as error:
        raise RecordingError(f"the recording can't be read: entry {number} is not JSON: {error}") from error
    match found:
        case {
            "time": int() | float() as time_s,
            "kind": str() as kind,
            "step": int() as step,
            "fields": dict() as fields,
        }:
            if kind in KINDS and 0 <= time_s < TIME_S_MAX:
                return Entry(number, float(time_s), kind, step, fields, redacted=found.get("redacted") is True)
    raise RecordingError(f"the recording can't be read: entry {number} is not as a recorder writes it")


@dataclass
class _Waiting:
    """An entry outside of executions, or all entries of an execution; `is_over` if no more entries belong to it."""

    is_over: bool
    entries: list[Entry] = field(default_factory=list)
    size_bytes: int = 0

    @property
    def has_result(self) -> bool:
        return self.entries[-1].kind == "event" and "result" in self.entries[-1].fields

    def item(self) -> Entry | Step:
        first = self.entries[0]
        if not first.step:
            return first
        return Step(first.step, first.message(), tuple(self.entries), is_ended=self.has_result)


def _is_manifest(found: dict[str, Any]) -> bool:
    kinds = {"version": int, "writer": str, "entries": int, "chain": str, "complete": bool, "ended": str}
    counts = ("captured", "referenced", "unknown")
    return (
        found.keys() == Manifest.__annotations__.keys()
        and all(type(found[name]) is kind for name, kind in kinds.items())
        and isinstance(found["redacted_tools"], list)
        and all(isinstance(each, str) for each in found["redacted_tools"])
        and all(isinstance(found[name], dict) for name in counts)
        and all(type(each) is int for name in counts for each in found[name].values())
    )


def _linked(chain: bytes, line: bytes) -> bytes:
    return hashlib.sha256(chain + line).digest()


def _digest(file: BinaryIO, size_bytes: int) -> bytes:
    """Returns the SHA-256 of the first bytes of a file, in hex."""
    digest = hashlib.sha256()
    file.seek(0)
    while size_bytes and (piece := file.read(min(size_bytes, 1 << 20))):
        digest.update(piece)
        size_bytes -= len(piece)
    return digest.hexdigest().encode()


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class Recorder(ShortRepr):
    """Writes a recording. Thread-safe. As a context manager, closes it; so does the end of the process.

    `redact_tools` are patterns of names ("crm_*") of host tools whose arguments and answers are left out. If the code
    prints them, they are recorded as its output. The file is readable by its owner only, and replaces an existing file
    of this name when the recording is closed. Raises OSError if the file can't be made; after that, nothing.
    """

    _shows = ("path",)

    def __init__(self, path: LocalPath, *, redact_tools: Iterable[str] = ()) -> None:
        self.path = Path(path)
        self.redact_tools = (redact_tools,) if isinstance(redact_tools, str) else tuple(redact_tools)
        self._file = _File(self.path, self.redact_tools)
        self._step = 0
        self._beginning = threading.Lock()
        # Also runs at the interpreter's exit. It does not refer to this object.
        self._finalizer = weakref.finalize(self, self._file.close)

    @property
    def is_recording(self) -> bool:
        return self._file.is_open

    def add(self, kind: str, fields: Mapping[str, Any] | Message, *, step: int = 0, redacted: bool = False) -> None:
        """Adds an entry; its payloads come from `payload`."""
        entry = service_pb.RecordedEntry(time_s=time.time(), kind=kind, step=step, redacted=redacted)
        if isinstance(fields, Message):
            entry.message = fields.SerializeToString()
        else:
            entry.json = packed_json(fields)
        self._file.add(entry.SerializeToString())

    def begin_step(self, request: service_pb.ExecuteRequest) -> int:
        """Adds the request of an execution. Returns its number."""
        with self._beginning:
            self._step += 1
            self.add("execute", request, step=self._step)
            return self._step

    def payload(self, data: bytes | memoryview) -> pb.Payload:
        """Stores bytes, and returns the payload for an entry."""
        if len(data) <= INLINE_BYTES_MAX:
            return pb.Payload(inline=bytes(data))
        name = hashlib.sha256(data).hexdigest()
        self._file.add_blob(name, data)
        return pb.Payload(blob=pb.BlobRef(blob_id=name, size_bytes=len(data)))

    def note(self, what: str, *, unknown: bool = False) -> None:
        """Counts in the manifest something that is only referenced, or unknown."""
        self._file.count(what, unknown=unknown)

    def redacts(self, tool: str) -> bool:
        return any(fnmatch.fnmatchcase(tool, pattern) for pattern in self.redact_tools)

    def close(self) -> None:
        """Writes the rest and gives the file its name. Idempotent. Logs a warning if that fails."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _File:
    """The files of a recorder: the zip with the blobs, and the entries in a file without a name until it is closed."""

    def __init__(self, path: Path, redact_tools: tuple[str, ...]) -> None:
        self._path = path
        self._redact_tools = redact_tools
        self._lock = threading.RLock()
        with ExitStack() as on_failure:
            self._entries = on_failure.enter_context(tempfile.TemporaryFile(dir=path.parent))
            fd, part = tempfile.mkstemp(".part", f".{path.name}.", path.parent)  # 0600
            self._part = Path(part)
            on_failure.callback(self._part.unlink)
            self._zip = zipfile.ZipFile(on_failure.enter_context(os.fdopen(fd, "w+b")), "w")
            on_failure.pop_all()
        self.is_open = True
        _open_files.add(self)
        self._ended = ""
        self._blobs: set[str] = set()
        self._bytes = 0
        self._captured: Counter[str] = Counter()
        self._referenced: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()

    def add(self, entry: bytes) -> None:
        """Adds a RecordedEntry."""
        with self._lock:
            if not self._takes() or not self._fits(len(entry)):
                return
            try:
                self._entries.write(ENTRY_LENGTH.pack(len(entry)) + entry)
                self._entries.flush()
            except OSError as error:
                self._discard(error)

    def add_blob(self, name: str, data: bytes | memoryview) -> None:
        with self._lock:
            if not self._takes() or name in self._blobs or not self._fits(len(data)):
                return
            if len(self._blobs) == BLOBS_MAX:
                self._end(f"it reached its limit of {BLOBS_MAX:,} blobs")
                return
            try:
                self._zip.writestr(_member(_BLOBS + name), data)
                self._zip.fp.flush()  # type: ignore[union-attr]  # it is open
            except OSError as error:
                self._discard(error)
                return
            self._blobs.add(name)

    def count(self, what: str, *, unknown: bool) -> None:
        with self._lock:
            (self._unknown if unknown else self._referenced)[what] += 1

    def close(self) -> None:
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            try:
                self._write_rest()
                self._part.replace(self._path)
            except OSError as error:
                self._discard(error)
            finally:
                self._entries.close()

    def _takes(self) -> bool:
        return self.is_open and not self._ended

    def _fits(self, size_bytes: int) -> bool:
        self._bytes += size_bytes
        if self._bytes > RECORDING_BYTES_MAX - (64 << 20):  # leaves room for the directory
            self._end(f"it reached its limit of {RECORDING_BYTES_MAX:,} bytes")
        return not self._ended

    def _end(self, why: str) -> None:
        self._ended = why
        _log.warning("the recording %s ends here: %s. The run goes on, unrecorded", self._path, why)

    def _discard(self, error: OSError) -> None:
        self.is_open = False
        self._ended = str(error)
        _log.warning("the recording %s failed, and nothing of it is kept: %s. The run goes on", self._path, error)
        with suppress(OSError):
            self._part.unlink()
        self._close_files()

    def abandon(self) -> None:
        """Leaves the files alone in a forked child: they are its parent's. Nothing is in their buffers."""
        self._lock = threading.RLock()  # a thread of the parent may have held it
        self.is_open = False
        self._close_files()

    def _close_files(self) -> None:
        with suppress(OSError):
            self._entries.close()
        with suppress(OSError, ValueError):
            self._zip.fp.close()  # type: ignore[union-attr]  # without the directory that `close` would write
        self._zip.fp = None

    def _write_rest(self) -> None:
        file: BinaryIO = self._zip.fp  # type: ignore[assignment]  # open until it is closed here
        chain, lines_bytes = _BEGIN, 0
        self._captured.clear()
        with self._zip.open(_member(_LINES, zipfile.ZIP_DEFLATED), "w") as lines:
            for kind, line in self._lines():
                lines_bytes += len(line)
                if len(line) > LINE_BYTES_MAX or lines_bytes > LINES_BYTES_MAX:
                    self._ended = f"its entries reached their limit of {LINES_BYTES_MAX:,} bytes"
                    break
                lines.write(line)
                chain = _linked(chain, line)
                self._captured[kind] += 1
        manifest = {
            "version": VERSION,
            "writer": f"remote-executor {version('remote-executor')}, Python {sys.version.split()[0]}",
            "entries": self._captured.total(),
            "chain": chain.hex(),
            "complete": not self._ended,
            "ended": self._ended,
            "redacted_tools": list(self._redact_tools),
            "captured": dict(self._captured),
            "referenced": dict(self._referenced),
            "unknown": dict(self._unknown),
        }
        self._zip.writestr(_member(_MANIFEST), packed_json(manifest))
        self._zip.comment = b"0" * _COMMENT_BYTES  # its length is part of the end of the directory
        self._zip.close()
        size = file.seek(0, os.SEEK_END)
        digest = _digest(file, size - _END.size - _COMMENT_BYTES)
        file.seek(size - _COMMENT_BYTES)
        file.write(digest)
        file.close()

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        """Yields the kind and the line of each entry."""
        self._entries.seek(0)
        while length := self._entries.read(ENTRY_LENGTH.size):
            entry = service_pb.RecordedEntry.FromString(self._entries.read(*ENTRY_LENGTH.unpack(length)))
            made = KINDS[entry.kind]
            if made is None or entry.WhichOneof("fields") == "json":
                fields = _read_json(entry.json)
            else:
                fields = fields_of(made.FromString(entry.message))
            line = {"time": round(entry.time_s, 6), "kind": entry.kind, "step": entry.step, "fields": fields}
            yield entry.kind, packed_json({**line, "redacted": True} if entry.redacted else line) + b"\n"


class FetchedFile(_File):
    """The file of a recording that the daemon made. Raises OSError where a recorder would go on without a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ())

    def finish(self, completeness: service_pb.RecordingCompleteness) -> None:
        """Adopts the daemon's account of what the recording lacks. `close` must follow."""
        self._ended = self._ended or completeness.ended
        self._redact_tools = tuple(completeness.redacted_tools)
        self._referenced.update(completeness.referenced)
        self._unknown.update(completeness.unknown)

    def discard(self) -> None:
        """Removes what was written, unless it was closed."""
        if self.is_open:
            self.is_open = False
            self._part.unlink(missing_ok=True)
            self._close_files()

    def _discard(self, error: OSError) -> None:
        self.is_open = True
        self.discard()
        error.filename = str(self._path)  # a write has no name
        raise error


_open_files: weakref.WeakSet[_File] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_open_files):
        file.abandon()


os.register_at_fork(after_in_child=_after_fork)


def _member(name: str, compression: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, _FIXED_TIME)
    member.compress_type = compression
    member.external_attr = 0o600 << 16
    return member


def packed_json(value: object) -> bytes:
    """Returns a JSON value as bytes for `Recorder.payload`. Raises TypeError and ValueError for another value."""
    return _write_json(value).encode("utf-8", "backslashreplace")  # a lone surrogate becomes JSON's escape
