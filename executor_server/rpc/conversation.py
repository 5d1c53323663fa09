"""One stream of Converse: messages of a client about the executions of a session, and their events.

Each message has a task of its own, which reads it, leaves the reading of the next one to another task, and serves it as
the call that it stands for (messages.py). So a cancel overtakes executions, what one message waits for holds up no
other, and serving begins in the turn of the event loop in which the message has come.

Nothing piles up here. An execution's task holds one batch of events, and takes the next from the journal when that has
been written: a client that does not read is a slow reader of the journal, which holds the guest back. Messages are
bounded by kind, and by their bytes until they are admitted. Every message is admitted first, also one that is to be
refused, so nothing passes the rate; of such a message nothing but its number is kept. After each refusal, the
handler's too, the reader pauses. It also waits while too many other messages are being served: a flood is read no
faster than it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.core import ExecutorError, InvalidRequest, Reason, ResourceExhausted
from executor_server.rpc import checks
from executor_server.rpc.auth import FIRST_MESSAGE_TIME_S, Caller
from executor_server.rpc.errors import PassedOn, checked, refuse
from executor_server.rpc.handlers import CONVERSE, Behaviour, Context
from executor_server.rpc.messages import METHODS, MessageContext

MAX_FOLLOWED = 32
"""Executions that one stream follows at a time."""
MAX_BESIDE = 32
"""Other messages of one stream that are being served at a time."""
MAX_UNADMITTED_BYTES = 256 << 10
"""Bytes of one stream's messages that wait for their admission; while there are more, no further one is read."""
REFUSAL_PAUSE_S = 0.1
"""Seconds for which no message is read after a refusal; those of several refusals add up."""
DONE_DELAY_S = 0.02
"""Seconds within which messages that were carried out are reported, unless a response leaves sooner."""
MAX_DONE = 64
"""Messages that were carried out and are not reported yet; then their tasks wait for room in the stream."""
END_GRACE_S = 5.0
"""Seconds for the last events of a stream whose session has ended to reach the client."""

Begin: TypeAlias = "Callable[[Conversation], None]"

_FOLLOWING = frozenset({"execute", "attach"})


@dataclass
class _Taken:
    """A message that was read. One that has a problem is no more than its number and its kind."""

    message_id: int
    kind: str | None
    problem: ExecutorError | None
    request: Any = None
    size_bytes: int = 0

    def trace(self) -> tuple[tuple[str, str], ...]:
        if self.request is None or not self.request.traceparent:
            return ()
        trace = (("traceparent", self.request.traceparent), ("tracestate", self.request.tracestate))
        return tuple(each for each in trace if each[1])

    def give(self) -> Any:
        """Returns the message, and keeps it no longer."""
        request, self.request = self.request, None
        return request


