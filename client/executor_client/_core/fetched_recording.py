"""Writes a recording that the daemon kept to a local file, from the daemon's messages."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import DecodeError

from executor_api import strict_json
from executor_api.limits import BLOB_BYTES_MAX
from executor_api.recordings import ENTRY_LENGTH, KINDS, LINE_BYTES_MAX
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_client._core.local import LocalPath
from executor_client.errors import ProtocolError
from executor_client.recording import FetchedFile

_read_json = strict_json.reader()


class FetchedRecording:
    """A recording that is arriving. `commit` gives the file its name; as a context manager, removes it otherwise.

    Raises OSError if the file can't be written, and ProtocolError if the messages are not a recording.
    """

    def __init__(self, path: LocalPath) -> None:
        self._file = FetchedFile(Path(path))
        self._entries = bytearray()
        self._blob_id = ""
        self._blob = bytearray()
        self._is_whole = False

    def take(self, message: service_pb.GetRecordingResponse) -> None:
        """Writes the contents of a message."""
        part = message.WhichOneof("part")
        if part != "blob_chunk":
            self._end_blob()
        if part == "entries":
            self._entries += message.entries
            self._take_entries()
        elif part == "blob_chunk":
            if message.blob_chunk.blob_id != self._blob_id:
                self._end_blob()
                self._blob_id = message.blob_chunk.blob_id
            self._blob += message.blob_chunk.data
            if len(self._blob) > BLOB_BYTES_MAX:
                raise ProtocolError(f"a payload of the recording has more than {BLOB_BYTES_MAX:,} bytes")
        elif part == "completeness":
            self._is_whole = not self._entries
            self._file.finish(message.completeness)

    def commit(self) -> None:
        if not self._is_whole:
            raise ProtocolError("the recording did not arrive in full")
        self._file.close()

    def _take_entries(self) -> None:
        at = 0
        while len(self._entries) - at >= ENTRY_LENGTH.size:
            (size,) = ENTRY_LENGTH.unpack_from(self._entries, at)
            if size > 2 * LINE_BYTES_MAX:
                raise ProtocolError(f"an entry of the recording has {size:,} bytes")
            if len(self._entries) - at - ENTRY_LENGTH.size < size:
                break
            at += ENTRY_LENGTH.size
            self._take_entry(bytes(self._entries[at : at + size]))
            at += size
        del self._entries[:at]

    def _take_entry(self, data: bytes) -> None:
        try:
            entry = service_pb.RecordedEntry.FromString(data)
            made: Any = KINDS[entry.kind]
            if entry.WhichOneof("fields") == "json":
                _ = _read_json(entry.json)
            else:
                made.FromString(entry.message)
        except (KeyError, AttributeError, DecodeError, strict_json.NotJson) as error:
            raise ProtocolError("an entry of the recording can't be read: update remote-executor") from error
        self._file.add(data)

    def _end_blob(self) -> None:
        if self._blob_id:
            if hashlib.sha256(self._blob).hexdigest() == self._blob_id:
                self._file.add_blob(self._blob_id, memoryview(self._blob))
            else:
                self._file.count("payloads that were damaged", unknown=True)
        self._blob_id, self._blob = "", bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.discard()
