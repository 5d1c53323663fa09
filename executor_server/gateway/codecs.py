"""Reads and writes messages as Protobuf binary and Protobuf JSON. A malformed message is the client's error."""

from __future__ import annotations

import zlib
from typing import TypeVar

from connectrpc.code import Code
from connectrpc.codec import Codec
from connectrpc.compression.gzip import GzipCompression
from connectrpc.errors import ConnectError
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from google.protobuf.message import DecodeError, Message

from executor_api.json_size import JSON_VALUES_MAX, has_too_many_values

MESSAGE_BYTES_MAX = 4 << 20
"""Bytes of one message of a client."""
_PROBLEM_CHARS_MAX = 500

M = TypeVar("M", bound=Message)


class BinaryCodec(Codec[Message, M]):
    def name(self) -> str:
        return "proto"

    def encode(self, message: Message) -> bytes:
        return message.SerializeToString()

    def decode(self, data: bytes | bytearray, message_class: type[M]) -> M:
        try:
            return message_class.FromString(bytes(data))
        except DecodeError:
            raise _refused(message_class, "it is malformed (text must be UTF-8)") from None


class JsonCodec(Codec[Message, M]):
    """Refuses unknown fields, as the daemon does: it must not ignore a part of a request.

    With `skips_unknown`, skips them: clients of E2B may be newer than our definitions.
    """

    def __init__(self, *, skips_unknown: bool = False) -> None:
        self._skips_unknown = skips_unknown

    def name(self) -> str:
        return "json"

    def encode(self, message: Message) -> bytes:
        return MessageToJson(message, indent=None).encode()

    def decode(self, data: bytes | bytearray, message_class: type[M]) -> M:
        if has_too_many_values(data):
            raise _refused(message_class, f"it has more than {JSON_VALUES_MAX:,} values; send binary Protobuf")
        try:
            return Parse(bytes(data), message_class(), ignore_unknown_fields=self._skips_unknown)
        except (ParseError, ValueError) as error:  # ValueError: the text is not UTF-8
            raise _refused(message_class, str(error)) from None
        except RecursionError:
            raise _refused(message_class, "it is nested too deeply") from None


CODECS: tuple[Codec[Message, Message], ...] = (BinaryCodec(), JsonCodec())


def _refused(message_class: type[Message], problem: str) -> ConnectError:
    shown = problem[:_PROBLEM_CHARS_MAX]
    return ConnectError(Code.INVALID_ARGUMENT, f"the request is not a valid {message_class.DESCRIPTOR.name}: {shown}")


GZIP_BITS = 31
"""zlib's number for the format of gzip."""


class GzipMember:
    """Decompresses one gzip member. zlib copies the rest of the input for each: 50,000 of them in 1 MB take seconds."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(GZIP_BITS)

    def decompress(self, data: bytes | bytearray | memoryview, bytes_max: int) -> bytes:
        """Returns up to this many bytes, and leaves unread input in `rest`. Raises zlib.error."""
        content = self._inflate.decompress(data, bytes_max)
        if self._inflate.unused_data:
            raise zlib.error("data follows the first gzip member: compress everything as one member")
        return content

    @property
    def rest(self) -> bytes:
        return self._inflate.unconsumed_tail

    def end(self) -> bytes:
        """Returns the last bytes. Raises zlib.error if the member is incomplete."""
        content = self._inflate.flush()
        if not self._inflate.eof:
            raise zlib.error("it is incomplete")
        return content


class BoundedGzip(GzipCompression):
    """Takes messages that are one gzip member each."""

    def decompress(self, data: bytes | bytearray | memoryview, read_max_bytes: int | None = None) -> bytes:
        assert read_max_bytes is not None
        member = GzipMember()
        try:
            content = member.decompress(data, read_max_bytes + 1)
            if len(content) > read_max_bytes:
                raise ConnectError(Code.RESOURCE_EXHAUSTED, f"a message has more than {read_max_bytes:,} bytes")
            return content + member.end()
        except zlib.error as error:
            raise ConnectError(Code.INVALID_ARGUMENT, f"error decompressing the message: {error}") from None
