"""`session.files` of an `AsyncSession`; `files.py` on the event loop, promise by promise. The disk's work is done in
threads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import BinaryIO

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _archives, _convert, _requests
from executor_client._aio_transport import AioTransport
from executor_client._files import FileReader
from executor_client._limits import FILE_BYTES_MAX, transfer_timeout_s
from executor_client._local import Content, LocalPath, NewFile, content_of
from executor_client._requests import Upload
from executor_client.errors import ExecutorClientError
from executor_client.results import FileInfo, FileList


class AsyncSessionFiles:
    """Of one session; see `SessionFiles`."""

    def __init__(self, transport: AioTransport, session_id: str, session: object = None) -> None:
        """`session` is kept as long as this is: it ends when nobody refers to it."""
        self._session = session
        self._transport = transport
        self._session_id = session_id

    async def put(self, source: LocalPath | bytes | bytearray | memoryview, path: str) -> FileInfo:
        """Puts a local file, or bytes, at a path of the workspace, whole or not at all."""
        return await self._put(await asyncio.to_thread(content_of, source), path, tar=False)

    async def write(self, path: str, data: bytes | bytearray | memoryview) -> FileInfo:
        """Writes a file of the workspace, whole or not at all."""
        return await self._put(content_of(data), path, tar=False)

    async def put_directory(self, directory: LocalPath, path: str) -> FileInfo:
        """Puts what a local directory holds into a directory of the workspace; see `SessionFiles.put_directory`."""
        content = await asyncio.to_thread(_archives.directory_content, Path(directory))
        return await self._put(content, path, tar=True)

    async def get(self, path: str, local_path: LocalPath, *, max_bytes: int | None = None) -> FileInfo:
        """Gets a file of the workspace; see `SessionFiles.get`."""

        async def attempt() -> FileInfo:
            with NewFile(local_path) as file:
                reader = FileReader(max_bytes=max_bytes)
                async with contextlib.aclosing(self._pieces(reader, path)) as pieces:
                    async for piece in pieces:
                        await asyncio.to_thread(file.write, piece)
                info = reader.finish()
                file.commit()
            return info

        return await self._transport.repeat(attempt)

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Reads a file of the workspace. Raises InvalidRequest for one of more than `max_bytes`, before it is read."""

        async def attempt() -> bytes:
            reader = FileReader(max_bytes=max_bytes)
            content = bytearray()
            async with contextlib.aclosing(self._pieces(reader, path)) as pieces:
                async for piece in pieces:
                    content += piece
            reader.finish()
            return bytes(content)

        return await self._transport.repeat(attempt)

    async def get_directory(self, path: str, directory: LocalPath) -> FileInfo:
        """Gets what a directory of the workspace holds into a local one; see `SessionFiles.get_directory`."""
        target = Path(directory)

        async def attempt(spool: BinaryIO) -> FileInfo:
            spool.seek(0)
            spool.truncate()
            reader = FileReader(tar=True)
            async with contextlib.aclosing(self._pieces(reader, path)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(spool.write, piece)
            return reader.finish()

        with _archives.spool_for(target) as spool:
            info = await self._transport.repeat(lambda: attempt(spool))
            await asyncio.to_thread(_archives.unpack, spool, target)
        return info

    async def list(self, path: str = "") -> FileList:
        """Lists a directory of the workspace, and what is below it."""
        request = _requests.list_files(self._session_id, path)
        response = await self._transport.call(self._transport.stub.ListFiles, request)
        return FileList(tuple(map(_convert.file_from_wire, response.files)), response.truncated)

    async def _put(self, content: Content, path: str, *, tar: bool) -> FileInfo:
        header = _requests.put_file_header(self._session_id, path, content.size_bytes, tar=tar)
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, content.size_bytes)

        async def attempt() -> FileInfo:
            upload = Upload(header, content)
            try:
                response = await self._transport.upload(self._transport.stub.PutFile, _threaded(upload), timeout_s)
            except ExecutorClientError:
                upload.raise_problem()
                raise
            upload.raise_problem()
            return _convert.file_from_wire(response.file)

        return await self._transport.repeat(attempt)

    async def _pieces(self, reader: FileReader, path: str) -> AsyncGenerator[bytes, None]:
        request = _requests.get_file(self._session_id, path, tar=reader.is_tar)
        timeout_s = transfer_timeout_s(self._transport.timeouts.call_s, FILE_BYTES_MAX)
        messages = self._transport.read(self._transport.stub.GetFile, request, timeout_s)
        async with contextlib.aclosing(messages):
            async for message in messages:
                yield reader.feed(message)


async def _threaded(upload: Upload) -> AsyncIterator[pb.PutFileRequest]:
    """The messages of an upload, each read from the disk in a thread."""
    messages = upload.messages()
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message
