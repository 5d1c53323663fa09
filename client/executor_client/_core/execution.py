"""The client's state of one execution: which request comes next, and how to continue after a stream ends early. No I/O.

The execution belongs to the daemon, and continues there when a stream breaks. So after a lost connection the client
asks for the events after its last one, until there is a result or `reconnect_timeout_s` is over. Before the first event
it is unknown whether the request arrived. The request is then repeated with the same id, which runs nothing twice. The
same is done when the daemon has no capacity and names a time to retry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import status
from executor_client._core.assembler import Assembler, EventGap, ToolRequest
from executor_client._core.limits import REATTACH_FOR_GAPS_MAX, TOOL_NAME_SHOWN_MAX
from executor_client._core.quiet_grpc import grpc
from executor_client._core.retry import Retries, trouble
from executor_client._core.tracing import Metadata
from executor_client._core.waiting import Awaited, Waits
from executor_client.errors import ConnectionLost, DaemonError, ExecutorClientError, UnavailableError
from executor_client.events import ExecutionEvent, QueuedEvent
from executor_client.waits import WaitKind


class Execution:
    """Takes the messages of the stream that `opening()` asks for; `interrupted()` decides what follows its end."""

    def __init__(
        self, request: pb.ExecuteRequest, retries: Retries, trace: Metadata, waits: Waits, address: str
    ) -> None:
        self.assembler = Assembler(request.execution_id)
        # The daemon has refused it, so there is nothing to cancel.
        self.refused = False
        # The last stream ended because the daemon was not there any more; one of them did.
        self.is_away = self.was_away = False
        self.trace = trace
        self.waits = waits
        self._address = address
        self._request = request
        self._retries = retries
        self._gaps = 0
        self._redirects = 0

    @property
    def session_id(self) -> str:
        return self._request.session_id

    @property
    def execution_id(self) -> str:
        return self._request.execution_id

    @property
    def may_have_begun(self) -> bool:
        """True when an event has come, or when it is unknown whether a request has arrived."""
        return self.was_away or self.assembler.last_number > 0

    def opening(self) -> pb.ExecuteRequest | pb.AttachExecutionRequest:
        """Returns the request whose stream brings the missing events."""
        # A stream that is open and silent is no trouble, but does not prove that the trouble is over.
        self.waits.hold("trouble")
        self.refused = False
        return self._request if self.assembler.last_number == 0 else self.attachment()

    def attachment(self) -> pb.AttachExecutionRequest:
        return pb.AttachExecutionRequest(
            session_id=self.session_id, execution_id=self.execution_id, after_event=self.assembler.last_number
        )

    def cancellation(self) -> pb.CancelExecutionRequest:
        return pb.CancelExecutionRequest(session_id=self.session_id, execution_id=self.execution_id)

    def feed(self, message: pb.ExecuteResponse | pb.AttachExecutionResponse) -> ExecutionEvent | ToolRequest | None:
        """Takes a message. Raises ProtocolError; an EventGap can be given to `interrupted`."""
        fed = self.assembler.feed(message.event)
        self._retries.heard()
        self.waits.over("trouble", "turn")
        if isinstance(fed, QueuedEvent) and fed.ahead:
            # No event says that its turn has come, until the program prints or ends.
            behind = f"an execution that began behind {fed.ahead} other{'s' if fed.ahead > 1 else ''} of its session"
            self.waits.begin("turn", Awaited(WaitKind.TURN, behind))
        return fed

    @contextmanager
    def running(self, request: ToolRequest) -> Iterator[None]:
        """Notes the wait while a host tool runs: the program waits for it, and the caller for the program."""
        key = f"tool {request.event.call_id}"
        self.waits.begin(key, Awaited(WaitKind.TOOL, f"the tool {request.event.name[:TOOL_NAME_SHOWN_MAX]!r}"))
        try:
            yield
        finally:
            self.waits.over(key)

    def interrupted(self, cause: grpc.RpcError | EventGap | None, now_s: float) -> float:
        """Returns the seconds to wait before the next stream, after one has ended without the result.

        `cause` is None for a stream that ended without an error. Raises the error for the caller when another stream
        cannot help.
        """
        self.is_away = False
        if isinstance(cause, EventGap):
            self._gaps += 1
            if self._gaps > REATTACH_FOR_GAPS_MAX:
                raise cause
            return 0.0
        error = None if cause is None else status.translate(cause)
        if cause is not None and error is not None and not status.breaks_stream(cause):
            delay_s = self._retries.retry_after_delay_s(error, now_s)
            if delay_s is not None:
                self._waits_out(error)
                return delay_s
            self.refused = bool(error.reason) and not isinstance(error, DaemonError)
            raise error from cause
        delay_s = self._retries.away_delay_s(now_s)
        if delay_s is None:
            why = error.message if error is not None else "streams end without a result"
            raise ConnectionLost(
                f"the daemon was lost in execution {self.execution_id}, and did not come back in time: {why}",
                execution_id=self.execution_id,
                reason=error.reason if error is not None else "",
            ) from cause
        # The connection broke, whatever gRPC calls it.
        self.is_away = self.was_away = True
        self._waits_out(error if isinstance(error, UnavailableError) else UnavailableError("the stream broke off"))
        return delay_s

    def redirected(self) -> int:
        """Counts the redirects: another daemon has the session, where the execution is asked for next."""
        self._redirects += 1
        return self._redirects

    def _waits_out(self, error: ExecutorClientError) -> None:
        awaited, reason = trouble(error, self._address)
        gives_up_after_s = self._retries.timeout_s(awaited.kind)
        self.waits.begin("trouble", awaited, reason=reason, gives_up_after_s=gives_up_after_s)
