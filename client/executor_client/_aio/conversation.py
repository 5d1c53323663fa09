"""The asyncio client's stream of Converse, which the tasks that follow executions of its session share.

A task of the stream reads it, and leaves each execution its events. It reads no further while the only execution that
is followed has more of them than its caller takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, cast

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client._core.conversation import Dialogue, Ended, FollowRequest, Inbox
from executor_client._core.quiet_grpc import grpc
from executor_client._core.tracing import Metadata

if TYPE_CHECKING:
    from executor_client._aio.channel import AsyncChannel

_EOF: Any = cast("Any", grpc.aio).EOF


class AsyncConversation:
    """One stream. Belongs to the event loop that runs when it is made."""

    def __init__(self, call: Any, on_over: Callable[[AsyncConversation, grpc.RpcError | None], None]) -> None:
        """`call` is the gRPC call. `on_over` is called with its status; None for OK."""
        self.is_over = False
        self._call = call
        self._on_over = on_over
        self._dialogue = Dialogue()
        self._writing = asyncio.Lock()
        self._closing = False
        self._wakeups: dict[Inbox, asyncio.Future[None]] = {}
        self._room = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def follow(self, request: FollowRequest, trace: Metadata) -> AsyncConversedEvents | None:
        """Asks for the events of an execution; None when the stream is known to have ended."""
        if self.is_over or self._closing:
            return None
        inbox, message = self._dialogue.follow(request, trace)
        self._room.set()  # a full inbox of another execution must not hold this one up
        try:
            await self._send(message)
        except BaseException:
            self.leave(inbox)
            raise
        return AsyncConversedEvents(self, inbox)

    async def answer(self, inbox: Inbox, request: pb.SubmitToolResultRequest, on_lost: Callable[[], None]) -> bool:
        """Gives the answer to a tool call; False when the execution is not followed here any more."""
        if self.is_over or inbox.is_over:
            return False
        await self._send(self._dialogue.answer(inbox, request, on_lost))
        return True

    async def _send(self, message: pb.ConverseRequest) -> None:
        async with self._writing:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reader learns of the end
                await self._call.write(message)

    async def next_event(self, inbox: Inbox) -> types_pb2.Event:
        """Waits for the next event. Raises what the events end with, StopAsyncIteration for an end without an error."""
        while not inbox.has_news:
            wakeup = self._wakeups[inbox] = asyncio.get_running_loop().create_future()
            try:
                await wakeup
            finally:
                del self._wakeups[inbox]
        if inbox.events:
            was_full = inbox.is_full
            event = inbox.take()
            if was_full and not inbox.is_full:
                self._room.set()
            return event
        raise inbox.take_end() or StopAsyncIteration

    def _wake(self, inbox: Inbox) -> None:
        wakeup = self._wakeups.get(inbox)
        if wakeup is not None and not wakeup.done():
            wakeup.set_result(None)

    async def _read(self) -> None:
        end: grpc.RpcError | None = None
        try:
            while (response := await self._call.read()) is not _EOF:
                found = self._dialogue.take(response)
                self._give_again()
                if found is not None:
                    self._wake(found)
                    if found.is_full:
                        await self._make_room(found)
        except grpc.RpcError as error:
            end = error
        except asyncio.CancelledError:
            end = Ended(grpc.StatusCode.CANCELLED.value[0], "cancelled", ())
            raise
        finally:
            self.is_over = True
            self._dialogue.end(end)
            self._give_again()
            for inbox in list(self._wakeups):
                self._wake(inbox)
            self._on_over(self, end)

    def _give_again(self) -> None:
        for on_lost in self._dialogue.take_lost():
            on_lost()

    async def _make_room(self, full: Inbox) -> None:
        """Waits for the caller of the only execution; gives a full inbox up where others would wait, too."""
        while full.is_full and not full.is_over:
            if len(self._dialogue.inboxes) > 1:
                full.overflow()
                self._wake(full)
                return
            self._room.clear()
            await self._room.wait()

    def leave(self, inbox: Inbox) -> None:
        """Ends the following of an execution."""
        self._dialogue.leave(inbox)
        self._wake(inbox)
        self._room.set()
        if self._closing and not self._dialogue.inboxes:
            self._call.cancel()

    def close(self, *, now: bool = False) -> None:
        """Ends the stream when no execution is followed any more; with `now`, at once. Idempotent."""
        self._closing = True
        if now or not self._dialogue.inboxes:
            self._call.cancel()
            self._reader.cancel()

    async def closed(self) -> None:
        """Waits for the end of the task that reads."""
        await asyncio.wait([self._reader])


class AsyncConversedEvents:
    """The events of one execution, from the stream of its session."""

    def __init__(self, conversation: AsyncConversation, inbox: Inbox) -> None:
        self._conversation = conversation
        self._inbox = inbox

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> types_pb2.Event:
        return await self._conversation.next_event(self._inbox)

    async def answer(self, request: pb.SubmitToolResultRequest, on_lost: Callable[[], None]) -> bool:
        """Gives an answer to a tool call; False when it has to be given by a plain call.

        `on_lost` is called when that turns out later.
        """
        return await self._conversation.answer(self._inbox, request, on_lost)

    def cancel(self) -> None:
        """Ends the following. Idempotent."""
        self._conversation.leave(self._inbox)

    async def finish(self) -> None:
        """Does nothing: nothing follows the result."""


class AsyncConversations:
    """The streams of one channel."""

    def __init__(self, channel: AsyncChannel) -> None:
        self.are_served = True
        """False when the daemon is known to have plain calls only."""
        self._open: set[AsyncConversation] = set()

    def open(self, channel: AsyncChannel) -> AsyncConversation:
        channel.check_caller()
        with channel.calling():
            call = channel.stub.Converse(metadata=channel.endpoint.metadata)
        conversation = AsyncConversation(call, self._over)
        self._open.add(conversation)
        return conversation

    def _over(self, conversation: AsyncConversation, end: grpc.RpcError | None) -> None:
        self._open.discard(conversation)
        if end is not None and end.code() is grpc.StatusCode.UNIMPLEMENTED:
            self.are_served = False

    async def close(self) -> None:
        for conversation in list(self._open):
            conversation.close(now=True)
            await conversation.closed()


class AsyncSessionConversation:
    """The stream of one session, which is opened again after its end."""

    def __init__(self) -> None:
        self._current: deque[tuple[AsyncConversations, AsyncConversation]] = deque()  # one, or none
        self._loop = asyncio.get_running_loop()
        finalizer = weakref.finalize(self, _abandon, self._loop, self._current)
        finalizer.atexit = False

    async def follow(self, channel: AsyncChannel, request: FollowRequest, trace: Metadata) -> AsyncConversedEvents:
        """Follows an execution in the stream on this channel."""
        conversations = channel.conversations
        if self._current:
            owner, conversation = self._current[0]
            if owner is conversations and (events := await conversation.follow(request, trace)) is not None:
                return events
            self.close()
        conversation = conversations.open(channel)
        self._current.append((conversations, conversation))
        events = await conversation.follow(request, trace)
        assert events is not None
        return events

    def close(self) -> None:
        """Ends the stream, as soon as no execution is followed. Idempotent."""
        _close(self._current)


def _close(current: deque[tuple[AsyncConversations, AsyncConversation]]) -> None:
    while current:
        current.pop()[1].close()


def _abandon(loop: asyncio.AbstractEventLoop, current: deque[tuple[AsyncConversations, AsyncConversation]]) -> None:
    """Closes the stream of a session that was garbage-collected, in whatever thread that was."""
    if current:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
            loop.call_soon_threadsafe(_close, current)
