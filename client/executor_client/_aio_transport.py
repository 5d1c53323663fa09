"""The asyncio client's way to the daemon; `_transport.py` on the event loop, promise by promise."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import _status
from executor_client._endpoint import Endpoint
from executor_client._retry import Retries
from executor_client._tracing import Metadata, current_trace
from executor_client._transport import judged, unreachable
from executor_client.errors import DaemonError, ExecutorClientError, UnavailableError

T = TypeVar("T")


class AioTransport:
    """Owns the channel. Belongs to the event loop that runs when it is made."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        connect_timeout_s: float,
        call_timeout_s: float,
        reconnect_timeout_s: float,
        busy_timeout_s: float,
    ) -> None:
        self.endpoint = endpoint
        self.call_timeout_s = call_timeout_s
        self.reconnect_timeout_s = reconnect_timeout_s
        self.busy_timeout_s = busy_timeout_s
        self._connect_timeout_s = connect_timeout_s
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

    def open(
        self,
        request: pb.ExecuteRequest | pb.AttachExecutionRequest,
        trace: Metadata,
        timeout_s: float | None = None,
    ) -> Any:
        """Starts a stream of events. What it raises while it is read is gRPC's: `Execution` judges it.

        Every stream of an execution belongs to the trace of the first.
        """
        method = self.stub.Execute if isinstance(request, pb.ExecuteRequest) else self.stub.AttachExecution
        return method(request, timeout=timeout_s, metadata=(*self.endpoint.metadata, *trace))

    async def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        try:
            response = await method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise judged(self.endpoint, error) from error
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
        stream = method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata())
        try:
            async for message in stream:
                yield message
        except grpc.RpcError as error:
            raise judged(self.endpoint, error) from error
        finally:
            stream.cancel()

    def execution_retries(self) -> Retries:
        """Those of an execution, whose daemon has made the session."""
        return Retries(away_timeout_s=self.reconnect_timeout_s, busy_timeout_s=self.busy_timeout_s)

    async def call(self, method: Callable[..., Any], request: Any) -> Any:
        """A call with one answer, repeated where that may help."""
        return await self.repeat(lambda: self.once(method, request))

    async def repeat(self, attempt: Callable[[], Awaitable[T]], *, within_s: float = math.inf) -> T:
        """Repeats an attempt while nobody is there, and while the daemon is busy and says when to ask again.

        A daemon that has answered before is given `reconnect_timeout_s` to come back; one never heard of, less. Neither
        takes longer than `within_s`.
        """
        retries = Retries(
            away_timeout_s=min(within_s, self.reconnect_timeout_s if self._answered else self._connect_timeout_s),
            busy_timeout_s=min(within_s, self.busy_timeout_s),
        )
        while True:
            try:
                return await attempt()
            except ExecutorClientError as error:
                delay_s = retries.delay_s(error, time.monotonic())
                if delay_s is None:
                    if _status.is_transport_failure(error):
                        raise unreachable(self.endpoint, error) from error
                    raise
            await asyncio.sleep(delay_s)

    def _metadata(self) -> Metadata:
        return (*self.endpoint.metadata, *current_trace())
