"""Forwarded ports: connections from a client, through the daemon and the guest, to a TCP port inside the sandbox.

The sandbox needs no network for this: the guest connects to its own loopback. Each direction has a window, so a slow
reader stops its own connection only. A connection ends with its call, the session or the daemon, and can't be resumed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from executor_server.backends.channel import GuestChannel
from executor_server.core import (
    ExecutorError,
    PortUse,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    Unavailable,
)
from executor_server.guest.wire.frames import CHUNK_BYTES, Frame, FrameError
from executor_server.guest.wire.messages import Done
from executor_server.guest.wire.process_messages import (
    PORT_WINDOW_BYTES,
    ClosePort,
    GrantPort,
    OpenPort,
    PortInput,
    PortOutput,
)
from executor_server.guest.wire.schema import message_of
from executor_server.policy import check_port
from executor_server.sessions.guest_requests import GuestRequests
from executor_server.sessions.shared import SessionHooks

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

# The room that must be free before more is granted; otherwise each frame would cause a grant message.
_GRANT_STEP_BYTES = PORT_WINDOW_BYTES // 4


class PortConnection:
    """One connection. Made by `Ports.open`."""

    def __init__(self, channel: GuestChannel, port: int) -> None:
        self.port = port
        self.op = 0
        self.sent_bytes = 0  # by the program
        self.received_bytes = 0  # by the program
        self._channel = channel
        self._data: deque[bytes] = deque()
        self._taken_bytes = 0
        self._granted_bytes = PORT_WINDOW_BYTES
        self._may_send_bytes = -1  # less than 0: it is not open yet
        self._output_ended = False
        self._ended = False
        self._error: ExecutorError | None = None
        self._news = asyncio.Event()

    # -- for the client's RPC --------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Waits until it is open. Raises PreconditionFailed if nothing listens there."""
        while self._may_send_bytes < 0:
            await self._changed()

    async def read(self) -> bytes:
        """Returns data of the program, empty at the end. Raises Unavailable if the connection was cut off."""
        while not (self._data or self._output_ended):
            await self._changed()
        if not self._data:
            if self._error is not None:
                raise self._error
            return b""
        data = self._data.popleft()
        self._taken_bytes += len(data)
        granted_bytes = self._taken_bytes + PORT_WINDOW_BYTES
        if granted_bytes >= self._granted_bytes + _GRANT_STEP_BYTES and not self._ended:
            self._granted_bytes = granted_bytes
            self._channel.send(GrantPort(op=self.op, granted=granted_bytes))
        return data

    async def write(self, data: bytes) -> None:
        """Sends data to the program, at its pace. Raises Unavailable if the connection was cut off."""
        view = memoryview(data)
        while view:
            while not (room := min(self._may_send_bytes - self.received_bytes, CHUNK_BYTES)):
                await self._changed()
            piece, view = bytes(view[:room]), view[room:]
            self.received_bytes += len(piece)
            self._channel.send(PortInput(op=self.op), piece)
        await self._channel.drain()

    def end_input(self) -> None:
        """Ends the client's direction."""
        if not self._ended:
            self._channel.send(PortInput(op=self.op, eof=True))

    @property
    def ended(self) -> bool:
        """True after the guest's last frame for it."""
        return self._ended

    async def _changed(self) -> None:
        if self._error is not None:
            raise self._error
        if self._ended:
            raise _cut_off(f"the connection to port {self.port} has ended")
        self._news.clear()
        await self._news.wait()

    # -- frames of the guest ---------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Takes a frame of the guest. Raises FrameError."""
        if self._ended:
            raise FrameError("a connection went on after its end")
        message = message_of(frame)
        if isinstance(message, Done):
            self._ended = True
            if not message.ok:
                self._error = _refusal(message)
            self._output_ended = True
        elif isinstance(message, PortOutput):
            self._take_output(message, frame)
        else:
            raise FrameError(f"frame kind {frame.kind} is not of a connection")
        self._news.set()

    def _take_output(self, message: PortOutput, frame: Frame) -> None:
        if message.granted is not None:
            self._may_send_bytes = max(self._may_send_bytes, message.granted)
        if not len(frame.view):
            self._output_ended = self._output_ended or message.eof
            return
        self.sent_bytes += len(frame.view)
        if self.sent_bytes > self._granted_bytes or self._output_ended:
            raise FrameError("more of a port than was granted")
        self._data.append(frame.body)

    def fail(self, error: ExecutorError) -> None:
        """Ends it, since the session is lost or has ended."""
        if not self._ended:
            self._ended, self._error = True, error
            self._news.set()


class Ports:
    """The forwarded connections of one session."""

    def __init__(self, session: Session, requests: GuestRequests, channel: GuestChannel, hooks: SessionHooks) -> None:
        self._session = session
        self._requests = requests
        self._channel = channel
        self._admission = hooks.admission
        self._observer = hooks.observer
        self.connections: set[PortConnection] = set()
        """The connections that are open, or being opened."""

    @property
    def in_use(self) -> bool:
        """True while a connection is open."""
        return bool(self.connections)

    @asynccontextmanager
    async def open(self, port: int) -> AsyncIterator[PortConnection]:
        """Opens a connection to a port, and closes it at the end of the block.

        Raises PolicyViolation, ResourceExhausted (too many connections), PreconditionFailed (nothing listens there, or
        the session is lost), and admission's refusals.
        """
        self._session.require_alive()
        check_port(self._session.spec, port)
        most = self._session.spec.ports.max_connections
        if len(self.connections) >= most:
            raise ResourceExhausted(
                Reason.TOO_MANY_CONNECTIONS,
                f"{len(self.connections)} connections to ports of this session are open, and the policy allows {most}",
                retry_after_s=1.0,
            )
        began_s = time.monotonic()
        connection = PortConnection(self._channel, port)
        self.connections.add(connection)
        try:
            await self._admission.port(self._session.facts, port)
            with self._requests.asking(
                connection, lambda op: OpenPort(op=op, port=port, granted=PORT_WINDOW_BYTES), counts=False
            ) as connection.op:
                try:
                    await connection.opened()
                    yield connection
                finally:
                    if not connection.ended:
                        self._channel.send(ClosePort(op=connection.op))
        finally:
            self.connections.discard(connection)
            took_s = time.monotonic() - began_s
            use = PortUse(port, connection.received_bytes, connection.sent_bytes, took_s)
            self._observer.port_closed(self._session.facts, use)


def _refusal(done: Done) -> ExecutorError:
    message = done.message or "the connection has ended"
    if done.reason == "port_closed":
        return PreconditionFailed(Reason.PORT_CLOSED, message)
    if done.reason == "queue_full":
        return ResourceExhausted(Reason.TOO_MANY_CONNECTIONS, message, retry_after_s=1.0)
    return _cut_off(message)


def _cut_off(message: str) -> Unavailable:
    return Unavailable(Reason.PORT_RESET, message)
