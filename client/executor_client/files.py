# Made of aio_files.py by tools/unasync.py: change that, and run `make unasync`.
"""The files of a session, `session.files`, of the blocking client: in its sandbox, and between it and this machine.

Paths are absolute, or relative to the workspace. The sandbox follows links, with the rights of its user. A call that
this user can't make raises a FileError: FileNotFound, FileIsDirectory, FileNotDirectory, FilePermissionDenied or
FileExists, each also Python's exception of that kind. These calls and executions do not wait for each other.

Files are transferred in pieces, from disk to disk. A local file is written under a temporary name, then renamed when it
is complete. A program in the sandbox wrote the files and chose their names. So `get_directory` refuses unsafe names,
writes regular files and directories only, and follows no local link below its target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import archives, convert, requests
from executor_client._core.arguments import checks_calls
from executor_client._core.file_reader import FileReader
from executor_client._core.limits import FILE_BYTES_MAX, transfer_timeout_s
from executor_client._core.local import Content, LocalPath, NewFile, content_of, write_all
from executor_client._core.requests import Upload
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._core.status import is_transport_failure
from executor_client._sync import Transport, blocking_items, on_disk, run_blocking
from executor_client.errors import DaemonError, ExecutorClientError, FileNotDirectory, FileNotFound, InvalidRequest
from executor_client.file_results import FileInfo, FileList
from executor_client.watch import FileWatch


@checks_calls
class SessionFiles(ShortRepr):
    """The files of one session's workspace. Thread-safe."""

    _shows = ("_session.session_id",)

    def __init__(self, session: SessionBase[Transport]) -> None:
        self._session = session

    def put(self, source: LocalPath | bytes | bytearray | memoryview, path: str) -> FileInfo:
        """Puts a local file, or bytes, at a path of the sandbox, as `write` does.

        Raises OSError if the local file can't be read.
        """
        return self._put(run_blocking(content_of, source), path)

    def write(
        self, path: str, data: bytes | bytearray | memoryview, *, append: bool = False, mode: int | None = None
    ) -> FileInfo:
        """Writes a file, or with `append` adds to its end; makes missing directories, and writes through links.

        A file appears whole or not at all. It keeps its mode (a new file gets 0o644), unless `mode` gives another. Data
        is written in place if it is appended, if the directory is not writable, or if another user owns the file. If
        the connection breaks then, a part of the data may be there; an append is not repeated (DaemonError). Raises
        FileError, and PolicyViolationError or ResourceExhaustedError for a file that is too large.
        """
        return self._put(content_of(data), path, append=append, mode=mode)

    def put_directory(self, directory: LocalPath, path: str) -> FileInfo:
        """Puts the contents of a local directory into a directory of the workspace ("" is the workspace itself).

        Other files in the target stay. Each file is written whole or not at all, but after a refusal the files before
        it stay. Links are refused.
        """
        content = run_blocking(archives.directory_content, Path(directory))
        return self._put(content, path, tar=True)

    def unpack(self, data: bytes | bytearray | memoryview, path: str) -> FileInfo:
        """Unpacks a plain tar archive into a directory ("" is the workspace itself), which is made if it is missing.

        Raises FileError for a member that is neither a regular file nor a directory, leads out of the directory or
        through a link in it; the members before it stay.
        """
        return self._put(content_of(data), path, tar=True)

    def archive(self, path: str, *, exclude: Iterable[str] = ()) -> bytes:
        """Returns a directory ("" is the workspace itself) as a plain tar archive of regular files and directories.

        `exclude` has names, and paths relative to the directory, to leave out with everything below them. Raises
        FileError, and ResourceExhaustedError for a directory that is too large.
        """
        if isinstance(exclude, str):
            raise InvalidRequest("exclude is a list of names and paths, not one text")
        excluded = [*exclude]

        def attempt() -> bytes:
            return self._received(FileReader(tar=True), path, excluded=excluded)

        return self._session._open().repeat(attempt)

    def get(self, path: str, local_path: LocalPath, *, max_bytes: int | None = None) -> FileInfo:
        """Gets a file of the sandbox. Replaces the local file of that name.

        Raises FileError, and InvalidRequest for a file of more than `max_bytes`, before reading it.
        """

        def attempt() -> FileInfo:
            with NewFile(local_path) as file:
                reader = FileReader(max_bytes=max_bytes)
                with contextlib.closing(self._pieces(reader, path)) as pieces:
                    for piece in pieces:
                        on_disk(file.write, piece)
                info = reader.finish()
                file.commit()
            return info

        return self._session._open().repeat(attempt)

    def read(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """Returns the content of a file from byte `offset` on, at most `max_bytes` of it; b"" past its end.

        Raises FileError, and ResourceExhaustedError for more bytes than one call may get.
        """
        if min(offset, max_bytes or 0) < 0:
            raise InvalidRequest("offset and max_bytes must not be negative")

        def attempt() -> bytes:
            reader = FileReader(offset=offset, length=max_bytes)
            return self._received(reader, path, offset=offset, length=max_bytes)

        return self._session._open().repeat(attempt)

    def stream(self, path: str) -> Generator[bytes, None]:
        """Yields the content of a file in pieces, without holding it in memory.

        Raises FileError, and UnavailableError if the connection breaks: a part may have been yielded.
        """
        reader = FileReader()
        with contextlib.closing(self._pieces(reader, path)) as pieces:
            for piece in pieces:
                if piece:
                    yield piece
        reader.finish()

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
                    on_disk(write_all, spool, piece, target)
            return reader.finish()

        with archives.spool_for(target) as spool:
            info = self._session._open().repeat(lambda: attempt(spool))
            on_disk(archives.unpack, spool, target)
        return info

    def list(self, path: str = "", *, recursive: bool = True) -> FileList:
        """Lists the files, directories and links in a directory ("" is the workspace itself). Raises FileError."""
        request = requests.with_path(pb.ListFilesRequest, self._session.session_id, path, recursive=recursive)
        response = self._session._open().call(request)
        return convert.from_wire(FileList, response)

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """Describes a file, a directory or, without `follow`, a link. Raises FileError."""
        return self._described(self._manage(path, stat={"follow": follow}))

    def exists(self, path: str) -> bool:
        """True if the path leads to something; false for a link that leads nowhere. Raises FilePermissionDenied."""
        try:
            self.stat(path)
        except (FileNotFound, FileNotDirectory):
            return False
        return True

    def realpath(self, path: str) -> str:
        """Returns the absolute path without links. Missing parts stay as they are. Raises FileError."""
        return self._described(self._manage(path, realpath={})).path

    def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> FileInfo:
        """Makes a directory. Raises FileExists if a file is there, or if anything is there without `exist_ok`."""
        return self._described(self._manage(path, mkdir={"parents": parents, "exist_ok": exist_ok}))

    def move(self, source: str, target: str) -> FileInfo:
        """Renames a file, a directory or a link within one file system; replaces a file that has the new name.

        Raises FileError.
        """
        return self._described(self._manage(source, move={"target": target}))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Removes a file, a link (not what it leads to) or, with `recursive`, a directory with everything in it.

        Raises FileError: FileNotFound unless `missing_ok`, FileIsDirectory for a directory without `recursive`.
        """
        self._manage(path, remove={"recursive": recursive, "missing_ok": missing_ok})

    def watch(self, path: str = "", *, recursive: bool = True) -> FileWatch:
        """Watches a directory ("" is the workspace itself). Returns once the watch is active.

        `recursive` includes the directories below. With an absolute path, changes have absolute paths without links.
        Raises NotFoundError, and ResourceExhaustedError for too many watches or directories.
        """
        request = requests.made(
            pb.WatchFilesRequest, session_id=self._session.session_id, path=path, recursive=recursive
        )
        made = FileWatch(self._session, request)
        made._begin()  # not in the constructor: it does I/O
        return made

    def _manage(self, path: str, **action: dict[str, Any]) -> pb.ManageFileResponse:
        request = requests.with_path(pb.ManageFileRequest, self._session.session_id, path, tar=False, **action)
        response: pb.ManageFileResponse = self._session._open().call(request)
        if self._session._record is not None:
            self._session._record.changed(request)
        return response

    @staticmethod
    def _described(response: pb.ManageFileResponse) -> FileInfo:
        return convert.from_wire(FileInfo, response.file)

    def _put(
        self, content: Content, path: str, *, tar: bool = False, append: bool = False, mode: int | None = None
    ) -> FileInfo:
        transport = self._session._open()
        size_bytes = content.size_bytes
        what: dict[str, Any] = {"size_bytes": size_bytes, "append": append, "mode": mode}
        header = requests.with_path(pb.PutFileHeader, self._session.session_id, path, tar=tar, **what)
        timeout_s = transfer_timeout_s(transport.timeouts.call_s, size_bytes)

        def attempt() -> FileInfo:
            upload = Upload(header, content)
            messages = blocking_items(upload.messages())
            try:
                response = transport.upload(transport.channel.stub.PutFile, messages, timeout_s)
            except ExecutorClientError as error:
                upload.raise_problem()
                if append and upload.has_begun and is_transport_failure(error) and error.reason != "DRAINING":
                    problem = f"the connection broke: a part of the data may be at the end of {path!r}; see its size"
                    raise DaemonError(problem, reason=error.reason) from error
                raise
            upload.raise_problem()
            return convert.from_wire(FileInfo, response.file)

        info = transport.repeat(attempt)
        self._session._was_used = True
        if self._session._record is not None:
            run_blocking(self._session._record.file, header, content)
        return info

    def _received(self, reader: FileReader, path: str, **fields: Any) -> bytes:
        content = BytesIO()  # a list of pieces would take twice the memory
        with contextlib.closing(self._pieces(reader, path, **fields)) as pieces:
            for piece in pieces:
                content.write(piece)
        reader.finish()
        return content.getvalue()

    def _pieces(self, reader: FileReader, path: str, **fields: Any) -> Generator[bytes, None]:
        request = requests.with_path(pb.GetFileRequest, self._session.session_id, path, tar=reader.is_tar, **fields)
        transport = self._session._transport
        messages = transport.read(request, transfer_timeout_s(transport.timeouts.call_s, FILE_BYTES_MAX))
        with contextlib.closing(messages):
            for message in messages:
                yield reader.feed(message)
