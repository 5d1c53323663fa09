# Made of aio_files.py by tools/unasync.py: change that, and run `make unasync`.
"""The files of a session, `session.files`, of the blocking client: between this machine and a session's workspace.

Files are transferred in pieces, from disk to disk. A local file is written under a temporary name, then renamed when it
is complete. Paths are relative to the workspace. These calls and executions do not wait for each other.

A program in the sandbox wrote the files and chose their names. So `get_directory` refuses unsafe names, writes regular
files and directories only, and follows no local link below its target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import archives, convert, requests
from executor_client._core.arguments import checks_calls
from executor_client._core.file_reader import FileReader
from executor_client._core.limits import FILE_BYTES_MAX, transfer_timeout_s
from executor_client._core.local import Content, LocalPath, NewFile, content_of
from executor_client._core.requests import Upload
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._sync import Transport, blocking_items, run_blocking
from executor_client.errors import ExecutorClientError
from executor_client.file_results import FileInfo, FileList
from executor_client.watch import FileWatch


@checks_calls
class SessionFiles(ShortRepr):
    """The files of one session's workspace. Thread-safe."""

    _shows = ("_session.session_id",)

    def __init__(self, session: SessionBase[Transport]) -> None:
        self._session = session

    def put(self, source: LocalPath | bytes | bytearray | memoryview, path: str) -> FileInfo:
        """Puts a local file, or bytes, at a path of the workspace, whole or not at all.

        Raises InvalidRequest for a path outside the workspace, PolicyViolationError for a file that is too large, and
        OSError if the local file can't be read.
        """
        return self._put(run_blocking(content_of, source), path, tar=False)

    def write(self, path: str, data: bytes | bytearray | memoryview) -> FileInfo:
        """Writes a file of the workspace, whole or not at all. Raises as `put` does."""
        return self._put(content_of(data), path, tar=False)

    def put_directory(self, directory: LocalPath, path: str) -> FileInfo:
        """Puts the contents of a local directory into a directory of the workspace ("" is the workspace itself).

        Other files in the target stay. Each file is written whole or not at all, but after a refusal the files before
        it stay. Links are refused.
        """
        content = run_blocking(archives.directory_content, Path(directory))
        return self._put(content, path, tar=True)

    def get(self, path: str, local_path: LocalPath, *, max_bytes: int | None = None) -> FileInfo:
        """Gets a file of the workspace. Replaces the local file of that name.

        Raises NotFoundError, and InvalidRequest for a file of more than `max_bytes`, before reading it.
        """

        def attempt() -> FileInfo:
            with NewFile(local_path) as file:
                reader = FileReader(max_bytes=max_bytes)
                with contextlib.closing(self._pieces(reader, path)) as pieces:
                    for piece in pieces:
                        run_blocking(file.write, piece)
                info = reader.finish()
                file.commit()
            return info

        return self._session._open().repeat(attempt)

    def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Returns the content of a file. Raises NotFoundError, and InvalidRequest for more than `max_bytes`."""

        def attempt() -> bytes:
            reader = FileReader(max_bytes=max_bytes)
            content = bytearray()
            with contextlib.closing(self._pieces(reader, path)) as pieces:
                for piece in pieces:
                    content += piece
            reader.finish()
            return bytes(content)

        return self._session._open().repeat(attempt)

    def get_directory(self, path: str, directory: LocalPath) -> FileInfo:
        """Gets the contents of a directory of the workspace ("" is the workspace itself) into a local one.

        Replaces local files of the same names; others stay. Writes nothing unless everything has arrived and is safe.
        """
        target = Path(directory)

        def attempt(spool: BinaryIO) -> FileInfo:
            spool.seek(0)
            spool.truncate()
            reader = FileReader(tar=True)
            with contextlib.closing(self._pieces(reader, path)) as pieces:
                for piece in pieces:
                    run_blocking(spool.write, piece)
            return reader.finish()

        with archives.spool_for(target) as spool:
            info = self._session._open().repeat(lambda: attempt(spool))
            run_blocking(archives.unpack, spool, target)
        return info

    def list(self, path: str = "") -> FileList:
        """Lists a directory of the workspace, recursively. Raises NotFoundError."""
        request = requests.with_path(pb.ListFilesRequest, self._session.session_id, path)
        response = self._session._open().call(request)
        return convert.from_wire(FileList, response)

    def watch(self, path: str = "", *, recursive: bool = True) -> FileWatch:
        """Watches a directory of the workspace ("" is the workspace itself). Returns once the watch is active.

        `recursive` includes the directories below. Raises NotFoundError, and ResourceExhaustedError for too many
        watches or directories.
        """
        request = pb.WatchFilesRequest(session_id=self._session.session_id, path=path, recursive=recursive)
        made = FileWatch(self._session, request)
        made._begin()  # a part of making it
        return made

    def _put(self, content: Content, path: str, *, tar: bool) -> FileInfo:
        transport = self._session._open()
        size_bytes = content.size_bytes
        header = requests.with_path(pb.PutFileHeader, self._session.session_id, path, tar=tar, size_bytes=size_bytes)
        timeout_s = transfer_timeout_s(transport.timeouts.call_s, size_bytes)

        def attempt() -> FileInfo:
            upload = Upload(header, content)
            messages = blocking_items(upload.messages())
            try:
                response = transport.upload(transport.channel.stub.PutFile, messages, timeout_s)
            except ExecutorClientError:
                upload.raise_problem()
                raise
            upload.raise_problem()
            return convert.from_wire(FileInfo, response.file)

        return transport.repeat(attempt)

    def _pieces(self, reader: FileReader, path: str) -> Generator[bytes, None]:
        request = requests.with_path(pb.GetFileRequest, self._session.session_id, path, tar=reader.is_tar)
        transport = self._session._transport
        messages = transport.read(request, transfer_timeout_s(transport.timeouts.call_s, FILE_BYTES_MAX))
        with contextlib.closing(messages):
            for message in messages:
                yield reader.feed(message)
