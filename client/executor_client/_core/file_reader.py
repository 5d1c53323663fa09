"""Reads a file of a workspace from its messages, and checks them against the announcement. No I/O.

A regular file must have the announced size. A directory arrives as an archive of unknown size, which marks its own end
(`archives.py`).
"""

from __future__ import annotations

from executor_api.limits import PIECE_BYTES
from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import convert
from executor_client._core.limits import FILE_BYTES_MAX
from executor_client.errors import InvalidRequest, ProtocolError
from executor_client.file_results import FileInfo


class FileReader:
    """Takes the messages of a GetFile stream and returns the pieces of the file; `finish` checks the end."""

    def __init__(
        self, *, tar: bool = False, max_bytes: int | None = None, offset: int = 0, length: int | None = None
    ) -> None:
        """`max_bytes` refuses a larger file; `offset` and `length` are those of the request."""
        self.is_tar = tar
        self._offset = offset
        self._length = length
        self._max_bytes = max_bytes
        self._info: FileInfo | None = None
        self._received_bytes = 0

    def feed(self, message: pb.GetFileResponse) -> bytes:
        """Returns the next piece; empty for the announcement.

        Raises ProtocolError if it does not fit the announcement, InvalidRequest if the announced file has more than
        `max_bytes`.
        """
        if message.HasField("file"):
            self._announce(convert.from_wire(FileInfo, message.file))
            return b""
        if self._info is None or len(message.data) > PIECE_BYTES:
            raise ProtocolError("a piece of a file is too large or was not announced")
        self._received_bytes += len(message.data)
        most = FILE_BYTES_MAX if self.is_tar else self._expected_bytes(self._info)
        if self._received_bytes > most:
            raise ProtocolError(
                f"more than {'the accepted' if self.is_tar else 'the announced'} {most} bytes of a file"
            )
        return message.data

    def finish(self) -> FileInfo:
        """Returns the description of the file. Raises ProtocolError if it is incomplete."""
        if self._info is None:
            raise ProtocolError("no file arrived")
        if not self.is_tar and self._received_bytes != (expected := self._expected_bytes(self._info)):
            raise ProtocolError(f"of a file {self._received_bytes} bytes arrived; {expected} were announced")
        return self._info

    def _expected_bytes(self, info: FileInfo) -> int:
        left = max(0, info.size_bytes - self._offset)
        return left if self._length is None else min(left, self._length)

    def _announce(self, info: FileInfo) -> None:
        if self._info is not None:
            raise ProtocolError("a file was announced twice")
        if info.is_directory != self.is_tar:
            raise ProtocolError(f"a {'directory' if info.is_directory else 'file'} arrived that was not requested")
        if not self.is_tar and (expected := self._expected_bytes(info)) > FILE_BYTES_MAX:
            raise ProtocolError(f"{expected} bytes of a file were announced; the limit is {FILE_BYTES_MAX}")
        if self._max_bytes is not None and info.size_bytes > self._max_bytes:
            raise InvalidRequest(f"{info.path!r} has {info.size_bytes:,} bytes; max_bytes is {self._max_bytes:,}")
        self._info = info
