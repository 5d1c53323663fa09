"""One execution as the client sees it: which request comes next, and what to do when a stream ends early. No I/O.

The execution belongs to the daemon. When a stream breaks, it goes on there; so a lost connection is answered by asking
for the events after the last one we have, until there is a result or `reconnect_timeout_s` is over. Before the first
event nobody knows whether the request arrived: it is made again, with the same id, which runs nothing twice. So it is
when the daemon has no room for it now and says when to ask again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _status
from executor_client._assembler import Assembler, EventGap, ToolRequest
from executor_client._limits import REATTACH_FOR_GAPS_MAX, TOOL_NAME_SHOWN_MAX
from executor_client._quiet_grpc import grpc
from executor_client._retry import Retries, trouble
from executor_client._tracing import Metadata
from executor_client._watch import Awaited, Watch
from executor_client.errors import ConnectionLost, DaemonError, ExecutorClientError, UnavailableError
from executor_client.events import ExecutionEvent, QueuedEvent
from executor_client.waits import WaitKind


class Execution:
    """Feed it the messages of whatever stream `opening()` asked for; ask `interrupted()` how to go on when one ends."""

    def __init__(
        self, request: pb.ExecuteRequest, retries: Retries, trace: Metadata, watch: Watch, address: str
    ) -> None:
        self.assembler = Assembler(request.execution_id)
        # The daemon said that there is no such execution, or won't be: nothing is left to cancel.
        self.refused = False
        # Of the span in which it was begun.
        self.trace = trace
        self.watch = watch
        self._address = address
        self._request = request
        self._retries = retries
        self._gaps = 0

    @property
    def session_id(self) -> str:
        return self._request.session_id

    @property
    def execution_id(self) -> str:
        return self._request.execution_id

    def opening(self) -> pb.ExecuteRequest | pb.AttachExecutionRequest:
        """The request whose stream gives the events that we do not have yet."""
        # A stream that is open and silent is no trouble; nor does it say that the trouble is over.
        self.watch.hold("trouble")
        return self._request if self.assembler.last_number == 0 else self.attachment()

    def attachment(self) -> pb.AttachExecutionRequest:
        return pb.AttachExecutionRequest(
            session_id=self.session_id, execution_id=self.execution_id, after_event=self.assembler.last_number
        )

    def cancellation(self) -> pb.CancelExecutionRequest:
        return pb.CancelExecutionRequest(session_id=self.session_id, execution_id=self.execution_id)

    def feed(self, message: pb.ExecuteResponse | pb.AttachExecutionResponse) -> ExecutionEvent | ToolRequest | None:
        """Takes a message in. Raises ProtocolError; an EventGap can be given to `interrupted`."""
        fed = self.assembler.feed(message.event)
        self._retries.heard()
        self.watch.over("trouble", "turn")
        if isinstance(fed, QueuedEvent) and fed.ahead:
            # When its turn comes nobody says so, until the program does something that shows.
            behind = f"an execution that began behind {fed.ahead} other{'s' if fed.ahead > 1 else ''} of its session"
            self.watch.begin("turn", Awaited(WaitKind.TURN, behind))
        return fed

    @contextmanager
    def running(self, request: ToolRequest) -> Iterator[None]:
        """While a host tool runs: the program waits for it, and with it whoever waits for the program."""
        key = f"tool {request.event.call_id}"
        self.watch.begin(key, Awaited(WaitKind.TOOL, f"the tool {request.event.name[:TOOL_NAME_SHOWN_MAX]!r}"))
        try:
            yield
        finally:
            self.watch.over(key)

    def interrupted(self, cause: grpc.RpcError | EventGap | None, now_s: float) -> float:
        """A stream ended without the result: how long to wait before the next. None is a stream that just ended.

        Raises what the caller is to be told when there is no use in another.
        """
        if isinstance(cause, EventGap):
            self._gaps += 1
            if self._gaps > REATTACH_FOR_GAPS_MAX:
                raise cause
            return 0.0
        error = None if cause is None else _status.translate(cause)
        if cause is not None and error is not None and not _status.breaks_stream(cause):
            delay_s = self._retries.told_delay_s(error, now_s)
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
        # However gRPC calls it: the way to the daemon broke.
        self._waits_out(error if isinstance(error, UnavailableError) else UnavailableError("the stream broke off"))
        return delay_s

    def _waits_out(self, error: ExecutorClientError) -> None:
        awaited, reason = trouble(error, self._address)
        gives_up_after_s = self._retries.timeout_s(awaited.kind)
        self.watch.begin("trouble", awaited, reason=reason, gives_up_after_s=gives_up_after_s)
