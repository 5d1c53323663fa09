"""Payloads that arrive in pieces take the memory of one."""

from __future__ import annotations

import mmap
import tracemalloc

import pytest

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import types_pb2 as pb
from executor_client._core.blobs import IncomingBlobs
from tests.support.fake_daemon import blob

PIECES = 64


def test_a_blob_is_in_memory_once_while_it_arrives_and_is_taken() -> None:
    """It was there twice, as a list of pieces and joined, and a third time where the allocator kept the pieces."""
    size = PIECES * PIECE_BYTES
    blobs = IncomingBlobs(bytes_max=size, open_max=1)
    tracemalloc.start()
    try:
        for number in range(PIECES):
            blobs.add(pb.BlobChunk(blob_id="b", data=bytes([number]) * PIECE_BYTES))
        data = blobs.take(pb.Payload(blob=blob("b", size).blob))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [data[number * PIECE_BYTES] for number in range(PIECES)] == list(range(PIECES))
    assert most < 1.4 * size


def test_a_payload_arrives_whole_where_nothing_can_be_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have a limit of its address space."""

    def refuse(*_arguments: object) -> None:
        raise OSError

    monkeypatch.setattr(mmap, "mmap", type("Refusing", (), {"__new__": refuse}))
    size = PIECES * PIECE_BYTES
    blobs = IncomingBlobs(bytes_max=size, open_max=1)
    for number in range(PIECES):
        blobs.add(pb.BlobChunk(blob_id="b", data=bytes([number]) * PIECE_BYTES))
    data = blobs.take(pb.Payload(blob=blob("b", size).blob))
    assert bytes(data) == b"".join(bytes([number]) * PIECE_BYTES for number in range(PIECES))
