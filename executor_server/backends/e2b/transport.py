"""A connection to a guest through a command in its sandbox: an asyncio.Transport over the command's streams.

The relay (guest/cloud/relay.py) runs in the sandbox and carries bytes between its streams, as numbered lines of text,
and the guest's socket. This is the daemon's end of it. Output comes by a callback that the SDK awaits, so a reader that
pauses makes the cloud wait. Input goes out in one request after another; a request whose answer was lost is sent again,
which is harmless since the relay ignores lines that it has seen.

The transport promises the same as a socket: bytes in order, or its end, reported once. It trusts no input: a line out
of order ends the connection. The channel above connects again and recovers whatever was lost. The transport must never
know what it carries.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import structlog

from executor_server.backends.e2b.failures import CloudFailure
from executor_server.backends.e2b.retry import with_retries
from executor_server.guest.wire.lines import LINE_BYTES, SOCKET_CLOSED, LineDecoder, LineError, encode_lines

# Bytes in one request: several lines, so that a file needs few requests.
_REQUEST_BYTES = 4 * LINE_BYTES
_STOP_TIMEOUT_S = 10.0
_HIGH_BYTES = 64 * 1024
_NONCE_BYTES = 16

_log = structlog.get_logger(__name__)


class RelayCommand(Protocol):
    """The command that runs the relay."""

    async def send(self, data: bytes) -> None:
        """Writes to its standard input. Raises CloudFailure: `Final` when nothing can be written any more."""
        ...

    async def ended(self) -> int:
        """Waits until the cloud reports the end; returns the exit code. Raises CloudFailure when the stream breaks."""
        ...

    async def stop(self) -> None:
        """Kills it and closes its streams. Raises CloudFailure when it may still run."""
        ...


StartRelay = Callable[[str, Callable[[str], Awaitable[None]]], Awaitable[RelayCommand]]
"""Starts the relay with a nonce and a receiver of its output."""


class CommandTransport(asyncio.Transport):
    """Opened once. The owner keeps it until `on_finished`: until then it has tasks, and maybe a command."""

    def __init__(self, on_finished: Callable[[CommandTransport], None]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._on_finished = on_finished
        self._nonce = secrets.token_hex(_NONCE_BYTES)
        self._decoder = LineDecoder(self._nonce)
        self._command: RelayCommand | None = None
        self._protocol: asyncio.Protocol | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._buffer = bytearray()
        self._in_flight_bytes = 0
        self._next_seq = 1
        self._more = asyncio.Event()  # set while there may be something to send
        self._high_bytes, self._low_bytes = _HIGH_BYTES, _HIGH_BYTES // 4
        self._protocol_is_paused = False
        self._reading = asyncio.Event()  # not set before there is a protocol
        self._closes_when_sent = False
        self._closed = False  # no more bytes are accepted, in either direction
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ----------------------------------------------------------------------------------------------------

    async def open(self, start: StartRelay, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Starts a relay, waits until it is connected to the guest, and connects a protocol. Raises CloudFailure.

        When it fails or is cancelled, the transport is aborted.
        """
        try:
            command = await start(self._nonce, self._receive)
            if self._closed:  # aborted before there was a command to stop
                await _stop(command)
                raise _abandoned()
            self._command = command
            self._tasks = [
                self._loop.create_task(self._send_forever(command)),
                self._loop.create_task(self._watch(command)),
            ]
            await asyncio.shield(self._started)
            if self._closed:
                raise CloudFailure("the relay ended as soon as it was there")
        except BaseException:
            self.abort()
            raise
        self._protocol = make_protocol()
        self._protocol.connection_made(self)
        self._reading.set()

    async def finished(self) -> None:
        """Waits until its tasks have ended and its command was stopped, or could not be."""
        await asyncio.shield(self._finished)

    def abort(self) -> None:
        self._end(None)

    def close(self) -> None:
        """Sends the bytes that were written, and then ends."""
        self._closes_when_sent = True
        if not self.get_write_buffer_size():
            self._end(None)

    def is_closing(self) -> bool:
        return self._closed or self._closes_when_sent

    def _end(self, error: Exception | None) -> None:
        """Ends it, with `error` for the protocol's `connection_lost`; before it was connected, `open` raises it."""
        if self._closed:
            return
        self._closed = True
        self._buffer.clear()
        self._reading.set()  # releases callbacks that wait to deliver output
        if not self._started.done():
            self._started.set_exception(error or _abandoned())
            self._started.exception()  # retrieved here, since no task may be waiting for it
        elif self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)
        stopping = self._loop.create_task(self._stop())
        stopping.add_done_callback(self._report_finished)

    def _report_finished(self, stopping: asyncio.Task[None]) -> None:
        self._finished.set_result(None)
        self._on_finished(self)

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._command is not None:
            await _stop(self._command)

    async def _watch(self, command: RelayCommand) -> None:
        try:
            exit_code = await command.ended()
        except CloudFailure as failure:
            self._break(failure)
            return
        if exit_code == SOCKET_CLOSED and self._started.done():
            self._end(None)
        else:
            self._break(RelayEnded(exit_code))

    def _break(self, failure: CloudFailure) -> None:
        """Ends a connection with an OSError, as the loss of a socket does."""
        self._end(ConnectionError(str(failure)) if self._started.done() else failure)

    # -- receiving -----------------------------------------------------------------------------------------------

    async def _receive(self, text: str) -> None:
        """Receives output of the relay; returns when more may come."""
        if self.is_closing():
            return
        try:
            pieces = self._decoder.feed(text.encode("utf-8", "replace"))  # a lone surrogate is in no valid line
        except LineError as error:
            _log.debug("relay_line_refused", reason=str(error))
            self._break(CloudFailure("what the relay says was damaged on its way"))
            return
        if self._decoder.started and not self._started.done():
            self._started.set_result(None)
        for piece in pieces:
            await self._reading.wait()
            if self.is_closing() or self._protocol is None:
                return
            self._protocol.data_received(piece)
        if self._protocol is not None:
            await self._reading.wait()

    def is_reading(self) -> bool:
        return self._reading.is_set() and not self._closed

    def pause_reading(self) -> None:
        if not self._closed:
            self._reading.clear()

    def resume_reading(self) -> None:
        self._reading.set()

    # -- sending -------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing() or not data:
            return
        self._buffer += data
        self._more.set()
        if not self._protocol_is_paused and self.get_write_buffer_size() > self._high_bytes:
            self._protocol_is_paused = True
            if self._protocol is not None:
                self._protocol.pause_writing()

    async def _send_forever(self, command: RelayCommand) -> None:
        # Not `while True`: a request that ends at the moment of the cancellation swallows it, and the task must end.
        while not self._closed:
            await self._more.wait()
            piece = bytes(self._buffer[:_REQUEST_BYTES])
            del self._buffer[:_REQUEST_BYTES]
            if not self._buffer:
                self._more.clear()
            self._in_flight_bytes = len(piece)
            lines, self._next_seq = encode_lines(piece, self._next_seq)
            try:
                await with_retries(partial(command.send, lines))
            except CloudFailure as failure:
                self._break(failure)
                return
            self._in_flight_bytes = 0
            if self._protocol_is_paused and len(self._buffer) <= self._low_bytes:
                self._protocol_is_paused = False
                if self._protocol is not None:
                    self._protocol.resume_writing()
            if self._closes_when_sent and not self._buffer:
                self._end(None)
                return

    def get_write_buffer_size(self) -> int:
        return len(self._buffer) + self._in_flight_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = high if high is not None else 4 * low if low is not None else _HIGH_BYTES
        self._low_bytes = low if low is not None else self._high_bytes // 4

    def can_write_eof(self) -> bool:
        return False

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None, "not connected yet"
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol


class RelayEnded(CloudFailure):
    """The relay ended for another reason than the end of the guest's socket."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the relay ended with exit code {exit_code}")
        self.exit_code = exit_code


def _abandoned() -> CloudFailure:
    return CloudFailure("the way to the guest was given up")


async def _stop(command: RelayCommand) -> None:
    """Stops it, bounded in time. A relay that still runs ends with its sandbox, or when the next one connects."""
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await command.stop()
    except (CloudFailure, TimeoutError) as failure:
        _log.debug("relay_not_stopped", reason=str(failure) or type(failure).__name__)
