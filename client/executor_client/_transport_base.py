"""What the ways of both clients to the daemon have in common: how patient they are, what goes with each call, and what
its failure is called.

Every RPC of the service may be repeated (its comment in the proto says what that does), so all of them are: while the
daemon cannot be reached, and while it is busy and says when to ask again; each within a bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import _status
from executor_client._endpoint import Endpoint
from executor_client._execution import Execution
from executor_client._retry import Retries, trouble
from executor_client._tracing import Metadata, current_trace
from executor_client._watch import NO_WATCH, Awaited, Bell, Watch
from executor_client.errors import AuthenticationError, ExecutorClientError, UnavailableError
from executor_client.waits import WaitKind


@dataclass(frozen=True)
class Timeouts:
    """How long to wait: for a daemon never heard of, for one call, for one that went away, for one that is busy, and
    for one that fetches an image."""

    connect_s: float
    call_s: float
    reconnect_s: float
    busy_s: float
    image_s: float


class TransportBase:
    """Whoever derives from it owns the channel, and makes the calls.

    Without a bell nobody is told of waits.
    """

    def __init__(
        self, endpoint: Endpoint, timeouts: Timeouts, channel: grpc.Channel | grpc.aio.Channel, bell: Bell | None
    ) -> None:
        self.endpoint = endpoint
        self.timeouts = timeouts
        self._is_closed = False
        self._bell = bell
        self.stub: Any = executor_service_pb2_grpc.ExecutorServiceStub(channel)
        self._answered = False

    def watch(self) -> Watch:
        """For the waits of one call."""
        return NO_WATCH if self._bell is None else Watch(self._bell)

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
        with self._calling():
            return method(request, timeout=timeout_s, metadata=(*self.endpoint.metadata, *trace))

    def execution(self, request: pb.ExecuteRequest, trace: Metadata, watch: Watch) -> Execution:
        """An execution, whose daemon has made the session."""
        retries = Retries(away_timeout_s=self.timeouts.reconnect_s, busy_timeout_s=self.timeouts.busy_s)
        return Execution(request, retries, trace, watch, self.endpoint.address)

    def _call_retries(self, within_s: float) -> Retries:
        """Those of a call: a daemon that has answered before is given more time than one never heard of."""
        away_s = self.timeouts.reconnect_s if self._answered else self.timeouts.connect_s
        return Retries(
            away_timeout_s=min(within_s, away_s),
            busy_timeout_s=min(within_s, self.timeouts.busy_s),
            image_timeout_s=min(within_s, self.timeouts.image_s),
        )

    @property
    def _answer(self) -> Awaited:
        return Awaited(WaitKind.DAEMON, f"an answer of the daemon at {self.endpoint.address}")

    def _asks(self, watch: Watch, awaited: Awaited | None) -> None:
        """An attempt begins. What made another one fail may be over, which shows only when this one ends."""
        watch.hold("trouble")
        if awaited is not None:
            watch.begin("answer", awaited, gives_up_after_s=self.timeouts.call_s)

    def _delay_s(self, retries: Retries, error: ExecutorClientError, watch: Watch) -> float:
        """How long to wait before a call that failed like this is made again. Raises the failure when it is not."""
        delay_s = retries.delay_s(error, time.monotonic())
        if delay_s is not None:
            awaited, reason = trouble(error, self.endpoint.address)
            watch.over("answer")
            watch.begin("trouble", awaited, reason=reason, gives_up_after_s=retries.timeout_s(awaited.kind))
            return delay_s
        if _status.is_transport_failure(error):
            raise UnavailableError(
                f"no daemon answers at {self.endpoint.address}: {error.message}", reason=error.reason
            ) from error
        raise error

    def is_closed(self) -> bool:
        return self._is_closed

    def _shut(self) -> None:
        """From here on no call is begun, and nobody is told of waits."""
        self._is_closed = True
        if self._bell is not None:
            self._bell.close()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a use of the channel: turns gRPC's errors into ours, also those of a channel that we closed."""
        if self.is_closed():
            raise closed()
        try:
            yield
        except grpc.RpcError as error:
            raise (closed() if self.is_closed() else self._judged(error)) from error
        except (ValueError, grpc.aio.UsageError) as error:
            if self.is_closed():
                raise closed() from error
            raise

    def _metadata(self) -> Metadata:
        return (*self.endpoint.metadata, *current_trace())

    def _judged(self, error: grpc.RpcError) -> ExecutorClientError:
        """What to raise for a gRPC error. Whoever is refused for want of a token learns where one was looked for."""
        translated = _status.translate(error)
        if isinstance(translated, AuthenticationError) and self.endpoint.token is None:
            why = f"{translated.message} ({self.endpoint.why_no_token})"
            return AuthenticationError(why, reason=translated.reason)
        return translated


def closed() -> UnavailableError:
    return UnavailableError("this client was closed", reason="CLIENT_CLOSED")
