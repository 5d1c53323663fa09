"""The sync client's way to the daemon: one channel, the same metadata on every call, errors of ours only, retries.

Every RPC of the service may be repeated (its comment in the proto says what that does), so all unary calls are, while
the daemon cannot be reached and within a bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from grpc.experimental import ChannelOptions

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import _status
from executor_client._endpoint import Endpoint
from executor_client._limits import CAPACITY_WAIT_S
from executor_client._retry import Backoff
from executor_client.errors import ExecutorClientError, ResourceExhaustedError, UnavailableError

T = TypeVar("T")


class Transport:
    """Owns the channel. Thread-safe."""

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
        # Streams are read by the thread that asked for them: a hop between threads less per event.
        options = [*endpoint.options, (ChannelOptions.SingleThreadedUnaryStream, 1)]
        self._channel = (
            grpc.insecure_channel(endpoint.address, options)
            if credentials is None
            else grpc.secure_channel(endpoint.address, credentials, options)
        )
        self.stub: Any = executor_service_pb2_grpc.ExecutorServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def open(self, request: pb.ExecuteRequest | pb.AttachExecutionRequest, timeout_s: float | None = None) -> Any:
        """Starts a stream of events. What it raises while it is read is gRPC's: `Execution` judges it."""
        if isinstance(request, pb.ExecuteRequest):
            return self.stub.Execute(request, timeout=timeout_s, metadata=self._metadata)
        return self.stub.AttachExecution(request, timeout=timeout_s, metadata=self._metadata)

    def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        try:
            response = method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _status.translate(error) from error
        self._answered = True
        return response

    def read(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Iterator[Any]:
        """One attempt of a call with a stream of answers; ended early, it is cancelled."""
        stream = method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise _status.translate(error) from error
        finally:
            stream.cancel()

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """A call with one answer, repeated while nobody is there."""
        return self.repeat(lambda: self.once(method, request))

    def repeat(self, attempt: Callable[[], T], *, within_s: float | None = None) -> T:
        """Repeats an attempt while nobody is there.

        A daemon that has answered before is given `reconnect_timeout_s` to come back; one never heard of, less.
        """
        backoff: Backoff | None = None
        while True:
            try:
                return attempt()
            except UnavailableError as error:
                if not _status.is_transport_failure(error):
                    raise
                if within_s is None:
                    within_s = self.reconnect_timeout_s if self._answered else self._connect_timeout_s
                backoff = backoff or Backoff(now_s=time.monotonic(), timeout_s=within_s)
                delay_s = backoff.delay_s(time.monotonic())
                if delay_s is None:
                    raise unreachable(self.endpoint, error) from error
            time.sleep(delay_s)

    def when_there_is_room(self, attempt: Callable[[], T]) -> T:
        """As `repeat`, and also while the daemon is full and says when to ask again."""
        backoff = Backoff(now_s=time.monotonic(), timeout_s=CAPACITY_WAIT_S)
        while True:
            try:
                return self.repeat(attempt)
            except ResourceExhaustedError as error:
                if error.retry_after_s is None:
                    raise
                delay_s = backoff.delay_s(time.monotonic(), at_least_s=error.retry_after_s)
                if delay_s is None:
                    raise
            time.sleep(delay_s)


def unreachable(endpoint: Endpoint, error: ExecutorClientError) -> UnavailableError:
    return UnavailableError(f"no daemon answers at {endpoint.address}: {error.message}", reason=error.reason)
