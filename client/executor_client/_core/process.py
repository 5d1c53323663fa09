"""The client's state of one process, its requests and its events. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from executor_api.limits import ARGUMENT_BYTES_MAX, ARGUMENTS_BYTES_MAX, PIECE_BYTES, WRITE_BYTES_MAX
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client._core import convert, requests
from executor_client._core.assembler import EventGap
from executor_client._core.followed import Followed
from executor_client._core.retry import Retries
from executor_client._core.tracing import Metadata
from executor_client._core.waiting import Waits
from executor_client.errors import InvalidRequest, OutputLimitExceeded, ProtocolError
from executor_client.process_results import (
    CompletedProcess,
    ProcessEvent,
    ProcessOutput,
    ProcessOutputCut,
    ProcessResult,
    TerminalSize,
)

SHELL = ("/bin/sh", "-c")
"""Runs a command given as one text."""
_LONG_TEXT = 'IFS=; eval "unset IFS; shift $#\n$*"'
"""A shell script that joins its arguments and runs them as one text, since the kernel limits each argument's size."""
_PART_CHARS = ARGUMENT_BYTES_MAX // 4  # of at most four bytes each

EXIT_CODES = {"COMMAND_NOT_FOUND": 127, "COMMAND_NOT_EXECUTABLE": 126}
"""A shell's exit code for a command that can't be run, by reason."""

_STREAMS: dict[int, Literal["stdout", "stderr"]] = {
    types_pb2.OUTPUT_STREAM_STDOUT: "stdout",
    types_pb2.OUTPUT_STREAM_STDERR: "stderr",
}
_TARGETS = {
    "group": types_pb2.SIGNAL_TARGET_GROUP,
    "process": types_pb2.SIGNAL_TARGET_PROCESS,
    "tree": types_pb2.SIGNAL_TARGET_TREE,
}


class FollowedProcess(Followed):
    """Takes the messages of the stream that `opening()` requests. Without `request`, another call started it."""

    def __init__(
        self,
        session_id: str,
        process_id: str,
        request: pb.StartProcessRequest | None,
        retries: Retries,
        trace: Metadata,
        waits: Waits,
        address: str,
    ) -> None:
        super().__init__(f"process {process_id}", "", retries, trace, waits, address)
        self.session_id = session_id
        self.process_id = process_id
        self.last_number = 0
        self.pid = 0
        self.result: ProcessResult | None = None
        self.on_event: Callable[[types_pb2.ProcessEvent], None] | None = None  # records it
        self._request = request

    @property
    def may_have_begun(self) -> bool:
        """True if an event has arrived, or if it is unknown whether a request has arrived."""
        return self._request is None or self.was_away or self.last_number > 0

    def lost(self, why: str) -> None:
        """Records that it was lost with its node, as its daemon would have reported."""
        self.result = ProcessResult(outcome="lost", exit_code=None, lost_reason=why)

    def has_ended(self) -> bool:
        """True when the result has come."""
        return self.result is not None

    def opening(self) -> pb.StartProcessRequest | pb.AttachProcessRequest:
        """Returns the request whose stream brings the missing events."""
        self.refused = False
        if self._request is not None and self.last_number == 0:
            return self._request
        return pb.AttachProcessRequest(
            session_id=self.session_id, process_id=self.process_id, after_event=self.last_number
        )

    def feed(self, message: pb.StartProcessResponse | pb.AttachProcessResponse) -> ProcessEvent | None:
        """Takes a message; returns the event to report. Raises ProtocolError."""
        event = message.event
        kind = event.WhichOneof("kind")
        # One event replaces all dropped ones. It has the number of the last dropped event.
        if event.number != self.last_number + 1 and not (kind == "output_cut" and event.number > self.last_number):
            raise EventGap(f"event {event.number} of a process came after event {self.last_number}")
        if self.result is not None:
            raise ProtocolError("an event came after the result of a process")
        self.last_number = event.number
        if self.on_event is not None:
            self.on_event(event)
        self._retries.answered()
        self.waits.over("trouble")
        match kind:
            case "started":
                self.pid = event.started.pid
            case "output":
                if event.output.stream not in _STREAMS or not 0 < len(event.output.data) <= PIECE_BYTES:
                    raise ProtocolError("malformed output of a process")
                return ProcessOutput(event.number, _STREAMS[event.output.stream], event.output.data)
            case "output_cut":
                return ProcessOutputCut(event.number, event.output_cut.omitted_bytes)
            case "result":
                self.result = convert.from_wire(ProcessResult, event.result)
            case _:
                raise ProtocolError("unknown event of a process")
        return None


