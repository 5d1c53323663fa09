"""Packs a tree and its buffers into one byte string.

    offset  size
    0       4      magic, b"RXV1"
    4       4      number of buffers, big-endian as all numbers here
    8       8      length of the tree in bytes
    16      8 * n  length of each buffer
    ...            the tree, then the buffers, nothing between or after them

Large buffers are never copied here: packing gives them as they are, unpacking gives views. Every length is checked
against the bytes that are really there before anything is done with it.
"""

from __future__ import annotations

import struct

from executor_api.values.limits import DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_api.values.limits import ValueLimits

    Parts = list[bytes | memoryview]
    """A packed value: these bytes, one after the other."""

MAGIC = b"RXV1"
_HEAD = struct.Struct(">4sIQ")
HEAD_BYTES = _HEAD.size
BYTES_PER_BUFFER = 8
# A smaller buffer is copied, since each part costs a write of its own.
_PART_BYTES = 64 << 10


def pack(tree: bytes, buffers: Sequence[bytes | memoryview]) -> bytes:
    return b"".join(pack_in_parts(tree, buffers))


def pack_in_parts(tree: bytes, buffers: Sequence[bytes | memoryview]) -> Parts:
    """Packs without a copy of the large buffers, which must not change until the parts have been used."""
    lengths = [memoryview(buffer).nbytes for buffer in buffers]
    parts: Parts = []
    small: Parts = [_HEAD.pack(MAGIC, len(buffers), len(tree)), struct.pack(f">{len(lengths)}Q", *lengths), tree]
    for buffer, length in zip(buffers, lengths):
        if length < _PART_BYTES:
            small.append(buffer)
        else:
            parts += (b"".join(small), buffer)
            small = []
    if small:
        parts.append(b"".join(small))
    return parts


def unpack(packed: bytes | bytearray | memoryview, limits: ValueLimits) -> tuple[memoryview, list[memoryview]]:
    """Returns the tree and the buffers as views of `packed`. Raises DecodeError."""
    view = memoryview(packed).cast("B")
    if len(view) < HEAD_BYTES:
        raise DecodeError(f"a packed value has at least {HEAD_BYTES} bytes, not {len(view)}")
    magic, count, tree_bytes = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError("not a packed value: the magic number is wrong")
    tree_at = HEAD_BYTES + BYTES_PER_BUFFER * count
    if count > limits.nodes:  # a view of an empty buffer takes 200 bytes
        raise DecodeError(f"the value has more than the limit of {limits.nodes} nodes")
    if tree_at > len(view):
        raise DecodeError(f"{count} buffers are announced in {len(view)} bytes")
    lengths = struct.unpack_from(f">{count}Q", view, HEAD_BYTES)
    expected = tree_at + tree_bytes + sum(lengths)
    if expected != len(view):
        raise DecodeError(f"a length is wrong: {expected} bytes are announced, {len(view)} are there")
    position = tree_at + tree_bytes
    tree, buffers = view[tree_at:position], []
    for length in lengths:
        buffers.append(view[position : position + length])
        position += length
    return tree, buffers
