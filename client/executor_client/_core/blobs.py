"""Payloads that arrive in pieces: collected under limits, handed out once, checked against their announced size.

Each piece is copied to the end of one growing buffer, and freed. A list of them would be in memory a second time while
it is joined, and a third time after that: the allocator gives pieces of this size back when it pleases, or never.
"""

from __future__ import annotations

import threading

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import types_pb2 as pb
from executor_client.errors import ProtocolError


class IncomingBlobs:
    """The blobs of one stream. An honest sender keeps the same limits, so passing them is a breach of the protocol."""

    def __init__(self, *, bytes_max: int, open_max: int) -> None:
        self._bytes_max = bytes_max
        self._open_max = open_max
        self._data: dict[str, bytearray] = {}
        self._bytes = 0  # the bytes of all pieces, less the released ones
        self._lock = threading.Lock()  # guards this number: threads of tools release blobs

    def add(self, chunk: pb.BlobChunk) -> None:
        """Keeps a piece. Raises ProtocolError past the limits."""
        piece = chunk.data  # each access makes another copy
        if len(piece) > PIECE_BYTES:
            raise ProtocolError(f"a piece of a blob has {len(piece)} bytes, allowed are {PIECE_BYTES}")
        with self._lock:
            self._bytes += len(piece)
            too_many = self._bytes > self._bytes_max
        if too_many:
            raise ProtocolError(f"more than {self._bytes_max} bytes of blobs in one stream")
        data = self._data.get(chunk.blob_id)
        if data is None:
            if len(self._data) >= self._open_max:
                raise ProtocolError(f"more than {self._open_max} blobs at once")
            data = self._data[chunk.blob_id] = bytearray()
        data += piece

    def take(self, payload: pb.Payload) -> bytes | bytearray:
        """Returns the payload's bytes, inline or collected. A blob can be taken once. Raises ProtocolError."""
        kind = payload.WhichOneof("content")
        if kind == "inline":
            return payload.inline
        if kind != "blob":
            raise ProtocolError("a payload has no content")
        # A blob that was taken still counts: most are kept, as a part of a result.
        data = self._data.pop(payload.blob.blob_id, bytearray())
        if len(data) != payload.blob.size_bytes:
            raise ProtocolError(f"a blob of {payload.blob.size_bytes} bytes arrived with {len(data)}")
        return data

    def release(self, payload: pb.Payload) -> None:
        """Notes that the taken payload is no longer in memory, which makes room for others. In any thread."""
        if payload.WhichOneof("content") == "blob":
            with self._lock:
                self._bytes -= payload.blob.size_bytes
