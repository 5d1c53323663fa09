"""The blocking client's stream of Converse, which the threads that follow executions of its session share.

There is no thread of its own: of those that wait for events, one reads for all, and when it has its own, the next one
does. When no thread waits, none reads. What the daemon sends meanwhile stays in gRPC, whose window bounds it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from google.protobuf.message import DecodeError

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client._core.conversation import Dialogue, Ended, FollowRequest, Inbox
from executor_client._core.quiet_grpc import grpc
from executor_client._core.tracing import Metadata
from executor_client._sync.duplex import DuplexCall, can_open

if TYPE_CHECKING:
    from executor_client._sync.channel import Channel

OnOver: TypeAlias = "Callable[[Conversation, Ended], None]"

_METHOD = "/executor_api.v1.ExecutorService/Converse"


class Conversation:
    """One stream. Thread-safe."""

    def __init__(self, channel: grpc.Channel, metadata: Metadata, on_over: OnOver) -> None:
        """`on_over` is called, with the status, when nothing of it is left in gRPC."""
        self.is_over = False
        self._channel = channel
        self._metadata = metadata
        self._on_over: OnOver | None = on_over
        self._dialogue = Dialogue()
        self._lock = threading.Lock()  # entered as such: a Condition would do so in Python
        self._changed = threading.Condition(self._lock)
        self._call: DuplexCall | None = None  # opened with the first message
        self._unsent: deque[bytes] = deque()
        self._reader: Inbox | None = None  # the inbox of the thread that reads
        self._waiting = 0  # threads that do not
        self._closing = False
        self._pid = os.getpid()

    def follow(self, request: FollowRequest, trace: Metadata) -> ConversedEvents | None:
        """Asks for the events of an execution; None when the stream is known to have ended."""
        with self._lock:
            if self.is_over or self._closing:
                return None
            inbox, message = self._dialogue.follow(request, trace)
            self._send(message)
            return ConversedEvents(self, inbox)

    def answer(self, inbox: Inbox, request: pb.SubmitToolResultRequest, on_lost: Callable[[], None]) -> bool:
        """Gives the answer to a tool call; False when the execution is not followed here any more."""
        with self._lock:
            if self.is_over or inbox.is_over:
                return False
            self._send(self._dialogue.answer(inbox, request, on_lost))
            return True

    def _send(self, message: pb.ConverseRequest) -> None:
        data = message.SerializeToString()
        if self._call is None:
            self._call = DuplexCall(self._channel, _METHOD, self._metadata, data)
        elif self._unsent or not self._call.has_sent:
            self._unsent.append(data)
        else:
            self._call.send(data)  # a stream that has ended says so when it is read

    def next_event(self, inbox: Inbox) -> types_pb2.Event:
        """Waits for the next event. Raises what the events end with, StopIteration for an end without an error."""
        with self._lock:
            while not inbox.has_news and self._reader is not None:
                self._waiting += 1
                try:
                    self._changed.wait()
                finally:
                    self._waiting -= 1
            if not inbox.has_news:
                self._reader = inbox
        if self._reader is inbox:
            self._read_for(inbox)
        if inbox.events:
            return inbox.take()
        raise inbox.take_end() or StopIteration

    def _read_for(self, inbox: Inbox) -> None:
        """Reads until this inbox has news."""
        call = self._call
        assert call is not None
        is_whole = False
        try:
            while True:
                happened = call.wait()
                with self._lock:
                    self._take(call, happened)
                    lost = self._dialogue.take_lost()
                    if inbox.has_news:
                        self._stop_reading()
                        is_whole = True
                for on_lost in lost:
                    on_lost()
                if is_whole:
                    return
        finally:
            if not is_whole:  # an interrupt, which has cost gRPC the call
                with self._lock:
                    call.broken()
                    self._end(call)
                    lost = self._dialogue.take_lost()
                    self._stop_reading()
                for on_lost in lost:
                    on_lost()

    def _stop_reading(self) -> None:
        self._reader = None
        if self._waiting:
            self._changed.notify_all()

    def _take(self, call: DuplexCall, happened: Any) -> None:
        data = call.take(happened)
        if data is not None:
            try:
                found = self._dialogue.take(pb.ConverseResponse.FromString(data))
            except DecodeError:
                call.cancel()
                return
            if found is not None and found is not self._reader:
                if found.is_full:
                    found.overflow()
                if self._waiting:
                    self._changed.notify_all()
        elif call.is_over:
            self._end(call)
        elif self._unsent and call.has_sent:
            call.send(self._unsent.popleft())

    def _end(self, call: DuplexCall) -> None:
        if not self.is_over:
            self.is_over = True
            end = call.status()
            self._dialogue.end(None if end.code() is grpc.StatusCode.OK else end)
            # Not kept: else it and its owner would keep each other, and gRPC's channel, until garbage is collected.
            on_over, self._on_over = self._on_over, None
            assert on_over is not None
            on_over(self, end)

    def leave(self, inbox: Inbox) -> None:
        """Ends the following of an execution. Its thread, when it is another one that reads, wakes up."""
        with self._lock:
            self._dialogue.leave(inbox)
            if self._reader is inbox and self._call is not None:
                self._call.cancel()  # nothing else wakes it; those who follow others attach again
            elif self._waiting:
                self._changed.notify_all()
            is_unused = self._closing and not self._dialogue.inboxes
        if is_unused:
            self.close()

    def close(self, *, now: bool = False) -> None:
        """Ends the stream when no execution is followed any more; with `now`, at once. Idempotent."""
        with self._lock:
            self._closing = True
            call = self._call
            if call is None or self.is_over or (self._dialogue.inboxes and not now):
                return
            if self._pid != os.getpid():
                return  # a copy in a forked child: the call is the parent's
            call.cancel()
            if self._reader is not None:
                return  # it reads to the end
            self._read_to_end(call)
            lost = self._dialogue.take_lost()
        for on_lost in lost:
            on_lost()

    def _read_to_end(self, call: DuplexCall) -> None:
        while not self.is_over:
            self._take(call, call.wait())


class ConversedEvents:
    """The events of one execution, from the stream of its session."""

    def __init__(self, conversation: Conversation, inbox: Inbox) -> None:
        self._conversation = conversation
        self._inbox = inbox

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> types_pb2.Event:
        return self._conversation.next_event(self._inbox)

    def answer(self, request: pb.SubmitToolResultRequest, on_lost: Callable[[], None]) -> bool:
        """Gives an answer to a tool call; False when it has to be given by a plain call.

        `on_lost` is called, in any thread, when that turns out later.
        """
        return self._conversation.answer(self._inbox, request, on_lost)

    def cancel(self) -> None:
        """Ends the following. Idempotent."""
        self._conversation.leave(self._inbox)

    def finish(self) -> None:
        """Does nothing: nothing follows the result."""


class Conversations:
    """The streams of one channel: those that are open, and those whose sessions were garbage-collected."""

    def __init__(self, channel: Channel) -> None:
        self.are_served = can_open(channel.channel)
        """False when the daemon is known to have plain calls only, or gRPC cannot open such a stream here."""
        self._open: set[Conversation] = set()
        self._abandoned: deque[Conversation] = deque()
        finalizer = weakref.finalize(channel, _close_all, self._open)
        finalizer.atexit = False

    def open(self, channel: Channel) -> Conversation:
        self.sweep()
        with channel.calling():
            conversation = Conversation(channel.channel, channel.endpoint.metadata, self._over)
        self._open.add(conversation)
        return conversation

    def _over(self, conversation: Conversation, end: Ended) -> None:
        self._open.discard(conversation)
        if end.code() is grpc.StatusCode.UNIMPLEMENTED:
            self.are_served = False

    def abandon(self, conversation: Conversation) -> None:
        """Leaves a stream to be closed by the next caller: from a finalizer, which may run with any lock held."""
        self._abandoned.append(conversation)

    def sweep(self) -> None:
        while self._abandoned:
            self._abandoned.popleft().close(now=True)

    def close(self) -> None:
        _close_all(self._open)


def _close_all(conversations: set[Conversation]) -> None:
    for conversation in list(conversations):
        conversation.close(now=True)


class SessionConversation:
    """The stream of one session, which is opened again after its end."""

    def __init__(self) -> None:
        self._current: list[tuple[Conversations, Conversation]] = []  # one, or none; shared with the finalizer
        self._lock = threading.Lock()
        finalizer = weakref.finalize(self, _abandon, self._current)
        finalizer.atexit = False

    def follow(self, channel: Channel, request: FollowRequest, trace: Metadata) -> ConversedEvents:
        """Follows an execution in the stream on this channel."""
        conversations = channel.conversations
        with self._lock:
            if self._current:
                owner, conversation = self._current[0]
                if owner is conversations and (events := conversation.follow(request, trace)) is not None:
                    return events
                self._close()
            conversation = conversations.open(channel)
            self._current.append((conversations, conversation))
            events = conversation.follow(request, trace)
            assert events is not None
            return events

    def close(self) -> None:
        """Ends the stream, as soon as no execution is followed. Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        while self._current:
            self._current.pop()[1].close()


def _abandon(current: list[tuple[Conversations, Conversation]]) -> None:
    for conversations, conversation in current:
        conversations.abandon(conversation)
