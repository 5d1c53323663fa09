"""The client's state of a stream of numbered events, and how to continue after it ends early. No I/O.

An execution or a process belongs to the daemon and continues when a stream breaks. So after a lost connection the
client requests the events after its last one, until there is a result or `reconnect_timeout_s` is over.
"""

from __future__ import annotations

from executor_client._core import status
from executor_client._core.assembler import EventGap
from executor_client._core.limits import REATTACH_FOR_GAPS_MAX
from executor_client._core.quiet_grpc import grpc
from executor_client._core.retry import Retries, trouble
from executor_client._core.tracing import Metadata
from executor_client._core.waiting import Waits
from executor_client.errors import ConnectionLost, DaemonError, ExecutorClientError, UnavailableError


class Followed:
    """Decides what follows the end of a stream. `what` names its subject in errors: "execution 1f2e"."""

    def __init__(
        self, what: str, execution_id: str, retries: Retries, trace: Metadata, waits: Waits, address: str
    ) -> None:
        # The daemon refused it, so there is nothing to cancel.
        self.refused = False
        # A stream ended because the daemon went away.
        self.was_away = False
        self.trace = trace
        self.waits = waits
        self._what = what
        self._id = execution_id
        self._address = address
        self._retries = retries
        self._gaps = 0

    def interrupted(self, cause: grpc.RpcError | EventGap | None, now_s: float) -> float:
        """Returns the seconds to wait before the next stream, after one has ended without the result.

        `cause` is None for a stream that ended without an error. Raises the error for the caller when another stream
        cannot help.
        """
        if isinstance(cause, EventGap):
            self._gaps += 1
            if self._gaps > REATTACH_FOR_GAPS_MAX:
                raise cause
            return 0.0
        error = None if cause is None else status.translate(cause)
        if cause is not None and error is not None and not status.breaks_stream(cause):
            delay_s = self._retries.delay_s(error, now_s)
            if delay_s is not None:
                self._waits_out(error)
                return delay_s
            self.refused = bool(error.reason) and not isinstance(error, DaemonError)
            raise error from None
        delay_s = self._retries.away_delay_s(error, now_s)
        if delay_s is None:
            why = error.message if error is not None else "its streams end without a result"
            raise ConnectionLost(
                f"the daemon went away during {self._what} and did not come back in time: {why}",
                execution_id=self._id,
                reason=error.reason if error is not None else "",
            ) from None
        # The connection broke, whatever gRPC calls it.
        self.was_away = True
        self._waits_out(error if isinstance(error, UnavailableError) else UnavailableError("the stream broke off"))
        return delay_s

    def _waits_out(self, error: ExecutorClientError) -> None:
        awaited, reason = trouble(error, self._address)
        gives_up_after_s = self._retries.timeout_s(awaited.kind)
        self.waits.begin("trouble", awaited, reason=reason, gives_up_after_s=gives_up_after_s)
