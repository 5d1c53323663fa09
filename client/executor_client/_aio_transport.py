"""The asyncio client's way to the daemon; `_transport.py` on the event loop, promise by promise."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _probe
from executor_client._endpoint import Endpoint
from executor_client._quiet_grpc import grpc
from executor_client._tracing import Metadata
from executor_client._transport_base import Timeouts, TransportBase, closed, is_unreached
from executor_client._watch import Awaited, LoopBell
from executor_client.errors import ConfigurationError, DaemonError, ExecutorClientError, UnavailableError
from executor_client.waits import OnWait

T = TypeVar("T")


class AioTransport(TransportBase):
    """Owns the channel. Belongs to the event loop that runs when it is made; elsewhere it raises ConfigurationError."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts, on_wait: OnWait | None = None) -> None:
        self._loop = _running_loop()
        credentials = endpoint.credentials()
        self._channel = (
            grpc.aio.insecure_channel(endpoint.address, endpoint.options)
            if credentials is None
            else grpc.aio.secure_channel(endpoint.address, credentials, endpoint.options)
        )
        super().__init__(endpoint, timeouts, self._channel, None if on_wait is None else LoopBell(on_wait))

    def _metadata(self) -> Metadata:
        self.check_loop()
        return super()._metadata()

    def open(
        self,
        request: pb.ExecuteRequest | pb.AttachExecutionRequest,
        trace: Metadata,
        timeout_s: float | None = None,
    ) -> Any:
        self.check_loop()
        return super().open(request, trace, timeout_s)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            with super()._calling():
                yield
        except asyncio.CancelledError:
            # gRPC cancels whoever waits at a channel that is closed, as if somebody had cancelled the task.
            if self.is_closed() and not is_cancelling():
                raise closed() from None
            raise

    def check_loop(self) -> None:
        """gRPC would wait on one loop for what arrives on the other: for ever, or with an error that says neither."""
        if _running_loop() is not self._loop:
            raise ConfigurationError(
                "this AsyncExecutorClient was made on another event loop, and serves that one only: make one for each "
                "loop, and find a session again by get_session"
            )

    async def close(self) -> None:
        self.check_loop()
        self._shut()
        await self._channel.close(None)

    async def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        with self._calling():
            response = await method(request, timeout=timeout_s or self.timeouts.call_s, metadata=self._metadata())
        self.answered = True
        return response

    async def upload(self, method: Callable[..., Any], requests: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with a stream of requests.

        When the daemon refuses while we still send, grpc.aio may lose its answer and put an INTERNAL of its own there.
        What was said is not known then, as after a broken connection: the call is to be repeated.
        """
        try:
            return await self.once(method, requests, timeout_s)
        except DaemonError as error:
            if error.reason:
                raise
            raise UnavailableError(f"the upload broke off: {error.message}") from error

    async def read(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """One attempt of a call with a stream of answers; ended early, it is cancelled."""
        with self._calling():
            stream = method(request, timeout=timeout_s or self.timeouts.call_s, metadata=self._metadata())
            try:
                async for message in stream:
                    yield message
            finally:
                stream.cancel()

    async def call(self, method: Callable[..., Any], request: Any, awaited: Awaited | None = None) -> Any:
        """A call with one answer, repeated where that may help. `awaited` says what takes its time."""
        return await self.repeat(lambda: self.once(method, request), awaited=awaited or self._answer)

    async def repeat(
        self, attempt: Callable[[], Awaitable[T]], *, within_s: float = math.inf, awaited: Awaited | None = None
    ) -> T:
        """Repeats an attempt while nobody is there, and while the daemon says when to ask again.

        Nothing of that takes longer than its timeout, nor than `within_s`. `awaited` is what an attempt waits for.
        """
        self._look_first()
        retries = self._call_retries(within_s)
        with self.watch() as watch:
            while True:
                self._asks(watch, awaited)
                try:
                    return await attempt()
                except ExecutorClientError as error:
                    if self._looks_at_once(error) and (cause := await self._diagnosis()) is not None:
                        raise self._nobody(error, cause) from error
                    delay_s = self._delay_s(retries, error, watch)
                    if delay_s is None:
                        raise self._nobody(error, await self._diagnosis() if is_unreached(error) else None) from error
                await asyncio.sleep(delay_s)

    async def _diagnosis(self) -> str | None:
        """In a thread, which a caller who is cancelled does not wait for: all that it does has its time."""
        return await asyncio.to_thread(_probe.diagnosis, self.endpoint)


def is_cancelling() -> bool:
    """Whether this task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as error:
        raise ConfigurationError("an AsyncExecutorClient is made and used where an event loop runs") from error
