"""The client's state of one execution: which request comes next, and how to continue after a stream ends early. No I/O.

See followed.py for lost connections. Before the first event it is unknown whether the request arrived. It is then
repeated with the same id, so nothing runs twice. The same happens if the daemon has no capacity and names a time to
retry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.values import DEFAULT_LIMITS, OUTPUT_LIMITS
from executor_client._core.assembler import Assembler, ToolRequest
from executor_client._core.followed import Followed
from executor_client._core.limits import TOOL_NAME_SHOWN_MAX
from executor_client._core.retry import Retries
from executor_client._core.tracing import Metadata
from executor_client._core.waiting import Awaited, Waits
from executor_client.events import ExecutionEvent, QueuedEvent
from executor_client.waits import WaitKind


class Execution(Followed):
    """Takes the messages of the stream that `opening()` requests; `interrupted()` decides what follows its end."""

    def __init__(
        self, request: pb.ExecuteRequest, retries: Retries, trace: Metadata, waits: Waits, address: str
    ) -> None:
        what = f"execution {request.execution_id}"
        super().__init__(what, request.execution_id, retries, trace, waits, address)
        self.assembler = Assembler(request.execution_id, DEFAULT_LIMITS if request.whole_output else OUTPUT_LIMITS)
        self._request = request

    @property
    def session_id(self) -> str:
        return self._request.session_id

    @property
    def execution_id(self) -> str:
        return self._request.execution_id

    @property
    def may_have_begun(self) -> bool:
        """True if an event has arrived, or if it is unknown whether a request has arrived."""
        return self.was_away or self.assembler.last_number > 0

    def opening(self) -> pb.ExecuteRequest | pb.AttachExecutionRequest:
        """Returns the request whose stream brings the missing events."""
        # An open, silent stream is not trouble, but does not prove that the trouble is over.
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
        """Takes the message with an event. Raises ProtocolError; an EventGap can be given to `interrupted`."""
        fed = self.assembler.feed(message.event)
        self._retries.answered()
        self.waits.over("trouble", "turn")
        if isinstance(fed, QueuedEvent) and fed.ahead:
            # No event reports the start, until the program prints or ends.
            behind = f"an execution queued behind {fed.ahead} other{'s' if fed.ahead > 1 else ''} of its session"
            self.waits.begin("turn", Awaited(WaitKind.TURN, behind))
        return fed

    @contextmanager
    def running(self, request: ToolRequest) -> Iterator[None]:
        """Records the wait for a host tool: the program waits for it, and the caller for the program."""
        key = f"tool {request.event.call_id}"
        self.waits.begin(key, Awaited(WaitKind.TOOL, f"the tool {request.event.name[:TOOL_NAME_SHOWN_MAX]!r}"))
        try:
            yield
        finally:
            self.waits.over(key)
