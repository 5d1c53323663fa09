"""Requests to a guest that DONE answers: operations, and what comes back of them.

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

from executor_server.errors import (
    ExecutorError,
    InvalidRequest,
    ModulesMissing,
    NotFound,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
)
from executor_server.guest.frames import Frame, FrameError, Kind
from executor_server.guest_events import (
    read_event,
    read_file_info,
    read_listing,
    read_missing,
    read_modules,
    read_variables,
)
from executor_server.model import BlobChunk, FileInfo, Payload

T = TypeVar("T")

# Of one operation, arrived and not taken yet; the guest goes on sending at half of it.
_MAX_WAITING_BYTES = 4 * 1024 * 1024
_PART_OVERHEAD_BYTES = 256

_REFUSALS: dict[str, tuple[type[InvalidRequest] | type[NotFound] | type[PreconditionFailed], Reason]] = {
    "value_refused": (InvalidRequest, Reason.VALUE_REFUSED),
    "tool_refused": (InvalidRequest, Reason.TOOL_REFUSED),
    "state_refused": (InvalidRequest, Reason.STATE_REFUSED),
    "session_used": (PreconditionFailed, Reason.SESSION_USED),
    "prelude_failed": (InvalidRequest, Reason.INVALID_FIELD),
    "path_refused": (InvalidRequest, Reason.PATH_REFUSED),
    "file_not_found": (NotFound, Reason.FILE_NOT_FOUND),
    "blob_not_found": (NotFound, Reason.BLOB_NOT_FOUND),
}


class Operation(Generic[T]):
    """One request. `read` makes a part of each frame, None of one that holds nothing for the caller."""

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
        """Whether the answer is there, taken or not."""
        return self._ended

    def take(self, frame: Frame) -> None:
        """Reads a frame of the guest. Raises FrameError."""
        if self._ended:
            raise FrameError("an operation went on after its end")
        if frame.kind == Kind.DONE:
            self._error = _refusal(frame)
        part = self._read(frame) if self._error is None else None
        if part is not None:
            self._add(part, _PART_OVERHEAD_BYTES + len(frame.body))
        self._ended = frame.kind == Kind.DONE
        self._news.set()

    def fail(self, error: ExecutorError) -> None:
        """Ends it without an answer."""
        if not self._ended:
            self._ended, self._error = True, error
            self._news.set()

    async def next(self) -> T | None:
        """The next part, None after the last. Raises what the guest refuses with."""
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


def _refusal(done: Frame) -> ExecutorError | None:
    """The error that a DONE stands for, when the operation could not be done."""
    if done.head.boolean("ok"):
        return None
    reason, message = done.head.text("reason", 64), done.head.text("message", 8192)
    if reason == "queue_full":
        return ResourceExhausted(Reason.QUEUE_FULL, message, retry_after_s=1.0)
    if reason == "modules_missing":
        return ModulesMissing(message, read_modules(done))
    if reason in _REFUSALS:
        error, named = _REFUSALS[reason]
        return error(named, message)
    return ResourceExhausted(Reason.TOO_LARGE, message)


# What the answers of each kind of operation are read with.


@dataclass(frozen=True)
class VariablesReply:
    """The last part of the answer to get_variables."""

    variables: tuple[tuple[str, Payload], ...]
    missing: tuple[str, ...]


def nothing(frame: Frame) -> None:
    """Of an operation that is only done."""
    _require_done(frame)


def listing(frame: Frame) -> tuple[list[FileInfo], bool]:
    """(entries, truncated)."""
    _require_done(frame)
    return read_listing(frame)


def written_file(frame: Frame) -> FileInfo:
    """The description of a file that was put."""
    _require_done(frame)
    return read_file_info(frame.head.object("file"))


def missing_modules(frame: Frame) -> Sequence[str]:
    """Modules that the image lacks."""
    _require_done(frame)
    return read_missing(frame)


def file_part(frame: Frame) -> FileInfo | bytes | None:
    """The description of a file that is got, then its bytes."""
    if frame.kind == Kind.FILE_CHUNK:
        return read_file_info(frame.head.object("file")) if "file" in frame.head else frame.body
    _require_done(frame)
    return None


def variables_part(frame: Frame) -> BlobChunk | VariablesReply:
    """Pieces of large variables, then all of them."""
    if frame.kind == Kind.BLOB_CHUNK:
        chunk = read_event(frame)
        assert isinstance(chunk, BlobChunk)
        return chunk
    _require_done(frame)
    return VariablesReply(*read_variables(frame))


def _require_done(frame: Frame) -> None:
    if frame.kind != Kind.DONE:
        raise FrameError(f"frame kind {frame.kind} does not belong to this operation")