class Conversation:
    """Serves one stream. Its owner may end it."""

    def __init__(self, context: Context, calls: Mapping[str, Behaviour], caller: Caller) -> None:
        """`calls`: the behaviours of its messages, by method (`messages.current_calls`)."""
        self.session_id = ""
        self.quiet_since_s: float | None = time.monotonic()
        """The monotonic time at which it carried out its last message; None while it carries one out."""
        self._context = context
        self._calls = calls
        self._caller = caller
        self._last_id = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._followed = self._beside = self._used = self._unadmitted_bytes = 0
        self._reads_at_s = 0.0  # when the pauses after refusals are over
        self._room = asyncio.Event()
        self._writing = asyncio.Lock()
        self._done: list[int] = []
        self._done_timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader: asyncio.Task[None] | None = None  # the task of the next message
        self._ending: Exception | None = None

    async def serve(self, requests: AsyncIterator[Any], begin: Begin) -> None:
        """Serves the stream to its end. Calls `begin` when the session is known, which may raise."""
        self._reader = self._spawn(self._serve_next(requests, begin))
        try:
            await self._ended
            with contextlib.suppress(TimeoutError):  # a client that does not read learns no more
                async with asyncio.timeout(END_GRACE_S):
                    await self._send_done()
        finally:
            if self._done_timer is not None:
                self._done_timer.cancel()
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def end(self, error: Exception | None = None) -> None:
        """Reads no further message, and ends the stream when what it follows has ended, with the status of `error`."""
        assert self._reader is not None
        self._reader.cancel()
        self._ending = self._ending or error
        if self._tasks - {self._reader}:
            asyncio.get_running_loop().call_later(END_GRACE_S, self._finish, self._ending)
        else:
            self._finish(self._ending)

    # -- reading -------------------------------------------------------------------------------------------------

    async def _serve_next(self, requests: AsyncIterator[Any], begin: Begin | None) -> None:
        """Reads a message and serves it, while another task waits for the one after it. `begin`: it is the first."""
        while self._unadmitted_bytes > MAX_UNADMITTED_BYTES:
            await self._wait_for_room()
        if (pause_s := self._reads_at_s - time.monotonic()) > 0:
            await asyncio.sleep(pause_s)
        request = await anext(requests, None) if begin is None else await _first(requests)
        if request is None:
            return
        taken = self._taken(request, begin)
        del request  # only what serves a message may keep it
        follows = taken.kind in _FOLLOWING and taken.problem is None
        while not follows and self._beside >= MAX_BESIDE:
            await self._wait_for_room()
        self._begin(taken, follows=follows)
        self._reader = self._spawn(self._serve_next(requests, None))
        try:
            await self._serve(taken, follows=follows)
        finally:
            if follows:
                self._followed -= 1
            else:
                self._beside -= 1
                self._room.set()

    def _taken(self, request: Any, begin: Begin | None) -> _Taken:
        """Looks at a message. Raises InvalidRequest for one that can't be answered by its number."""
        problem: ExecutorError | None = None
        try:
            checked(request)
        except InvalidRequest as refusal:
            if not isinstance(request, service_pb.ConverseRequest):
                raise
            problem = refusal
        if request.message_id <= self._last_id:
            raise _invalid("message_id must rise from message to message, from above 0")
        self._last_id = request.message_id
        kind = request.WhichOneof("message")
        message = getattr(request, kind) if kind is not None else None
        if begin is not None:
            if message is None:  # without a session, nothing in the stream could be served, and nothing would end it
                raise _invalid("the first message names no session, or is one that this daemon does not know")
            self.session_id = message.session_id
            begin(self)
        if message is None:
            problem = problem or checks.invalid("message", "is missing, or one that this daemon does not know")
        elif message.session_id != self.session_id:
            problem = problem or checks.invalid("session_id", "is not that of the stream's first message")
        if problem is None and kind in _FOLLOWING and self._followed >= MAX_FOLLOWED:
            text = f"{MAX_FOLLOWED} executions are followed in this stream already"
            problem = ResourceExhausted(Reason.QUEUE_FULL, text, retry_after_s=1.0)
        if problem is not None:
            return _Taken(request.message_id, kind, problem)
        return _Taken(request.message_id, kind, None, request, request.ByteSize())

    def _begin(self, taken: _Taken, *, follows: bool) -> None:
        if follows:
            self._followed += 1
        else:
            self._beside += 1
        self._unadmitted_bytes += taken.size_bytes
        self._used += 1
        self.quiet_since_s = None

    async def _wait_for_room(self) -> None:
        self._room.clear()
        await self._room.wait()

    # -- serving -------------------------------------------------------------------------------------------------

    async def _serve(self, taken: _Taken, *, follows: bool) -> None:
        try:
            refusal = await self._carry_out(taken)
        finally:
            # The stream is not in use for an answer that its client does not read.
            self._used -= 1
            if not self._used:
                self.quiet_since_s = time.monotonic()
        if refusal is not None:
            self._reads_at_s = max(self._reads_at_s, time.monotonic()) + REFUSAL_PAUSE_S
            await self._send_refusal(taken.message_id, *refusal)
        elif not follows:
            await self._note_done(taken.message_id)

    async def _carry_out(self, taken: _Taken) -> tuple[grpc.StatusCode, bytes] | None:
        """Returns code and serialized status of a refusal, when nothing holds the message any more."""
        message_id = taken.message_id

        async def send(events: Sequence[pb.Event]) -> None:
            await self._send(service_pb.ConverseResponse(message_id=message_id, events=events))

        context: Any = MessageContext(self._context, taken.trace(), send)
        method = METHODS.get(taken.kind or "", CONVERSE)
        try:
            try:
                await self._caller.admit(method)
            except ExecutorError as denial:
                await refuse(context, denial)
            finally:
                request = taken.give()
                self._unadmitted_bytes -= taken.size_bytes
                self._room.set()
            if taken.problem is not None:
                self._caller.note_refused(method, taken.problem)
                await refuse(context, taken.problem)
            await self._calls[method](getattr(request, taken.kind or ""), context)
        except grpc.aio.AbortError:
            return context.code(), context.details
        return None

    async def _send_refusal(self, message_id: int, code: grpc.StatusCode, details: bytes) -> None:
        refusal = service_pb.Refusal.FromString(details)  # the same form as a google.rpc.Status
        if code is grpc.StatusCode.NOT_FOUND and _reason_of(details) == Reason.SESSION_NOT_FOUND.value:
            # A stream belongs to its session: without one there is no stream either.
            self._finish(PassedOn(code, refusal.message, details))
            return
        await self._send(service_pb.ConverseResponse(message_id=message_id, refusal=refusal))

    # -- writing -------------------------------------------------------------------------------------------------

    async def _send(self, response: service_pb.ConverseResponse) -> None:
        """Returns when the transport has room for it. Messages that were carried out are reported along with it."""
        async with self._writing:
            if self._done:
                response.done.extend(self._done)
                self._done.clear()
            await self._context.write(response)

    async def _note_done(self, message_id: int) -> None:
        self._done.append(message_id)
        if len(self._done) >= MAX_DONE:
            await self._send_done()
        elif self._done_timer is None:
            loop = asyncio.get_running_loop()
            self._done_timer = loop.call_later(DONE_DELAY_S, self._report_done)

    def _report_done(self) -> None:
        self._done_timer = None
        if self._done:
            _ = self._spawn(self._send_done())

    async def _send_done(self) -> None:
        async with self._writing:
            if self._done:  # else a response that left meanwhile has reported them
                response = service_pb.ConverseResponse(done=self._done)
                self._done.clear()
                await self._context.write(response)

    # -- the end -------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if task is not self._reader:
                self._finish(None)  # the caller has left
        elif (error := task.exception()) is not None:
            self._finish(cast("Exception", error))
        if not self._tasks and self._reader is not None and self._reader.done():
            self._finish(self._ending)  # the client has sent all, or no further message is read

    def _finish(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


async def _first(requests: AsyncIterator[Any]) -> Any:
    """Returns the first message. Raises InvalidRequest when there is none in time."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIME_S):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise _invalid(f"the first message was not whole within {FIRST_MESSAGE_TIME_S:g} s") from error
    if first is None:
        raise _invalid("the stream has no message")
    return first


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(Reason.INVALID_FIELD, problem)


def _reason_of(details: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            detail.Unpack(info)
    except DecodeError:
        return ""
    return cast("str", info.reason)
