"""The sync client's way to the daemon: one channel, the same metadata on every call, errors of ours only, retries.

Every RPC of the service may be repeated (its comment in the proto says what that does), so all of them are: while the
daemon cannot be reached, and while it is busy and says when to ask again; each within a bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from grpc.experimental import ChannelOptions

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import _status
from executor_client._endpoint import Endpoint
from executor_client._retry import Retries
from executor_client._tracing import Metadata, current_trace
from executor_client.errors import AuthenticationError, ExecutorClientError, UnavailableError

T = TypeVar("T")


class Transport:
    """Owns the channel. Thread-safe."""

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

    def once(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Any:
        """One attempt of a call with one answer."""
        try:
            response = method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise judged(self.endpoint, error) from error
        self._answered = True
        return response

    def read(self, method: Callable[..., Any], request: Any, timeout_s: float | None = None) -> Iterator[Any]:
        """One attempt of a call with a stream of answers; ended early, it is cancelled."""
        stream = method(request, timeout=timeout_s or self.call_timeout_s, metadata=self._metadata())
        try:
            yield from stream
        except grpc.RpcError as error:
            raise judged(self.endpoint, error) from error
        finally:
            stream.cancel()

    def execution_retries(self) -> Retries:
        """Those of an execution, whose daemon has made the session."""
        return Retries(away_timeout_s=self.reconnect_timeout_s, busy_timeout_s=self.busy_timeout_s)

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """A call with one answer, repeated where that may help."""
        return self.repeat(lambda: self.once(method, request))

    def repeat(self, attempt: Callable[[], T], *, within_s: float = math.inf) -> T:
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
                return attempt()
            except ExecutorClientError as error:
                delay_s = retries.delay_s(error, time.monotonic())
                if delay_s is None:
                    if _status.is_transport_failure(error):
                        raise unreachable(self.endpoint, error) from error
                    raise
            time.sleep(delay_s)

    def _metadata(self) -> Metadata:
        return (*self.endpoint.metadata, *current_trace())


def unreachable(endpoint: Endpoint, error: ExecutorClientError) -> UnavailableError:
    return UnavailableError(f"no daemon answers at {endpoint.address}: {error.message}", reason=error.reason)


def judged(endpoint: Endpoint, error: grpc.RpcError) -> ExecutorClientError:
    """What to raise for a gRPC error. Whoever is refused for want of a token learns where one was looked for."""
    translated = _status.translate(error)
    if isinstance(translated, AuthenticationError) and endpoint.token is None:
        return AuthenticationError(f"{translated.message} ({endpoint.why_no_token})", reason=translated.reason)
    return translated
