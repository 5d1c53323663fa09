"""`session.files`: files between this machine and a session's workspace.

Files of any size go from disk to disk in pieces. A local file is written under another name beside its own and takes
that once it is whole. Paths of the workspace are relative to it. An executing program does not have to wait for these
calls, nor they for it.

What comes out of a workspace was made by the program in the sandbox, names included: `get_directory` refuses names that
are not safe, writes regular files and directories only, and follows no local link below its target.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from executor_client import _archives, _convert, _requests
from executor_client._files import FileReader
from executor_client._limits import FILE_BYTES_MAX, transfer_timeout_s
from executor_client._local import Content, LocalPath, NewFile, content_of
from executor_client._requests import Upload
from executor_client._transport import Transport
from executor_client.errors import ExecutorClientError
from executor_client.results import FileInfo, FileList


class SessionFiles:
    """Of one session. Thread-safe."""

    def __init__(self, transport: Transport, session_id: str, session: object = None) -> None:
        """`session` is kept as long as this is: it ends when nobody refers to it."""
        self._session = session
        self._transport = transport
        self._session_id = session_id

    def put(self, source: LocalPath | bytes | bytearray | memoryview, path: str) -> FileInfo:
        """Puts a local file, or bytes, at a path of the workspace, whole or not at all."""
        return self._put(content_of(source), path, tar=False)

    def write(self, path: str, data: bytes | bytearray | memoryview) -> FileInfo:
        """Writes a file of the workspace, whole or not at all."""
        return self._put(content_of(data), path, tar=False)

    def put_directory(self, directory: LocalPath, path: str) -> FileInfo:
        """Puts what a local directory holds into a directory of the workspace, "" for the workspace itself.

        Files that are there already and have other names stay. Each file is written whole or not at all; the directory
        is not: after a refusal, what came before it stays. Links are refused.
        """
        return self._put(_archives.directory_content(Path(directory)), path, tar=True)

    def get(self, path: str, local_path: LocalPath, *, max_bytes: int | None = None) -> FileInfo:
        """Gets a file of the workspace. A local file of that name is replaced.

        Raises InvalidRequest for one of more than `max_bytes`, before it is read.
        """

        def attempt() -> FileInfo:
            with NewFile(local_path) as file:
                reader = FileReader(max_bytes=max_bytes)
                for piece in self._pieces(reader, path):
                    file.write(piece)
                info = reader.finish()
                file.commit()
            return info

        return self._transport.repeat(attempt)

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Reads a file of the workspace. Raises InvalidRequest for one of more than `max_bytes`, before it is read."""

        def attempt() -> bytes:
            reader = FileReader(max_bytes=max_bytes)
            content = bytearray()
            for piece in self._pieces(reader, path):
                content += piece
            reader.finish()
            return bytes(content)

        return self._transport.repeat(attempt)

    def get_directory(self, path: str, directory: LocalPath) -> FileInfo:
        """Gets what a directory of the workspace holds, "" for the workspace itself, into a local one.

        Local files of the same names are replaced, others stay. Nothing is written unless all of it has arrived and is
        acceptable.
        """
        target = Path(directory)

        def attempt(spool: BinaryIO) -> FileInfo:
            spool.seek(0)
            spool.truncate()
            reader = FileReader(tar=True)
            for piece in self._pieces(reader, path):
                spool.write(piece)
            return reader.finish()

        with _archives.spool_for(target) as spool:
            info = self._transport.repeat(lambda: attempt(spool))
            _archives.unpack(spool, target)
        return info

    def list(self, path: str = "") -> FileList:
        """Lists a directory of the workspace, and what is below it."""
        response = self._transport.call(self._transport.stub.ListFiles, _requests.list_files(self._session_id, path))
        return FileList(tuple(map(_convert.file_from_wire, response.files)), response.truncated)

    def _put(self, content: Content, path: str, *, tar: bool) -> FileInfo:
        header = _requests.put_file_header(self._session_id, path, content.size_bytes, tar=tar)
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, content.size_bytes)

        def attempt() -> FileInfo:
            upload = Upload(header, content)
            try:
                response = self._transport.once(self._transport.stub.PutFile, upload.messages(), timeout_s)
            except ExecutorClientError:
                upload.raise_problem()
                raise
            upload.raise_problem()
            return _convert.file_from_wire(response.file)

        return self._transport.repeat(attempt)

    def _pieces(self, reader: FileReader, path: str) -> Iterator[bytes]:
        request = _requests.get_file(self._session_id, path, tar=reader.is_tar)
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, FILE_BYTES_MAX)
        for message in self._transport.read(self._transport.stub.GetFile, request, timeout_s):
            yield reader.feed(message)
