# Made of aio_process.py by tools/unasync.py: change that, and run `make unasync`.
"""A process of a session, of the blocking client: its output, its input, its end.

The daemon owns the process. After a lost connection or a restart of the daemon, reading resumes with the next event, so
each byte arrives once. The process does not notice when a caller stops reading.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator
from typing import Self

from google.protobuf.message import Message

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import process as core
from executor_client._core import requests
from executor_client._core.arguments import checks_calls
from executor_client._core.assembler import EventGap
from executor_client._core.limits import CANCEL_GRACE_S, INTERRUPT_GRACE_S
from executor_client._core.process import FollowedProcess
from executor_client._core.quiet_grpc import grpc
from executor_client._core.session_base import SessionBase
from executor_client._core.short_repr import ShortRepr
from executor_client._sync import EventStream, Lock, Transport, sleep
from executor_client.errors import (
    CallTimeoutError,
    InvalidRequest,
    PreconditionError,
    ProtocolError,
)
from executor_client.process_results import (
    ProcessEvent,
    ProcessOutput,
    ProcessResult,
    TerminalSize,
)

READ_BYTES_MAX = 4 << 20
"""Bytes after which `read` returns."""

_SIGINT, _SIGKILL, _SIGTERM = 2, 9, 15


@checks_calls
class Process(ShortRepr):
    """A process of a session, created by `start` and `attach`. Iterating yields its output, once.

    One reader at a time. As a context manager, it stops following the process at the end; the process continues.
    """

    _shows = ("process_id", "pid", "result")

    def __init__(self, session: SessionBase[Transport], followed: FollowedProcess, written_bytes: int = 0) -> None:
        self._session = session
        self._followed = followed
        self._written_bytes = written_bytes
        self._rest = bytearray()  # bytes that `read_bytes` has read but not returned
        self._stream: EventStream | None = None
        self._stream_ends_s = math.inf
        self._write_lock = Lock()

    @property
    def process_id(self) -> str:
        """The id for `attach`."""
        return self._followed.process_id

    @property
    def pid(self) -> int:
        """Its id in the sandbox."""
        return self._followed.pid

    @property
    def last_event(self) -> int:
        """Number of the last event read here; `attach` can continue after it."""
        return self._followed.last_number

    @property
    def result(self) -> ProcessResult | None:
        """Its result; None until all of its events were read here."""
        return self._followed.result

    # -----------------------------------------------------------------------------------------------------------------
    # Reading

    def __iter__(self) -> Generator[ProcessEvent, None]:
        """Yields the unread output until the process ends.

        Leaving the loop early stops following; a followed process waits for its reader once the buffers are full.
        Raises ConnectionLost if the daemon goes away and does not come back.
        """
        try:
            while (event := self._next(math.inf)) is not None:
                yield event
        finally:
            self.close()

    def read(self, timeout_s: float) -> list[ProcessEvent]:
        """Collects the unread output for `timeout_s` seconds and returns it; returns earlier if the process ends.

        Returns at most `READ_BYTES_MAX` bytes at once, then stops following: later output is for the next call.
        """
        ends_s = time.monotonic() + timeout_s
        events: list[ProcessEvent] = []
        size_bytes = 0
        try:
            while size_bytes < READ_BYTES_MAX and (event := self._next(ends_s)) is not None:
                events.append(event)
                size_bytes += len(event.data) if isinstance(event, ProcessOutput) else 0
        except CallTimeoutError:
            pass  # it still runs
        self.close()
        return events

    def read_bytes(self, timeout_s: float, *, max_bytes: int = READ_BYTES_MAX) -> bytes:
        """Returns the unread output and what arrives within `timeout_s` seconds: stdout and stderr together, in order.

        Returns earlier if the process ends, or with `max_bytes`; the rest is for the next `read_bytes`. A line replaces
        dropped bytes. Returns b"" at the end of the output (`result` is then set), and if nothing arrives in time
        (`result` is None). `timeout_s` must cover a round trip to the daemon.
        """
        if max_bytes <= 0:
            raise InvalidRequest("max_bytes must be above 0")
        ends_s = time.monotonic() + timeout_s
        try:
            while len(self._rest) < max_bytes and (event := self._next(ends_s)) is not None:
                self._rest += event.data if isinstance(event, ProcessOutput) else core.omission(event.omitted_bytes)
        except CallTimeoutError:
            pass  # it still runs
        self.close()
        data = bytes(self._rest[:max_bytes])
        del self._rest[:max_bytes]
        return data

    def wait(self, timeout_s: float | None = None) -> ProcessResult:
        """Waits for the process to end. Drops unread output.

        Raises CallTimeoutError if the process still runs after `timeout_s` seconds; it continues.
        """
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._followed.has_ended():
            self._next(ends_s)
        assert self._followed.result is not None, "the events ended without a result"
        return self._followed.result

    def close(self) -> None:
        """Stops following. The process continues, and iterating again resumes with the next event. Idempotent."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    def _begin(self) -> None:
        """Starts the process. Returns once it runs."""
        while self._followed.last_number == 0:
            event = self._next(math.inf, only_one=True)
            if isinstance(event, ProcessOutput):
                raise ProtocolError("a process printed before its start")

    def _next(self, ends_s: float, *, only_one: bool = False) -> ProcessEvent | None:
        """Returns the next event to report; None after the result, or if the process was closed meanwhile.

        With `only_one`, returns after each event, with None if it is not reported.
        """
        while not self._followed.has_ended():
            stream = self._open(ends_s)
            cause: grpc.RpcError | EventGap | None = None
            try:
                for message in stream:
                    self._session._transport.answered = True
                    event = self._followed.feed(message)
                    if self._followed.has_ended():
                        self._stream = None
                        stream.finish()
                        return None
                    if event is not None or only_one:
                        return event
            except (grpc.RpcError, EventGap) as error:
                cause = error
            except BaseException:
                self.close()
                raise
            if self._stream is not stream:
                return None  # another task or thread has closed it
            self.close()
            if time.monotonic() >= ends_s:
                raise CallTimeoutError(f"process {self.process_id} still runs")
            self._await_next(cause)
        return None

    def _open(self, ends_s: float) -> EventStream:
        if self._stream is not None and self._stream_ends_s > ends_s:
            self.close()  # its time limit is too late
        if self._stream is None:
            timeout_s = None if ends_s == math.inf else max(0.001, ends_s - time.monotonic())
            self._stream = self._session._transport.channel.events(
                self._followed.opening(), self._followed.trace, timeout_s
            )
            self._stream_ends_s = ends_s
        return self._stream

    def _await_next(self, cause: grpc.RpcError | EventGap | None) -> None:
        """Waits before the next stream. Raises the error for the caller if another stream can't help."""
        try:
            sleep(self._followed.interrupted(cause, time.monotonic()))
        except PreconditionError as error:
            if not (self._session._is_lost(error) and self._followed.may_have_begun):
                raise
            self._followed.lost(error.message)

    # -----------------------------------------------------------------------------------------------------------------
    # Input and signals

    def write(self, data: bytes | bytearray | memoryview | str) -> None:
        """Writes to its standard input or terminal; text as UTF-8. Waits while the process does not read.

        Raises PreconditionError if the process has ended or closed its input (PROCESS_ENDED), or if another client has
        written to it; InvalidRequest if it was started without input; CallTimeoutError if it does not read for
        `call_timeout_s`. After that, the same data can be written again and arrives once.
        """
        self._write(core.as_bytes(data), eof=False)

    def close_stdin(self) -> None:
        """Closes its input. On a terminal, sends the end-of-file character; a repetition sends it only after new input.

        Does nothing if the process has ended.
        """
        try:
            self._write(b"", eof=True)
        except PreconditionError as error:
            if error.reason != "PROCESS_ENDED":
                raise

    def _write(self, data: bytes, *, eof: bool) -> None:
        # Two writers of this object would use the same offset, and the daemon would skip the second as a repetition.
        with self._write_lock:
            offset = self._written_bytes
            for request in core.write_requests(self._followed.session_id, self.process_id, offset, data, eof=eof):
                self._record("input", request)
                response = self._session._open().call(request)
                if response.written_bytes > request.offset + len(request.data):
                    self._written_bytes = response.written_bytes
                    raise PreconditionError("another client has written to the input of this process")
            # Set once all data has arrived, so that data written again after an error begins at the same offset.
            self._written_bytes = offset + len(data)

    def resize(self, size: TerminalSize) -> None:
        """Sets the size of its terminal."""
        request = requests.made(
            pb.ResizeProcessRequest,
            session_id=self._followed.session_id,
            process_id=self.process_id,
            size=core.size_to_wire(size),
        )
        self._record("resize", request)
        self._session._open().call(request)

    def signal(self, number: int, target: str = "group") -> None:
        """Sends a signal to its process "group", to the "process" alone, or to the "tree" of its descendants.

        Does nothing if the process has ended.
        """
        request = core.signal_request(self._followed.session_id, self.process_id, number, target)
        self._record("signal", request)
        self._session._open().call(request)

    def terminate(self) -> None:
        """Sends SIGTERM to its process group."""
        self.signal(_SIGTERM)

    def kill(self) -> None:
        """Kills it with all its descendants (SIGKILL)."""
        self.signal(_SIGKILL, "tree")

    def _end(self, *, gently: bool) -> None:
        """Kills it with all its descendants; `gently` sends a SIGINT first and waits a moment."""
        self.close()
        try:
            if gently:
                self._send(_SIGINT, "group")
                with contextlib.suppress(CallTimeoutError):
                    self.wait(INTERRUPT_GRACE_S)
        finally:
            self._send(_SIGKILL, "tree")

    def _send(self, number: int, target: str) -> None:
        """Sends a signal in one attempt."""
        request = core.signal_request(self._followed.session_id, self.process_id, number, target)
        self._record("signal", request)
        self._session._transport.once(request, CANCEL_GRACE_S)

    def _record(self, kind: str, request: Message) -> None:
        """Records a request before it is sent: its effects may arrive before its answer."""
        if self._session._record is not None:
            self._session._record.request(kind, request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
