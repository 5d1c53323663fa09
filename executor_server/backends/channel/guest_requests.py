"""Requests to a guest that DONE answers, and the parts of their answers.

Each frame is read as it arrives. So a malformed answer ends the channel as a malformed event does, and is not taken for
a failure of the call that happens to wait for it. What arrives is bounded: past a limit the guest is held back until
the caller has taken some.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from executor_server.backends.channel.events import (
    clean,
    read_event,
    read_file_info,
    read_listing,
    read_missing,
    read_modules,
    read_variables,
)
from executor_server.core import (
    BlobChunk,
    ExecutorError,
    FileChange,
    FileChanges,
    FileInfo,
    InvalidRequest,
    ModulesMissing,
    NotFound,
    Payload,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    Savepoint,
    Savepoints,
)
from executor_server.guest.wire.file_changes import MAX_CHANGES, ChangedFile, FilesChanged
from executor_server.guest.wire.frames import Frame, FrameError
from executor_server.guest.wire.messages import BlobChunk as BlobPiece
from executor_server.guest.wire.messages import Done, FileChunk
from executor_server.guest.wire.savepoint_messages import SavepointList
from executor_server.guest.wire.schema import message_of, read_listed, read_object

T = TypeVar("T")

# Bytes of one answer that wait for the caller before reading stops; it resumes at half of that.
_MAX_WAITING_BYTES = 4 * 1024 * 1024
_PART_OVERHEAD_BYTES = 256

_REFUSALS: dict[str, tuple[type[InvalidRequest] | type[NotFound] | type[PreconditionFailed], Reason]] = {
    "value_refused": (InvalidRequest, Reason.VALUE_REFUSED),
    "tool_refused": (InvalidRequest, Reason.TOOL_REFUSED),
    "state_refused": (InvalidRequest, Reason.STATE_REFUSED),
    "savepoint_refused": (PreconditionFailed, Reason.SAVEPOINT_REFUSED),
    "savepoint_not_found": (NotFound, Reason.SAVEPOINT_NOT_FOUND),
    "savepoint_lost": (PreconditionFailed, Reason.SAVEPOINT_LOST),
    "session_used": (PreconditionFailed, Reason.SESSION_USED),
    "prelude_failed": (InvalidRequest, Reason.INVALID_FIELD),
    "variable_refused": (InvalidRequest, Reason.INVALID_FIELD),
    "path_refused": (InvalidRequest, Reason.PATH_REFUSED),
    "file_not_found": (NotFound, Reason.FILE_NOT_FOUND),
    "file_is_directory": (InvalidRequest, Reason.FILE_IS_DIRECTORY),
    "file_not_directory": (InvalidRequest, Reason.FILE_NOT_DIRECTORY),
    "file_permission_denied": (InvalidRequest, Reason.FILE_PERMISSION_DENIED),
    "file_exists": (InvalidRequest, Reason.FILE_EXISTS),
    "blob_not_found": (NotFound, Reason.BLOB_NOT_FOUND),
    "command_not_found": (InvalidRequest, Reason.COMMAND_NOT_FOUND),
    "command_not_executable": (InvalidRequest, Reason.COMMAND_NOT_EXECUTABLE),
    "cwd_not_found": (NotFound, Reason.CWD_NOT_FOUND),
    "no_such_process": (NotFound, Reason.PROCESS_NOT_FOUND),
    "no_input": (InvalidRequest, Reason.INVALID_FIELD),
    "input_gap": (InvalidRequest, Reason.INVALID_FIELD),
    "input_closed": (PreconditionFailed, Reason.PROCESS_ENDED),
}


class Request(Generic[T]):
    """One request. `read` turns a frame into a part of the answer, or into None if it holds nothing for the caller."""

    def __init__(self, read: Callable[[Frame], T | None], hold: Callable[[object, bool], None]) -> None:
        self._read = read
        self._hold = hold
        self._parts: deque[tuple[T, int]] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._error: ExecutorError | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """True when the answer is complete, taken or not."""
        return self._ended

    def take(self, frame: Frame) -> None:
        """Reads a frame of the guest. Raises FrameError."""
        if self._ended:
            raise FrameError("a request went on after its end")
        done = message_of(frame)
        if isinstance(done, Done):
            self._error = _refusal(done, frame)
        part = self._read(frame) if self._error is None else None
        if part is not None:
            self._add(part, _PART_OVERHEAD_BYTES + len(frame.body))
        self._ended = isinstance(done, Done)
        self._news.set()

    def fail(self, error: ExecutorError) -> None:
        """Ends the request without an answer."""
        if not self._ended:
            self._ended, self._error = True, error
            self._news.set()

    async def next(self) -> T | None:
        """Returns the next part; None after the last. Raises the error of a guest that refused."""
        while not self._parts and not self._ended:
            self._news.clear()
            await self._news.wait()
        if self._parts:
            return self._remove()
        if self._error is not None:
            raise self._error
        return None

    def _add(self, part: T, size_bytes: int) -> None:
        self._parts.append((part, size_bytes))
        self._waiting_bytes += size_bytes
        if self._waiting_bytes > _MAX_WAITING_BYTES:
            self._hold(self, True)

    def _remove(self) -> T:
        part, size_bytes = self._parts.popleft()
        self._waiting_bytes -= size_bytes
        if self._waiting_bytes <= _MAX_WAITING_BYTES // 2:
            self._hold(self, False)
        return part


def _refusal(done: Done, frame: Frame) -> ExecutorError | None:
    """Returns the error for a DONE that refuses the request."""
    if done.ok:
        return None
    reason, message = done.reason, done.message
    if reason is None or message is None:
        raise FrameError("a refusal without a reason")
    if reason == "queue_full":
        return ResourceExhausted(Reason.QUEUE_FULL, message, retry_after_s=1.0)
    if reason == "no_process":
        return ResourceExhausted(Reason.TOO_MANY_PROCESSES, message, retry_after_s=1.0)
    if reason == "modules_missing":
        return ModulesMissing(message, read_modules(frame))
    if reason in _REFUSALS:
        error, named = _REFUSALS[reason]
        return error(named, message)
    return ResourceExhausted(Reason.TOO_LARGE, message)


# Readers of the answers, by kind of request.


@dataclass(frozen=True)
class VariablesReply:
    """The last part of the answer to get_variables."""

    variables: tuple[tuple[str, Payload], ...]
    missing: tuple[str, ...]


def nothing(frame: Frame) -> None:
    """Reads the answer of a request that returns nothing."""
    _require_done(frame)


def written_bytes(frame: Frame) -> int:
    """Reads how many bytes a process has been given."""
    written = _require_done(frame).written
    if written is None:
        raise FrameError("a write without the bytes that were written")
    return written


def listing(frame: Frame) -> tuple[list[FileInfo], bool]:
    """Reads (entries, truncated)."""
    return read_listing(_require_done(frame), frame.body)


def described_file(frame: Frame) -> FileInfo:
    """Reads the description of a file."""
    return read_file_info(_require_done(frame).file)


def missing_modules(frame: Frame) -> Sequence[str]:
    """Reads the names of the modules that the image lacks."""
    _require_done(frame)
    return read_missing(frame)


def listed_savepoints(frame: Frame) -> Savepoints:
    """Reads the savepoints that a session has."""
    _require_done(frame)
    answer = read_object(SavepointList, frame.body, "savepoints")
    return Savepoints(
        savepoints=tuple(
            Savepoint(each.savepoint, each.made, each.files, each.file_bytes, _cleaned(each.left_out), each.branch)
            for each in answer.savepoints
        ),
        dropped=answer.dropped,
        generation=answer.generation,
        taken=answer.taken or 0,
        left_out=_cleaned(answer.left_out),
    )


def _cleaned(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(clean(line) for line in lines)


def file_part(frame: Frame) -> FileInfo | bytes | None:
    """Reads the description of a downloaded file, then its bytes."""
    chunk = message_of(frame)
    if isinstance(chunk, FileChunk):
        return frame.body if chunk.file is None else read_file_info(chunk.file)
    _require_done(frame)
    return None


def changes_part(frame: Frame) -> FileChanges | None:
    """Reads the changes that a watch reports; its first report is empty."""
    changed = message_of(frame)
    if not isinstance(changed, FilesChanged):
        _require_done(frame)
        return None
    listed = read_listed(ChangedFile, frame.body, MAX_CHANGES, "changes")
    changes = tuple(FileChange(each.path, each.kind, each.directory) for each in listed)
    return FileChanges(changes, changed.overflowed)


def variables_part(frame: Frame) -> BlobChunk | VariablesReply:
    """Reads the pieces of large variables, then the answer with all of them."""
    if isinstance(message_of(frame), BlobPiece):
        chunk = read_event(frame)
        assert isinstance(chunk, BlobChunk)
        return chunk
    return VariablesReply(*read_variables(_require_done(frame), frame.body))


def _require_done(frame: Frame) -> Done:
    done = message_of(frame)
    if not isinstance(done, Done):
        raise FrameError(f"frame kind {frame.kind} does not belong to this request")
    return done
