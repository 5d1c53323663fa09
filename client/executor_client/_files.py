"""A file on its way from the sandbox's workspace: its announced size first, then as many bytes, or it is no file."""

from __future__ import annotations

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._limits import FILE_BYTES_MAX, PIECE_BYTES
from executor_client.errors import ProtocolError


class FileReader:
    """Feed it the messages of a GetFile stream, then ask for the content."""

    def __init__(self) -> None:
        self._size_bytes: int | None = None
        self._content = bytearray()

    def feed(self, message: pb.GetFileResponse) -> None:
        """Takes a message in. Raises ProtocolError when it does not fit what was announced."""
        if message.HasField("file"):
            if self._size_bytes is not None:
                raise ProtocolError("a file was announced twice")
            if message.file.size_bytes > FILE_BYTES_MAX:
                raise ProtocolError(f"the file has {message.file.size_bytes} bytes, accepted are {FILE_BYTES_MAX}")
            self._size_bytes = message.file.size_bytes
            return
        if self._size_bytes is None or len(message.data) > PIECE_BYTES:
            raise ProtocolError("a piece of a file was not announced or is too large")
        self._content += message.data
        if len(self._content) > self._size_bytes:
            raise ProtocolError(f"more than the announced {self._size_bytes} bytes of a file")

    def content(self) -> bytes:
        """The whole file. Raises ProtocolError when it has not arrived whole."""
        if len(self._content) != self._size_bytes:
            raise ProtocolError(f"a file of {self._size_bytes} bytes arrived with {len(self._content)}")
        return bytes(self._content)
