"""The asyncio client's way to the daemon; `_transport.py` on the event loop, promise by promise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import _status
from executor_client._endpoint import Endpoint
from executor_client._limits import CAPACITY_WAIT_S
from executor_client._retry import Backoff
from executor_client._transport import unreachable
from executor_client.errors import DaemonError, ResourceExhaustedError, UnavailableError

T = TypeVar("T")


class AioTransport:
    """Owns the channel. Belongs to the event loop that runs when it is made."""

    def __init__(
        self, endpoint: Endpoint, *, connect_timeout_s: float, call_timeout_s: float, reconnect_timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self.call_timeout_s = call_timeout_s
        self.reconnect_timeout_s = reconnect_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._metadata = endpoint.metadata
        self._answered = False
        credentials = endpoint.credentials()
        self._channel = (
            grpc.aio.insecure_channel(endpoint.address, endpoint.options)
            if credentials is None
            else grpc.aio.secure_channel(endpoint.address, credentials, endpoint.options)
        )
        self.stub: Any = executor_service_pb2_grpc.ExecutorServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close(None)

    def open(self, request: pb.ExecuteRequest | pb.AttachExecutionRequest, timeout_s: float | None = None) -> Any:
        """Starts a stream of events. What it raises while it is read is gRPC's: `Execution` judges it."""
        if isinstance(request, pb.ExecuteRequest):
            return self.stub.Execute(request, timeout=timeout_s, metadata=self._metadata)
        return self.stub.AttachExecution(request, timeout=timeout_s, metadata=self._metadata)

    async def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        try:
            response = await method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _status.translate(error) from error
        self._answered = True
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
        stream = method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata)
        try:
            async for message in stream:
                yield message
        except grpc.RpcError as error:
            raise _status.translate(error) from error
        finally:
            stream.cancel()

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """A call with one answer, repeated while nobody is there."""
        return await self.repeat(lambda: self.once(method, request))

    async def repeat(self, attempt: Callable[[], Awaitable[T]], *, within_s: float | None = None) -> T:
        """Repeats an attempt while nobody is there.

        A daemon that has answered before is given `reconnect_timeout_s` to come back; one never heard of, less.
        """
        backoff: Backoff | None = None
        while True:
            try:
                return await attempt()
            except UnavailableError as error:
                if not _status.is_transport_failure(error):
                    raise
                if within_s is None:
                    within_s = self.reconnect_timeout_s if self._answered else self._connect_timeout_s
                backoff = backoff or Backoff(now_s=time.monotonic(), timeout_s=within_s)
                delay_s = backoff.delay_s(time.monotonic())
                if delay_s is None:
                    raise unreachable(self.endpoint, error) from error
            await asyncio.sleep(delay_s)

    async def when_there_is_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """As `repeat`, and also while the daemon is full and says when to ask again."""
        backoff = Backoff(now_s=time.monotonic(), timeout_s=CAPACITY_WAIT_S)
        while True:
            try:
                return await self.repeat(attempt)
            except ResourceExhaustedError as error:
                if error.retry_after_s is None:
                    raise
                delay_s = backoff.delay_s(time.monotonic(), at_least_s=error.retry_after_s)
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)
