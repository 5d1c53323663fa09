"""A watch of a session's files, of the asyncio client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncEventStream, AsyncTransport
from executor_client._core.convert import from_wire
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._core.tracing import current_trace
from executor_client.errors import ExecutorClientError, ProtocolError, UnavailableError
from executor_client.file_results import FileChanges


class AsyncFileWatch(ShortRepr):
    """Changes of files below a directory. Iterating yields the changes since `watch` returned.

    Created by `session.files.watch`. Close it as a context manager or by `close`. Unread changes are collected in the
    sandbox, one for each path.
    """

    _shows = ("_request.session_id", "_request.path")

    def __init__(self, session: SessionBase[AsyncTransport], request: pb.WatchFilesRequest) -> None:
        self._session = session
        self._request = request
        self._stream: AsyncEventStream | None = None
        self._closed = False

    async def _begin(self) -> None:
        """Returns once the watch is active."""
        await self._session._open().repeat(self._attempt)

    async def _attempt(self) -> None:
        stream = self._session._transport.channel.events(self._request, current_trace())
        try:
            if await self._next(stream) is None:
                raise ProtocolError("a watch ended before it began")
        except BaseException:
            stream.cancel()
            raise
        self._stream = stream
        if self._closed:  # meanwhile, by another task or thread
            self.close()

    async def _next(self, stream: AsyncEventStream) -> Any:
        """Returns the next message; None after the last."""
        async with self._session._transport.channel.calling(of_stream=True):
            async for message in stream:
                self._session._transport.answered = True
                return message
        return None

    async def __aiter__(self) -> AsyncGenerator[FileChanges, None]:
        """Yields changes until the watch is closed. After a lost connection it starts again and yields `overflowed`.

        Raises NotFoundError if the directory or the session is gone, and the errors of `watch`.
        """
        while (stream := self._stream) is not None:
            try:
                message = await self._next(stream)
            except UnavailableError:
                if self._closed:
                    return
                await self._begin()
                if self._stream is not None:  # else it was closed meanwhile
                    yield FileChanges(overflowed=True)
                continue
            except ExecutorClientError:
                if self._closed:
                    return
                raise
            if message is None:
                return
            yield from_wire(FileChanges, message)

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        self._closed = True
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
