"""Payloads that arrive in pieces: collected under limits, handed out once, checked against their announced size.

Each piece is copied to the end of one growing buffer and freed. Joining a list of pieces would need the memory twice,
and the allocator may never return pieces of this size.

A large buffer uses huge pages. Otherwise allocating 10 MB page by page takes the kernel 5 ms, a third of the CPU time
for receiving them; with huge pages it takes less than 1 ms.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import types_pb2 as pb
from executor_client.errors import ProtocolError

_MAPPED_BYTES = 4 << 20
"""Size from which a buffer is a separate mapping."""
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class _Buffer:
    """Bytes that grow at their end. Not thread-safe."""

    def __init__(self) -> None:
        self._size = 0
        self._place: bytearray | mmap.mmap = bytearray()

    def append(self, piece: bytes) -> None:
        size = self._size + len(piece)
        if isinstance(self._place, mmap.mmap):
            if size > len(self._place):
                self._grow(self._place, max(size, 2 * len(self._place)))
            self._place[self._size : size] = piece
        else:
            self._place += piece
            if size >= _MAPPED_BYTES and _HUGE_PAGES is not None:
                self._place = _mapped(self._place, _HUGE_PAGES)
        self._size = size

    def _grow(self, mapping: mmap.mmap, size: int) -> None:
        try:
            mapping.resize(size)
        except OSError as error:
            raise MemoryError(f"no memory for {size} bytes of a payload") from error

    def view(self) -> memoryview:
        """Returns a view of all bytes. Nothing can be appended afterwards."""
        return memoryview(self._place)[: self._size]


def _mapped(data: bytearray, advice: int) -> bytearray | mmap.mmap:
    """Returns a private mapping in huge pages that starts with the bytes and is four times as large."""
    try:
        mapping = mmap.mmap(-1, 4 * len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # a limit of the address space
        return data
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(advice)
    mapping[: len(data)] = data
    return mapping


class IncomingBlobs:
    """The blobs of one stream. Honest senders keep the same limits, so exceeding them violates the protocol."""

    def __init__(self, *, bytes_max: int, open_max: int) -> None:
        self._bytes_max = bytes_max
        self._open_max = open_max
        self._data: dict[str, _Buffer] = {}
        self._bytes = 0  # the bytes of all pieces, less the released ones
        self._lock = threading.Lock()  # guards `_bytes`: tool threads release blobs

    def add(self, chunk: pb.BlobChunk) -> None:
        """Keeps a piece. Raises ProtocolError past the limits."""
        piece = chunk.data  # each access makes another copy
        if len(piece) > PIECE_BYTES:
            raise ProtocolError(f"a piece of a blob has {len(piece)} bytes; the limit is {PIECE_BYTES}")
        with self._lock:
            self._bytes += len(piece)
            too_many = self._bytes > self._bytes_max
        if too_many:
            raise ProtocolError(f"more than {self._bytes_max} bytes of blobs in one stream")
        data = self._data.get(chunk.blob_id)
        if data is None:
            if len(self._data) >= self._open_max:
                raise ProtocolError(f"more than {self._open_max} blobs at once")
            data = self._data[chunk.blob_id] = _Buffer()
        data.append(piece)

    def take(self, payload: pb.Payload) -> bytes | memoryview:
        """Returns the payload's bytes, inline or collected. A blob can be taken once. Raises ProtocolError."""
        kind = payload.WhichOneof("content")
        if kind == "inline":
            return payload.inline
        if kind != "blob":
            raise ProtocolError("a payload has no content")
        # A taken blob still counts: most are kept as part of a result.
        data = self._data.pop(payload.blob.blob_id, _Buffer()).view()
        if len(data) != payload.blob.size_bytes:
            raise ProtocolError(f"a blob of {payload.blob.size_bytes} bytes arrived with {len(data)}")
        return data

    def release(self, payload: pb.Payload) -> None:
        """Records that a taken payload is no longer in memory. Thread-safe."""
        if payload.WhichOneof("content") == "blob":
            with self._lock:
                self._bytes -= payload.blob.size_bytes
