"""Delivers the supervisor's messages to the threads that wait for them.

Any thread may call. There is no reader thread: one of the waiting threads, the leader, reads for all of them. So a
process that agent code forks inherits no helper thread, and no lock that one held.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from collections import deque

from executor_api.limits import BLOB_BYTES_MAX

from ..checks.control import ExecutionInterrupted
from ..wire import link
from ..wire.link_messages import ImageReply, ToolReply, message_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Callable, Optional

# Seconds between two checks for an interrupt by the waiting main thread, while another thread reads.
_INTERRUPT_POLL_S = 0.05


class Condition:
    """A lock, and the wait for a change under it, like threading.Condition.

    `threading` is not imported at the start: it takes 0.2 MiB of each sandbox, and most programs have no threads.
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._waiting: list[Any] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()

    def wait(self, time_s: float = -1) -> None:
        """Waits for the next `notify_all`, without end when `time_s` is negative. The lock is held before and after."""
        waiter = allocate_lock()
        waiter.acquire()
        self._waiting.append(waiter)
        self.release()
        try:
            waiter.acquire(True, time_s)
        finally:
            self.acquire()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def notify_all(self) -> None:
        for waiter in self._waiting:
            waiter.release()
        self._waiting.clear()


class Inbox:
    """Receives messages of the supervisor and gives each to its thread.

    The race: an interrupt of the program is an exception in the main thread, at any bytecode. Between the read of a
    message and its delivery it would lose the message; inside the lock it would leave it locked. So the signal handler
    calls `defer_interrupt`. While the main thread is `_careful`, the exception is raised later, where it does no harm:
    when the thread waits for the next message, or leaves.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._changed = Condition()
        self._leading = False
        self._commands: deque[link.Packet] = deque()
        self._expected: set[str] = set()
        self._replies: dict[str, link.Packet] = {}
        self._main = get_ident()
        self._careful = False  # true while an exception in the main thread would do harm
        self._interrupted = False

    def defer_interrupt(self) -> bool:
        """Called by the signal handler. True when the interrupt is deferred and must not be raised now."""
        if self._careful:
            self._interrupted = True
        return self._careful

    def command(self) -> link.Packet:
        """Returns the next message that is not the reply to a tool call."""
        mine = self._enter()
        try:
            return self._wait(lambda: self._commands.popleft() if self._commands else None, mine)
        finally:
            self._leave(mine)

    def forget(self) -> None:
        """Drops everything read from a link that this process has lost."""
        for packet in (*self._commands, *self._replies.values()):
            packet.close()
        self._commands.clear()
        self._replies.clear()
        self._expected.clear()

    def ask(self, call_id: str, send: Callable[[], None]) -> link.Packet:
        """Sends a request and waits for its reply. The reply to an interrupted request is dropped."""
        mine = self._enter()
        reply = None
        try:
            self._expected.add(call_id)
            send()
            reply = self._wait(lambda: self._replies.pop(call_id, None), mine)
        finally:
            with self._changed:
                self._expected.discard(call_id)
                _drop(self._replies.pop(call_id, None))
            try:
                self._leave(mine)
            except ExecutionInterrupted:
                _drop(reply)
                raise
        return reply

    def _enter(self) -> bool:
        """Returns true in the main thread, which is careful from then on."""
        mine = get_ident() == self._main
        if mine:
            self._careful = True
        return mine

    def _leave(self, mine: bool) -> None:
        if mine:
            self._careful = False
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise ExecutionInterrupted

    def _wait(self, take: Callable[[], Optional[link.Packet]], mine: bool) -> link.Packet:
        with self._changed:
            while True:
                packet = take()
                if packet is not None:
                    return packet
                if self._leading:
                    # The main thread polls for an interrupt: its handler can't notify a condition.
                    self._changed.wait(_INTERRUPT_POLL_S if mine else -1)
                else:
                    self._lead(mine)
                if mine:
                    self._raise_interrupt()

    def _lead(self, mine: bool) -> None:
        """Reads one message, without the lock, and stores it for the thread that waits for it."""
        self._leading = True
        self._changed.release()
        packet = None
        try:
            packet = self._receive(mine)
        finally:
            self._changed.acquire()
            self._leading = False
            if packet is not None:
                self._store(packet)
            self._changed.notify_all()

    def _receive(self, mine: bool) -> link.Packet:
        try:
            if mine:
                self._careful = False  # an interrupt loses nothing now, nor does a deferred one
                self._raise_interrupt()
            size = link.await_size(self._sock)
        finally:
            if mine:
                self._careful = True
        return link.receive(self._sock, BLOB_BYTES_MAX, size)

    def _store(self, packet: link.Packet) -> None:
        message = message_of(packet)
        if not isinstance(message, (ToolReply, ImageReply)):
            self._commands.append(packet)
        elif message.call in self._expected:
            self._replies[message.call] = packet
        else:
            packet.close()


def _drop(packet: Optional[link.Packet]) -> None:
    if packet is not None:
        packet.close()
