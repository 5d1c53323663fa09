"""Takes what a session reports, in the event loop, and hands it to the recordings' thread.

Nothing here waits: what the thread has not written yet is held in memory, and a recording that would hold more than
`HELD_BYTES_MAX` ends, because the disk is slower than the session.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.recordings.writer import RecordingWriter
from executor_server.core import Event, Payload, ProcessEvent, ProcessOutput, RecordRules
from executor_server.sessions.journal import ExecutionRequest, ToolFailure

if TYPE_CHECKING:
    from executor_server.api.recordings.store import Recordings

HELD_BYTES_MAX = 64 << 20
"""Bytes of one recording that wait to be written."""
HELD_BYTES_TOTAL = 256 << 20
"""Bytes of all recordings that wait to be written; above, those that hold more than an even share end."""
_ITEM_BYTES = 512


class Recorder:
    """Records one session; implements `sessions.recorder.SessionRecorder`."""

    def __init__(self, writer: RecordingWriter, recordings: Recordings) -> None:
        self.writer = writer
        self.held_bytes = 0  # also of what the thread writes now
        self.is_over = False
        self.is_cut = False  # it ended before the session, or is about to
        self._recordings = recordings
        self._items: list[tuple[Any, ...]] = []
        self._new_bytes = 0
        self._uploads = 0

    # -- what a session reports ----------------------------------------------------------------------------------

    def begin(self, request: ExecutionRequest) -> None:
        self.put(len(request.code), RecordingWriter.begin, request)

    def event(self, execution_id: str, event: Event, size_bytes: int) -> None:
        self.put(size_bytes, RecordingWriter.event, execution_id, event)

    def answer(self, execution_id: str, call_id: str, answer: Payload | ToolFailure) -> None:
        size_bytes = len(answer) if isinstance(answer, bytes) else 0
        self.put(size_bytes, RecordingWriter.answer, execution_id, call_id, answer)

    def process_event(self, process_id: str, event: ProcessEvent) -> None:
        size_bytes = len(event.kind.data) if isinstance(event.kind, ProcessOutput) else 0
        self.put(size_bytes, RecordingWriter.process_event, process_id, event)

    def unseen(self, what: str) -> None:
        self.put(0, RecordingWriter.unseen, what)

    def hold_to(self, rules: RecordRules) -> None:
        self.put(0, RecordingWriter.hold_to, rules)

    def end(self) -> None:
        if not self.is_over:
            self.put(0, RecordingWriter.close)
            self.is_over = True
            self._recordings.on_end(self)

    # -- what the calls of clients report ------------------------------------------------------------------------

    def request(self, kind: str, request: Message) -> None:
        """Records a request that was granted."""
        copy = type(request)()
        copy.CopyFrom(request)  # the writer replaces the client's payloads by its own
        copy.ClearField("session_id")
        self.put(copy.ByteSize(), RecordingWriter.request, kind, copy)

    @contextmanager
    def upload(self, *, keeps: bool) -> Iterator[RecordedUpload]:
        """Records an upload if the block makes it a blob or a file; otherwise forgets it."""
        self._uploads += 1
        upload = RecordedUpload(self, self._uploads, keeps=keeps)
        try:
            yield upload
        finally:
            self.put(0, RecordingWriter.drop, upload.number)  # no effect on a blob or a file

    # -- for the thread's owner ----------------------------------------------------------------------------------

    def start(self, head: dict[str, Any], *, is_recovered: bool) -> None:
        """Makes the files, or goes on with those of an earlier daemon."""
        self.put(0, RecordingWriter.reopen if is_recovered else RecordingWriter.create, head)

    def cut(self, why: str, failure: str) -> None:
        """Ends the recording before the session."""
        self.put(0, RecordingWriter.end_early, why, failure)
        self.is_cut = True

    def take(self) -> tuple[list[tuple[Any, ...]], int]:
        """Returns what is to be written, in order, and its bytes; they are held until `wrote` is called."""
        items, self._items = self._items, []
        size_bytes, self._new_bytes = self._new_bytes, 0
        return items, size_bytes

    def wrote(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        self._recordings.held_bytes -= size_bytes

    @property
    def new_bytes(self) -> int:
        """Bytes that `take` has not returned yet."""
        return self._new_bytes

    def put(self, size_bytes: int, method: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Lets the thread call a method of the writer; the arguments take `size_bytes` of memory until then."""
        if self.is_over or ((self.is_cut or self.writer.ended) and method is not RecordingWriter.close):
            return
        is_slow = self.held_bytes > HELD_BYTES_MAX or self._recordings.is_short_for(self.held_bytes)
        if is_slow and method is not RecordingWriter.close:
            method, arguments, options = RecordingWriter.end_early, ("the disk is slower than the session", "slow"), {}
            size_bytes, self.is_cut = 0, True
        self._recordings.held_bytes += size_bytes + _ITEM_BYTES
        self.held_bytes += size_bytes + _ITEM_BYTES
        self._new_bytes += size_bytes + _ITEM_BYTES
        self._items.append((method, time.time(), arguments, options))
        self._recordings.soon(self)


class RecordedUpload:
    """One upload of a client, while it arrives."""

    def __init__(self, recorder: Recorder, number: int, *, keeps: bool) -> None:
        self.number = number
        self._recorder = recorder
        self._keeps = keeps

    async def pieces(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Passes the pieces on."""
        async for piece in pieces:
            self._recorder.put(len(piece), RecordingWriter.piece, self.number, piece, keeps=self._keeps)
            yield piece

    def as_blob(self, blob_id: str) -> None:
        self._recorder.put(0, RecordingWriter.uploaded, self.number, blob_id)

    def as_file(self, header: service_pb.PutFileHeader) -> None:
        copy = service_pb.PutFileHeader()
        copy.CopyFrom(header)
        copy.ClearField("session_id")
        self._recorder.put(0, RecordingWriter.put, self.number, copy)


class NoUpload:
    """An upload to a session that is not recorded."""

    def pieces(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        return pieces

    def as_blob(self, blob_id: str) -> None:
        """Records nothing."""

    def as_file(self, header: service_pb.PutFileHeader) -> None:
        """Records nothing."""
