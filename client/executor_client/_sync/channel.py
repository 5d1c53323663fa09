"""The blocking client's gRPC channel, and the events of an execution read from it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from executor_client._core.channel import ChannelBase, EventsRequest
from executor_client._core.endpoint import Endpoint
from executor_client._core.quiet_grpc import ChannelOptions, admin_service_pb2_grpc, executor_service_pb2_grpc, grpc
from executor_client._core.tracing import Metadata


class Channel(ChannelBase):
    """Thread-safe."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        credentials = endpoint.credentials()
        # The requesting thread also reads the stream: one thread switch less for each event.
        options = [*endpoint.options, (ChannelOptions.SingleThreadedUnaryStream, 1)]
        self._channel = (
            grpc.insecure_channel(endpoint.address, options)
            if credentials is None
            else grpc.secure_channel(endpoint.address, credentials, options)
        )
        self._stub = executor_service_pb2_grpc.ExecutorServiceStub(self._channel)

    @property
    def stub(self) -> Any:
        return self._stub

    @functools.cached_property
    def admin_stub(self) -> Any:
        return admin_service_pb2_grpc.AdminServiceStub(self._channel)

    calling = ChannelBase.translating

    def check_caller(self) -> None:
        """Does nothing: every thread may use it."""

    def events(self, request: EventsRequest, trace: Metadata, timeout_s: float | None = None) -> EventStream:
        """Starts a stream of events. Its reader gets gRPC's errors, which `Followed` handles."""
        return EventStream(self.start_events(request, trace, timeout_s))

    def close(self) -> None:
        self._channel.close()


class EventStream:
    """The events of one execution, from one gRPC stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)

    def cancel(self) -> None:
        """Ends the stream early. Idempotent."""
        self._stream.cancel()

    def finish(self) -> None:
        """Reads messages after the result: gRPC keeps the memory and the connection of a stream that is not drained."""
        self.read_to_end()

    def read_to_end(self) -> None:
        """Waits for any end of the stream."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self._stream:
                pass
