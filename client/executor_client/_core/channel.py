"""The common part of blocking and asyncio gRPC channels: metadata, and translation of errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from google.protobuf.message import Message

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import status
from executor_client._core.endpoint import Endpoint
from executor_client._core.quiet_grpc import grpc
from executor_client._core.tracing import Metadata, current_trace
from executor_client.errors import AuthenticationError, ExecutorClientError, UnavailableError

EventsRequest = (
    pb.ExecuteRequest
    | pb.AttachExecutionRequest
    | pb.StartProcessRequest
    | pb.AttachProcessRequest
    | pb.WatchFilesRequest
)
"""A request that a stream of numbered events answers."""


_ADMIN_FILE = admin_pb.DESCRIPTOR


class ChannelBase(ABC):
    """The derived class opens the gRPC channel and closes it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._is_closed = False

    @property
    @abstractmethod
    def stub(self) -> Any:
        """gRPC's stub of the service."""

    @property
    @abstractmethod
    def admin_stub(self) -> Any:
        """gRPC's stub of the AdminService, made on first use."""

    def is_closed(self) -> bool:
        return self._is_closed

    def shut(self) -> None:
        """Refuses later calls."""
        self._is_closed = True

    @abstractmethod
    def check_caller(self) -> None:
        """Raises ConfigurationError if the channel can't be used here."""

    def metadata(self) -> Metadata:
        """The metadata of a call: the credentials, and the caller's trace."""
        self.check_caller()
        return (*self.endpoint.metadata, *current_trace())

    def method(self, request: Message) -> Any:
        """Returns the stub's method for a request: an RPC and its request have the same name."""
        stub = self.admin_stub if request.DESCRIPTOR.file is _ADMIN_FILE else self.stub
        return getattr(stub, type(request).__name__.removesuffix("Request"))

    def start_events(self, request: EventsRequest, trace: Metadata, timeout_s: float | None) -> Any:
        """Starts a gRPC stream of the events of an execution or a process, as a part of `trace`."""
        self.check_caller()
        with self.translating():
            return self.method(request)(request, timeout=timeout_s, metadata=(*self.endpoint.metadata, *trace))

    @contextmanager
    def translating(self, *, of_stream: bool = False) -> Iterator[None]:
        """Translates gRPC's errors around a use of the channel, including those of a channel that we closed.

        `of_stream`: a stream of answers is read, so any end that gRPC made is a lost connection, whatever its code: a
        proxy resets streams with INTERNAL. gRPC's error stays as the `__context__`.
        """
        if self.is_closed():
            raise closed()
        try:
            yield
        except grpc.RpcError as error:
            if self.is_closed():
                raise closed() from None
            translated = self._translated(error)
            if of_stream and not isinstance(translated, UnavailableError) and status.breaks_stream(error):
                raise UnavailableError(f"the stream broke off: {translated.message}") from None
            raise translated from None
        except (ValueError, grpc.aio.UsageError):
            if self.is_closed():
                raise closed() from None
            raise

    def uploading(self) -> AbstractContextManager[None]:
        """Translates errors that only a stream of requests can have, around an upload."""
        return nullcontext()

    def _translated(self, error: grpc.RpcError) -> ExecutorClientError:
        """Returns the error to raise for a gRPC error.

        For a rejected caller, it names the credentials that were sent and those to send, because the daemon gives an
        unknown caller no details.
        """
        translated = status.translate(error)
        if isinstance(translated, AuthenticationError):
            return AuthenticationError(self.endpoint.why_refused, reason=translated.reason)
        return translated


def closed() -> UnavailableError:
    return UnavailableError("this client was closed", reason="CLIENT_CLOSED")
