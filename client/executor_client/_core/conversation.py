"""The client's side of one Converse stream: which message each response answers. No I/O; both clients share it.

A stream carries several executions at a time, so its reader reads for all, and leaves each its events in an `Inbox`. An
answer to a tool call is unconfirmed until the daemon has reported it done. When it is refused, or the stream ends
before, it is given again by a plain call, whose refusal says what is to be done.

Nothing here survives the stream: an execution that has no result by then is attached to, in another stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client._core import status
from executor_client._core.limits import INBOX_BYTES_MAX
from executor_client._core.quiet_grpc import grpc
from executor_client._core.tracing import Metadata

_CODES = {code.value[0]: code for code in grpc.StatusCode}

FollowRequest = pb.ExecuteRequest | pb.AttachExecutionRequest


class UseAnotherStream(Exception):
    """This stream says no more of the execution: what comes next, is asked for in another one.

    With `plain`, by a plain call: no stream of Converse is to be had, or the execution has more events than its caller
    takes while others wait for theirs.
    """

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.plain = plain


class Ended(grpc.RpcError):
    """A status that is no exception of gRPC's: of one message, or of a stream that we have read ourselves."""

    def __init__(self, code: int, details: str, trailing_metadata: object) -> None:
        super().__init__(details)
        self._code = _CODES.get(code, grpc.StatusCode.UNKNOWN)
        self._details = details
        self._trailing_metadata = trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing_metadata


def refused(refusal: pb.Refusal) -> Ended:
    """Returns the status of a refused message, as that of the call that it stands for."""
    metadata = ((status.STATUS_DETAILS_KEY, refusal.SerializeToString()),)
    return Ended(refusal.code, refusal.message, metadata)


class Inbox:
    """The events of one message that have come, and how they end."""

    def __init__(self, message_id: int, *, first: bool) -> None:
        self.message_id = message_id
        self.events: deque[types_pb2.Event] = deque()
        self.is_over = False
        self._end: Exception | None = None
        self._is_first = first  # the first of its stream: that was opened for it
        self._is_answered = False
        self._size = 0

    @property
    def is_full(self) -> bool:
        return self._size > INBOX_BYTES_MAX

    def overflow(self) -> None:
        """Gives up a full inbox; its events are still taken."""
        self.close(UseAnotherStream(plain=True))

    @property
    def has_news(self) -> bool:
        return bool(self.events) or self.is_over

    def put(self, response: pb.ConverseResponse) -> None:
        self._is_answered = True
        if response.HasField("refusal"):
            self.close(refused(response.refusal))
        elif not self.is_over:
            self.events.extend(response.events)
            self._size += response.ByteSize()

    def take(self) -> types_pb2.Event:
        """Returns the next event; to be called where there is one."""
        event = self.events.popleft()
        if not self.events:
            self._size = 0
        return event

    def take_end(self) -> Exception | None:
        """Returns what to raise when the events have been taken, the first time; None for an end without an error.

        It is not kept: its traceback will hold the frames of those who have this inbox, and so their session.
        """
        end, self._end = self._end, None
        return end

    def close(self, end: Exception | None) -> None:
        """Notes that nothing follows, the first time."""
        if not self.is_over:
            self.is_over, self._end = True, end

    def close_with_stream(self, end: grpc.RpcError | None) -> None:
        """Notes the end of the stream: an error for the execution, unless another stream helps."""
        if self._is_answered:
            self.close(end)
        elif end is not None and is_no_stream(end):
            self.close(UseAnotherStream(plain=True))
        elif end is None and not self._is_first:
            self.close(UseAnotherStream(plain=False))  # the daemon ended an unused stream, and did not read the message
        else:
            self.close(end)


def is_no_stream(end: grpc.RpcError) -> bool:
    """True for the status of a stream that was refused itself, where plain calls are served.

    grpc.aio loses a refusal that comes while a message is written, and reports an INTERNAL of its own: a plain call
    learns why.
    """
    if end.code() is grpc.StatusCode.INTERNAL:
        return not status.translate(end).reason
    if end.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return status.translate(end).reason == "QUEUE_FULL"
    return end.code() is grpc.StatusCode.UNIMPLEMENTED


class Dialogue:
    """Numbers the messages of one stream, and gives each response to the one that it answers."""

    def __init__(self) -> None:
        self.inboxes: dict[int, Inbox] = {}
        self._last_id = 0
        self._unconfirmed: dict[int, tuple[Inbox, Callable[[], None]]] = {}
        self._lost: list[Callable[[], None]] = []

    def follow(self, request: FollowRequest, trace: Metadata) -> tuple[Inbox, pb.ConverseRequest]:
        """Returns the message for a request, and the inbox for its events."""
        inbox = Inbox(self._next_id(), first=self._last_id == 1)
        self.inboxes[inbox.message_id] = inbox
        message = pb.ConverseRequest(message_id=inbox.message_id)
        if trace:
            given = dict(trace)
            message.traceparent, message.tracestate = given.get("traceparent", ""), given.get("tracestate", "")
        if isinstance(request, pb.ExecuteRequest):
            message.execute.CopyFrom(request)
        else:
            message.attach.CopyFrom(request)
        return inbox, message

    def answer(
        self, inbox: Inbox, request: pb.SubmitToolResultRequest, on_lost: Callable[[], None]
    ) -> pb.ConverseRequest:
        """Returns the message with an answer; `take_lost` returns `on_lost` when it has to be given again."""
        message_id = self._next_id()
        self._unconfirmed[message_id] = inbox, on_lost
        return pb.ConverseRequest(message_id=message_id, tool_result=request)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def take(self, response: pb.ConverseResponse) -> Inbox | None:
        """Takes a response; returns the inbox that has news, if one has."""
        for message_id in response.done:
            self._unconfirmed.pop(message_id, None)
        inbox = self.inboxes.get(response.message_id)
        if inbox is not None:
            inbox.put(response)
        elif response.message_id in self._unconfirmed:
            self._lost.append(self._unconfirmed.pop(response.message_id)[1])
        return inbox

    def take_lost(self) -> list[Callable[[], None]]:
        """Returns what is to be called now: by the caller, who must hold no lock, since it may leave this stream."""
        lost = self._lost
        if lost:
            self._lost = []
        return lost

    def leave(self, inbox: Inbox) -> None:
        """Forgets an execution: what still comes is dropped, and what was not confirmed is not given again."""
        inbox.close(None)
        self.inboxes.pop(inbox.message_id, None)
        if self._unconfirmed:
            self._unconfirmed = {key: each for key, each in self._unconfirmed.items() if each[0] is not inbox}

    def end(self, end: grpc.RpcError | None) -> None:
        """Takes the end of the stream."""
        for inbox in self.inboxes.values():
            inbox.close_with_stream(end)
        self._lost += [on_lost for _, on_lost in self._unconfirmed.values()]
        self._unconfirmed = {}
