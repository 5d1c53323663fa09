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

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import _probe, _status
from executor_client._endpoint import Endpoint
from executor_client._execution import Execution
from executor_client._limits import CONNECT_TIMEOUT_S
from executor_client._quiet_grpc import grpc
from executor_client._retry import Retries, trouble
from executor_client._tracing import Metadata, current_trace
from executor_client._watch import NO_WATCH, Awaited, Bell, Watch
from executor_client.errors import AuthenticationError, ExecutorClientError, UnavailableError
from executor_client.waits import WaitKind


@dataclass(frozen=True)
class Timeouts:
    """How long to wait: for a daemon never heard of (None: not at all where none can be there), for one call, for one
    that went away, for one that is busy, and for one that fetches an image."""

    connect_s: float | None
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
        self.answered = False
        self._listened: bool | None = None  # whether a daemon did, before the first call; None: not looked yet
        self._looked = False  # for why a daemon never heard of does not answer

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
        connect_s = CONNECT_TIMEOUT_S if self.timeouts.connect_s is None else self.timeouts.connect_s
        away_s = self.timeouts.reconnect_s if self.answered else connect_s
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

    def _look_first(self) -> None:
        """Notes whether a daemon listens before the first call. One that does, and is gone when that call fails, was
        killed meanwhile: it is waited for, as its session goes on with the next one."""
        if self._listened is None and self.timeouts.connect_s is None:
            self._listened = _probe.listens(self.endpoint)

    def _looks_at_once(self, error: ExecutorClientError) -> bool:
        """True when to find out why nobody answers before waiting for it to pass: once, where no wait was asked for."""
        at_once = not (self.answered or self._looked) and self.timeouts.connect_s is None and is_unreached(error)
        if at_once and self._listened and not _probe.listens(self.endpoint):
            return False
        self._looked = self._looked or at_once
        return at_once

    def _nobody(self, error: ExecutorClientError, cause: str | None) -> UnavailableError:
        """Return the error to raise when a call is given up. `cause` is what was found out, if anything was."""
        return UnavailableError(
            f"no daemon answers at {self.endpoint.address}: {cause or error.message}", reason=error.reason
        )

    def _delay_s(self, retries: Retries, error: ExecutorClientError, watch: Watch) -> float | None:
        """How long to wait before a call that failed like this is made again; None when nobody answers for too long.

        Raises every other failure when it is not.
        """
        delay_s = retries.delay_s(error, time.monotonic())
        if delay_s is not None:
            awaited, reason = trouble(error, self.endpoint.address)
            watch.over("answer")
            watch.begin("trouble", awaited, reason=reason, gives_up_after_s=retries.timeout_s(awaited.kind))
            return delay_s
        if _status.is_transport_failure(error):
            return None
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
        """Return the error to raise for a gRPC error. A refused caller learns what it has shown, and what to show
        instead: the daemon tells strangers nothing but that they are."""
        translated = _status.translate(error)
        if isinstance(translated, AuthenticationError):
            return AuthenticationError(self.endpoint.why_refused, reason=translated.reason)
        return translated


def is_unreached(error: ExecutorClientError) -> bool:
    """True when no daemon has said anything: nobody knows the reason but gRPC."""
    return _status.is_transport_failure(error) and not error.reason


def closed() -> UnavailableError:
    return UnavailableError("this client was closed", reason="CLIENT_CLOSED")
