"""Files in transit: in memory, and above a size in temporary files without names.

A file is collected whole. The sandbox has to know its size before an upload, and a client that reads a download slowly
must not tie up the sandbox. The files of one key share a limited part of the space.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from types import TracebackType
from typing import IO, Self

from executor_client.aio_files import AsyncSessionFiles
from executor_server.gateway.errors import Refusal

MEMORY_BYTES = 2 << 20
"""Bytes of one file that are collected in memory."""
TENANT_BYTES_MAX = 2 << 30
"""Bytes in temporary files for the requests of one key."""
ALL_BYTES_MAX = 8 << 30
RETRY_S = 5.0


class Room:
    """Counts the bytes in temporary files."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()

    def take(self, token: str, size_bytes: int) -> None:
        """Raises Refusal if there is no room."""
        if self._used[token] + size_bytes > TENANT_BYTES_MAX or self._used.total() + size_bytes > ALL_BYTES_MAX:
            raise Refusal(503, "the gateway has too many large files in transit; try again", retry_after_s=RETRY_S)
        self._used[token] += size_bytes

    def give_back(self, token: str, size_bytes: int) -> None:
        self._used[token] -= size_bytes
        self._used = +self._used  # drops keys without bytes


class Spool:
    """Collects files, one after the other. As a context manager it closes itself."""

    def __init__(self, room: Room, token: str, limit_bytes: int | None = None) -> None:
        self.size_bytes = 0
        self._room = room
        self._token = token
        self._limit_bytes = limit_bytes
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._file_bytes = 0

    async def add(self, data: bytes) -> None:
        """Raises Refusal for more than the sandbox, or the gateway, has room for."""
        self.size_bytes += len(data)
        if self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            raise Refusal(507, f"not enough disk space available: the sandbox has {self._limit_bytes:,} bytes")
        self._memory += data
        if len(self._memory) >= MEMORY_BYTES:
            await self._flush()

    async def put(self, files: AsyncSessionFiles, path: str) -> None:
        """Puts the file into a sandbox, and begins with the next one. Raises Refusal and the client's errors."""
        if self._file is None:
            await files.write(path, self._memory)
        else:
            await self._flush()
            await files.put(f"/proc/self/fd/{self._file.fileno()}", path)
        self.close()

    async def read(self, start: int, size_bytes: int) -> bytes:
        """Returns a part of the file. Raises Refusal."""
        if self._file is None:
            return bytes(self._memory[start : start + size_bytes])
        if self._memory:
            await self._flush()
        return await asyncio.to_thread(os.pread, self._file.fileno(), size_bytes, start)

    async def _flush(self) -> None:
        # The thread goes on if this task is cancelled, so it gets data that nobody else changes.
        data, self._memory = self._memory, bytearray()
        self._room.take(self._token, len(data))
        self._file_bytes += len(data)
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            await asyncio.to_thread(_write, self._file, data)
        except OSError as error:
            raise Refusal(503, f"the gateway has no room for the file: {error.strerror}") from error

    def close(self) -> None:
        self._memory = bytearray()
        self.size_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None
        self._room.give_back(self._token, self._file_bytes)
        self._file_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _write(file: IO[bytes], data: bytearray) -> None:
    file.write(data)
    file.flush()