def argv_of(command: str | Sequence[str]) -> list[str]:
    """Returns the program and its arguments; text goes to the shell. Raises InvalidRequest."""
    if isinstance(command, str):
        if not command.strip():
            raise InvalidRequest("the command is empty")
        argv = [*SHELL, command]
        if _size_of(command) > ARGUMENT_BYTES_MAX:
            parts = [command[start : start + _PART_CHARS] for start in range(0, len(command), _PART_CHARS)]
            argv = [*SHELL, _LONG_TEXT, SHELL[0], *parts]
    else:
        argv = list(command)
        if not argv or not all(isinstance(each, str) for each in argv):
            raise InvalidRequest("the command must be text for the shell, or a list of the program and its arguments")
    for index, argument in enumerate(argv):
        if _size_of(argument) > ARGUMENT_BYTES_MAX:
            raise InvalidRequest(
                f"argument {index} of the command has {_size_of(argument):,} bytes, and the kernel takes "
                f"{ARGUMENT_BYTES_MAX:,} in one; pass it in a file, or as input"
            )
    size_bytes = sum(map(_size_of, argv)) + len(argv)
    if size_bytes > ARGUMENTS_BYTES_MAX:
        raise InvalidRequest(
            f"the command has {size_bytes:,} bytes with its arguments; the limit is {ARGUMENTS_BYTES_MAX:,}: "
            "pass the rest in a file, or as input"
        )
    return argv


def _size_of(argument: str) -> int:
    return len(argument.encode("utf-8", "surrogatepass"))


def start_request(
    session_id: str,
    command: str | Sequence[str],
    *,
    env: Mapping[str, str] | None,
    pty: TerminalSize | None = None,
    process_id: str | None = None,
    **fields: Any,
) -> pb.StartProcessRequest:
    """Makes a request with an id of its own, so that it can be repeated. `fields` are those of the message."""
    return requests.made(
        pb.StartProcessRequest,
        session_id=session_id,
        process_id=process_id or uuid.uuid4().hex,
        argv=argv_of(command),
        env=requests.environment(env),
        pty=None if pty is None else size_to_wire(pty),
        prefers_bash=isinstance(command, str),
        **fields,
    )


def size_to_wire(size: TerminalSize) -> types_pb2.TerminalSize:
    """Raises InvalidRequest, also for an `os.terminal_size`, whose fields have other names."""
    try:
        return requests.made(types_pb2.TerminalSize, columns=size.columns, rows=size.rows)
    except AttributeError as error:
        raise InvalidRequest("the size of a terminal must be a TerminalSize(columns, rows)") from error


def write_requests(
    session_id: str, process_id: str, offset: int, data: bytes, *, eof: bool
) -> list[pb.WriteProcessRequest]:
    """Makes the messages that write `data`, each within its bound."""
    pieces = [data[start : start + WRITE_BYTES_MAX] for start in range(0, len(data), WRITE_BYTES_MAX)] or [b""]
    requests = []
    for index, piece in enumerate(pieces):
        is_last = index == len(pieces) - 1
        requests.append(
            pb.WriteProcessRequest(
                session_id=session_id, process_id=process_id, offset=offset, data=piece, eof=eof and is_last
            )
        )
        offset += len(piece)
    return requests


def signal_request(session_id: str, process_id: str, number: int, target: str) -> pb.SignalProcessRequest:
    if target not in _TARGETS:
        raise InvalidRequest(f"target is {target!r}; it must be one of {', '.join(map(repr, _TARGETS))}")
    return pb.SignalProcessRequest(
        session_id=session_id, process_id=process_id, signal=int(number), target=_TARGETS[target]
    )


