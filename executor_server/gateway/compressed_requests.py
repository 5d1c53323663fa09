"""Gzip for requests of Connect's clients: of one member, and of a bounded size."""

from __future__ import annotations

import zlib

from connectrpc.code import Code
from connectrpc.compression.gzip import GzipCompression
from connectrpc.errors import ConnectError

_GZIP_BITS = 31


class BoundedGzip(GzipCompression):
    """connectrpc's own copies the rest of the data for each member: 50,000 empty ones in a megabyte take seconds."""

    def decompress(self, data: bytes | bytearray | memoryview, read_max_bytes: int | None = None) -> bytes:
        assert read_max_bytes is not None
        member = zlib.decompressobj(_GZIP_BITS)
        try:
            content = member.decompress(data, read_max_bytes + 1)
        except zlib.error as error:
            raise ConnectError(Code.INVALID_ARGUMENT, f"the message is not gzip: {error}") from None
        if len(content) > read_max_bytes:
            raise ConnectError(Code.RESOURCE_EXHAUSTED, f"a message has more than {read_max_bytes:,} bytes")
        if not member.eof or member.unused_data:
            raise ConnectError(Code.INVALID_ARGUMENT, "a compressed message is one whole gzip member")
        return content
