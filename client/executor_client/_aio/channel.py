"""The asyncio client's gRPC channel, and the events of an execution read from it."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self

from executor_client._aio.runtime import is_cancelling
from executor_client._core.channel import ChannelBase, EventsRequest, closed
from executor_client._core.endpoint import Endpoint
from executor_client._core.quiet_grpc import admin_service_pb2_grpc, executor_service_pb2_grpc, grpc
from executor_client._core.tracing import Metadata
from executor_client.errors import ConfigurationError, DaemonError, UnavailableError


class AsyncChannel(ChannelBase):
    """Opened on first use, it belongs to the event loop that runs then. On another one it raises ConfigurationError."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._credentials = endpoint.credentials()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._admin_stub: Any = None

    @property
    def stub(self) -> Any:
        if self._stub is None:
            self._open()
        return self._stub

    @property
    def admin_stub(self) -> Any:
        if self._admin_stub is None:
            if self._channel is None:
                self._open()
            self._admin_stub = admin_service_pb2_grpc.AdminServiceStub(self._channel)
        return self._admin_stub

    def _open(self) -> None:
        if self.is_closed():
            raise closed()
        self.check_caller()
        self._loop = asyncio.get_running_loop()
        endpoint = self.endpoint
        self._channel = (
            grpc.aio.insecure_channel(endpoint.address, endpoint.options)
            if self._credentials is None
            else grpc.aio.secure_channel(endpoint.address, self._credentials, endpoint.options)
        )
        self._stub = executor_service_pb2_grpc.ExecutorServiceStub(self._channel)
        _open_channels.add(self)

    def check_caller(self) -> None:
        """On another loop, gRPC would wait for ever or fail with an unrelated error."""
        if _forked_while_open:
            raise ConfigurationError(
                "this process was forked while its parent used an AsyncExecutorClient, and gRPC's asyncio does not "
                'work after that; start the process by "spawn" or "forkserver" (multiprocessing.get_context), or use '
                "an ExecutorClient in it"
            )
        try:
            running = asyncio.get_running_loop()
        except RuntimeError as error:
            raise ConfigurationError(
                "an AsyncExecutorClient needs a running event loop; use it in a coroutine"
            ) from error
        if self._loop not in (None, running):
            raise ConfigurationError(
                "this AsyncExecutorClient belongs to another event loop, that of its first use; create one for each "
                "loop, and get the session by get_session"
            )

    def events(self, request: EventsRequest, trace: Metadata, timeout_s: float | None = None) -> AsyncEventStream:
        """Starts a stream of events. Its reader gets gRPC's errors, which `Followed` handles."""
        return AsyncEventStream(self, self.start_events(request, trace, timeout_s))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
            _open_channels.discard(self)

    def calling(self, *, of_stream: bool = False) -> AsyncCalling:
        """Translates errors as `translating` does, around what is awaited."""
        return AsyncCalling(self, of_stream=of_stream)

    def uploading(self) -> AbstractContextManager[None]:
        return _lost_answers_as_unavailable()


class AsyncCalling:
    """A class, not an `asynccontextmanager`, since async generators use it.

    At the end of a loop, asyncio closes all generators in any order, so this one could be closed before its users.
    """

    def __init__(self, channel: AsyncChannel, *, of_stream: bool) -> None:
        self._channel = channel
        self._translating = channel.translating(of_stream=of_stream)

    async def __aenter__(self) -> None:
        self._translating.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._translating.__exit__(exc_type, exc, traceback)
        if isinstance(exc, asyncio.CancelledError):
            # gRPC cancels the callers of a closed channel, as if their tasks had been cancelled.
            if self._channel.is_closed() and not is_cancelling():
                raise closed() from None
            await _cancelled_again()


@contextmanager
def _lost_answers_as_unavailable() -> Iterator[None]:
    """Translates an error without a reason from the daemon, so that the call is repeated.

    If the daemon rejects an upload early, grpc.aio may lose the answer and report INTERNAL. The daemon's answer is then
    unknown, as after a broken connection.
    """
    try:
        yield
    except DaemonError as error:
        if error.reason:
            raise
        raise UnavailableError(f"the upload broke off: {error.message}") from None


async def _cancelled_again() -> None:
    """Lets an anyio scope cancel the task again. It recognizes its cancellation by the message, which gRPC drops."""
    await asyncio.sleep(0)


# While a channel is open, gRPC's asyncio has a thread. A forked child lacks it, so each call there would hang.
_open_channels: weakref.WeakSet[AsyncChannel] = weakref.WeakSet()
_forked_while_open = False


def _after_fork() -> None:
    global _forked_while_open
    _forked_while_open = _forked_while_open or bool(_open_channels)


os.register_at_fork(after_in_child=_after_fork)


class AsyncEventStream:
    """The events of one execution, from one gRPC stream."""

    def __init__(self, channel: AsyncChannel, stream: Any) -> None:
        self._channel = channel
        self._stream = stream
        self._messages = aiter(stream)
        self._is_cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._messages)
        except asyncio.CancelledError:
            # grpc.aio also raises this in the reader of a stream that `cancel` or the channel's end cancelled. That is
            # the end of the stream; only a cancellation of the reader's own task propagates.
            if is_cancelling() or not (self._is_cancelled or self._channel.is_closed()):
                await _cancelled_again()
                raise
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        """Ends the stream early. Idempotent."""
        self._is_cancelled = True
        self._stream.cancel()

    async def finish(self) -> None:
        """Drops messages after the result, without waiting for the end of the stream."""
        self.cancel()

    async def read_to_end(self) -> None:
        """Waits for any end of the stream."""
        try:
            async for _ in self:
                pass
        except grpc.RpcError:
            return