def not_run(request: pb.StartProcessRequest, error: InvalidRequest) -> CompletedProcess:
    """Returns a refused command as a shell reports it. Raises any other error."""
    if error.reason not in EXIT_CODES:
        raise error
    message = f"{error.message}\n".encode()
    return CompletedProcess(
        process_id=request.process_id,
        argv=tuple(request.argv),
        result=ProcessResult(outcome="exited", exit_code=EXIT_CODES[error.reason], output_bytes=len(message)),
        stdout_bytes=message if request.merge_stderr else b"",
        stderr_bytes=b"" if request.merge_stderr else message,
    )


class KeptOutput:
    """The output of a command, with at most `limit_bytes` of each stream.

    If there is more, head and tail are kept ("cut"), or `add` raises OutputLimitExceeded with the beginning ("error").
    """

    def __init__(self, limit_bytes: int, overflow: Literal["cut", "error"] = "cut") -> None:
        if limit_bytes < 0:
            raise InvalidRequest("max_output_bytes is negative")
        self._limit_bytes = limit_bytes
        self._may_overflow = overflow == "cut"
        self._stdout, self._stderr = (HeadAndTail(limit_bytes, has_tail=self._may_overflow) for _ in range(2))

    def add(self, event: ProcessEvent) -> None:
        stream = self._stderr if isinstance(event, ProcessOutput) and event.stream == "stderr" else self._stdout
        if isinstance(event, ProcessOutput):
            stream.add(event.data)
        else:
            stream.omit(event.omitted_bytes)
        if stream.is_cut and not self._may_overflow:
            raise OutputLimitExceeded(
                f"the command printed more than {self._limit_bytes:,} bytes, its limit, and was killed",
                stdout_bytes=self._stdout.head,
                stderr_bytes=self._stderr.head,
            )

    def finish(self) -> tuple[bytes, bytes]:
        """Returns the kept parts of stdout and of stderr."""
        return self._stdout.finish(), self._stderr.finish()

    def completed(self, request: pb.StartProcessRequest, result: ProcessResult) -> CompletedProcess:
        """Returns the ended process with its kept output."""
        stdout_bytes, stderr_bytes = self.finish()
        return CompletedProcess(
            process_id=request.process_id,
            argv=tuple(request.argv),
            result=result,
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
            omitted_bytes=self._stdout.omitted_bytes + self._stderr.omitted_bytes,
        )


class HeadAndTail:
    """Keeps the head and the tail of a stream's bytes, `limit_bytes` together; or the head alone."""

    def __init__(self, limit_bytes: int, *, has_tail: bool = True) -> None:
        self._tail_bytes = limit_bytes // 2 if has_tail else 0
        self._head_bytes = limit_bytes - self._tail_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self.omitted_bytes = 0

    def add(self, data: bytes) -> None:
        room = self._head_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        excess = len(self._tail) - self._tail_bytes
        if excess > max(self._tail_bytes, PIECE_BYTES):  # not for each piece: cutting moves the whole tail
            self._cut(excess)

    @property
    def head(self) -> bytes:
        return bytes(self._head)

    @property
    def is_cut(self) -> bool:
        """True when not all is kept."""
        return bool(self.omitted_bytes) or len(self._tail) > self._tail_bytes

    def omit(self, omitted_bytes: int) -> None:
        """Counts bytes that were omitted before they arrived."""
        self.omitted_bytes += omitted_bytes

    def finish(self) -> bytes:
        """Returns the kept bytes, with the omitted size in a line between head and tail."""
        self._cut(max(0, len(self._tail) - self._tail_bytes))
        if not self.omitted_bytes:
            return bytes(self._head + self._tail)
        return bytes(self._head) + omission(self.omitted_bytes) + bytes(self._tail)

    def _cut(self, excess: int) -> None:
        del self._tail[:excess]
        self.omitted_bytes += excess


def omission(omitted_bytes: int) -> bytes:
    """Returns the line that replaces omitted bytes in output."""
    return b"\n[%d bytes left out]\n" % omitted_bytes


def as_bytes(data: Any) -> bytes:
    """Returns the bytes to write to a process; text as UTF-8."""
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise InvalidRequest(f"the input of a process must be bytes or text, not {type(data).__name__}")
