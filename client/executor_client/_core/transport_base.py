"""The decisions of a transport, shared by both clients: which timeout applies, whether to retry, which error to raise.

Every RPC of the service may be repeated (see its comment in the proto). So every call is repeated while the daemon
can't be reached, and while it is busy and names a time to retry. Each of these waits has a limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import status
from executor_client._core.channel import ChannelBase
from executor_client._core.execution import Execution
from executor_client._core.limits import CONNECT_TIMEOUT_S
from executor_client._core.process import FollowedProcess
from executor_client._core.retry import Retries, trouble
from executor_client._core.tracing import Metadata
from executor_client._core.waiting import NO_WAITS, Awaited, Waits, WaitTimer
from executor_client.errors import ExecutorClientError, UnavailableError
from executor_client.waits import WaitKind


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait: for a daemon that has never answered (None: the default, or 0 if there can't be one), for one
    call, for a daemon that stopped answering, for a busy daemon, and for one that fetches an image."""

    connect_s: float | None
    call_s: float
    reconnect_s: float
    busy_s: float
    image_s: float


class TransportBase:
    """The derived class owns the channel and makes the calls. Without a timer no wait is reported."""

    def __init__(self, channel: ChannelBase, timeouts: Timeouts, timer: WaitTimer | None) -> None:
        self.endpoint = channel.endpoint
        self.timeouts = timeouts
        self.answered = False
        self._timer = timer
        self._listened = False  # a daemon listened before the first call
        self._probed = False  # the client has already diagnosed why no daemon answers

    def waits(self) -> Waits:
        """Returns the record of one call's waits."""
        return NO_WAITS if self._timer is None else Waits(self._timer)

    def execution(self, request: pb.ExecuteRequest, trace: Metadata, waits: Waits) -> Execution:
        """Returns the client's state of an execution. Its daemon has answered before: it created the session."""
        retries = Retries(away_timeout_s=self.timeouts.reconnect_s, busy_timeout_s=self.timeouts.busy_s)
        return Execution(request, retries, trace, waits, self.endpoint.address)

    def process(
        self, session_id: str, process_id: str, request: pb.StartProcessRequest | None, trace: Metadata, waits: Waits
    ) -> FollowedProcess:
        """Returns the client's state of a process: to be started by `request`, or already started."""
        retries = Retries(away_timeout_s=self.timeouts.reconnect_s, busy_timeout_s=self.timeouts.busy_s)
        return FollowedProcess(session_id, process_id, request, retries, trace, waits, self.endpoint.address)

    def _call_retries(self, within_s: float) -> Retries:
        """Returns the retries of one call."""
        return Retries(
            away_timeout_s=min(within_s, self._away_timeout_s),
            busy_timeout_s=min(within_s, self.timeouts.busy_s),
            image_timeout_s=min(within_s, self.timeouts.image_s),
        )

    @property
    def _away_timeout_s(self) -> float:
        """A daemon that has answered before gets more time than one that has not."""
        return self.timeouts.reconnect_s if self.answered else self.connect_timeout_s

    @property
    def connect_timeout_s(self) -> float:
        return CONNECT_TIMEOUT_S if self.timeouts.connect_s is None else self.timeouts.connect_s

    @property
    def answer(self) -> Awaited:
        return Awaited(WaitKind.DAEMON, f"an answer from the daemon at {self.endpoint.address}")

    def _begin_attempt(self, waits: Waits, awaited: Awaited | None) -> None:
        """Pauses the report of trouble: only the end of this attempt shows whether it is over."""
        waits.hold("trouble")
        if awaited is not None:
            waits.begin("answer", awaited, gives_up_after_s=self.timeouts.call_s)

    def _may_have_been_killed(self, error: ExecutorClientError) -> bool:
        """True if the first call failed although a daemon was listening before it."""
        return self._listened and not self.answered and is_unreached(error)

    def _diagnoses_now(self, error: ExecutorClientError) -> bool:
        """True if the reason is diagnosed before waiting: once, if the caller set no connect timeout."""
        now = not (self.answered or self._probed) and self.timeouts.connect_s is None and is_unreached(error)
        self._probed = self._probed or now
        return now

    def _unanswered(self, error: ExecutorClientError, cause: str | None) -> UnavailableError:
        """Returns the error for a call that is given up. `cause` is the diagnosis, if there is one."""
        if error.reason:
            message = f"the daemon at {self.endpoint.address} can't serve this call now: {error.message}"
            return UnavailableError(f"{message}; retry later, or use another daemon", reason=error.reason)
        return UnavailableError(
            f"no daemon answers at {self.endpoint.address}: {cause or error.message}", reason=error.reason
        )

    def _delay_s(self, retries: Retries, error: ExecutorClientError, waits: Waits) -> float | None:
        """Returns the seconds until the next attempt; None if the daemon was unreachable for too long.

        Raises errors that a retry can't help, and others after their timeout.
        """
        delay_s = retries.delay_s(error, time.monotonic())
        if delay_s is not None:
            awaited, reason = trouble(error, self.endpoint.address)
            waits.over("answer")
            waits.begin("trouble", awaited, reason=reason, gives_up_after_s=retries.timeout_s(awaited.kind))
            return delay_s
        if status.is_transport_failure(error):
            return None
        raise error

    def _end_reports(self) -> None:
        """Ends the reports of waits."""
        if self._timer is not None:
            self._timer.close()


def is_unreached(error: ExecutorClientError) -> bool:
    """True if no daemon answered, so only gRPC knows the reason."""
    return status.is_transport_failure(error) and not error.reason
