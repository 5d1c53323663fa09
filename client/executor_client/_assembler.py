"""Puts one execution together from its numbered wire events. Does no I/O; the sync and the async client share it.

What it is fed was written by the daemon and, in parts, by the sandbox: numbers must rise by one, everything is counted
against a limit, and the result is only made of what has arrived. It must never know of streams, threads or retries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from executor_api.limits import ARTIFACTS_MAX, EXECUTION_BLOBS_BYTES_MAX, EXECUTION_BLOBS_OPEN_MAX, IMAGES_MAX
from executor_api.v1 import types_pb2 as pb
from executor_client import _convert
from executor_client._blobs import IncomingBlobs
from executor_client._images import decode_image
from executor_client._limits import IMAGES_PIXELS_MAX, LOG_CHARS_MAX, MESSAGES_MAX
from executor_client._values import unpack_or_opaque
from executor_client.errors import ProtocolError
from executor_client.events import (
    ExecutionEvent,
    ImageEvent,
    LimitWarningEvent,
    LogEvent,
    OutputCutEvent,
    QueuedEvent,
    ToolCallEvent,
)
from executor_client.results import ExecutionResult, Image


class EventGap(ProtocolError):
    """An event's number is not the one after the last: something was left out on the way."""


@dataclass
class ToolRequest:
    """A host tool is to be called; the arguments are still packed, because unpacking them is the tool thread's work."""

    event: ToolCallEvent
    packed_arguments: bytes
    let_go: Callable[[], None]

    def take_arguments(self) -> bytes:
        """The packed arguments, once: while the tool runs, nobody holds on to a form of them that nobody needs."""
        packed, self.packed_arguments = self.packed_arguments, b""
        self.let_go()
        return packed


@dataclass
class _Output:
    """What was printed, as pieces."""

    logs: list[str] = field(default_factory=list)
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    chars: int = 0
    omitted_bytes: int = 0


class Assembler:
    """Feed it every event in order; `result` is set by the last one."""

    def __init__(self, execution_id: str) -> None:
        self.execution_id = execution_id
        self.last_number = 0
        self.result: ExecutionResult | None = None
        # The host's own objects that final-answer tools returned, by call: they never made the journey to the sandbox.
        self.final_answers: dict[str, object] = {}
        self._output = _Output()
        self._blobs = IncomingBlobs(bytes_max=EXECUTION_BLOBS_BYTES_MAX, open_max=EXECUTION_BLOBS_OPEN_MAX)
        self._images: list[Image] = []
        self._pixels_left = IMAGES_PIXELS_MAX
        self._messages = 0

    def feed(self, event: pb.Event) -> ExecutionEvent | ToolRequest | None:
        """Takes an event in; returns what there is to tell or to do about it. Raises ProtocolError."""
        self._messages += 1
        if self._messages > MESSAGES_MAX:
            raise ProtocolError(f"more than {MESSAGES_MAX} messages in one execution")
        if self.result is not None:
            raise ProtocolError("an event came after the result")
        kind = event.WhichOneof("kind")
        if event.number <= self.last_number and kind == "tool_call":
            # Delivered again after a reconnection, because no answer had arrived. Ours is on its way: it is repeated
            # until the daemon has it, and the tool itself runs once.
            return None
        if event.number != self.last_number + 1:
            raise EventGap(f"event {event.number} came after event {self.last_number}")
        taken = self._take(kind, event)
        self.last_number = event.number
        return taken

    def _take(self, kind: str | None, event: pb.Event) -> ExecutionEvent | ToolRequest | None:
        if kind == "log":
            return self._log(event)
        if kind == "result":
            self.result = self._result(event.result)
            return None
        if kind == "tool_call":
            return self._tool_call(event)
        if kind == "blob_chunk":
            self._blobs.add(event.blob_chunk)
            return None
        if kind == "image":
            return self._image(event)
        if kind == "output_cut":
            return self._output_cut(event)
        if kind == "queued":
            return QueuedEvent(event.number, event.queued.ahead)
        if kind == "limit_warning":
            return self._limit_warning(event)
        raise ProtocolError("an event of an unknown kind")

    def _log(self, event: pb.Event) -> LogEvent:
        text = event.log.text
        self._output.chars += len(text)
        if self._output.chars > LOG_CHARS_MAX:
            raise ProtocolError(f"more than {LOG_CHARS_MAX} characters of output in one execution")
        self._output.logs.append(text)
        if event.log.stream == pb.OUTPUT_STREAM_STDOUT:
            self._output.stdout.append(text)
            return LogEvent(event.number, "stdout", text)
        if event.log.stream == pb.OUTPUT_STREAM_STDERR:
            self._output.stderr.append(text)
            return LogEvent(event.number, "stderr", text)
        raise ProtocolError(f"unknown output stream {event.log.stream}")

    def _output_cut(self, event: pb.Event) -> OutputCutEvent:
        omitted_bytes = event.output_cut.omitted_bytes
        self._output.omitted_bytes += omitted_bytes
        # The wire does not say of which stream: each of them says that something may be missing here.
        note = f"\n[... {omitted_bytes} bytes of output left out ...]\n"
        for pieces in (self._output.logs, self._output.stdout, self._output.stderr):
            pieces.append(note)
        self._output.chars += len(note)
        return OutputCutEvent(event.number, omitted_bytes)

    def _limit_warning(self, event: pb.Event) -> LimitWarningEvent:
        warning = event.limit_warning
        if warning.limit not in _convert.LIMIT_NAMES:
            raise ProtocolError("a warning of an unknown limit")
        return LimitWarningEvent(event.number, warning.limit, warning.used, warning.budget)

    def _image(self, event: pb.Event) -> ImageEvent:
        if len(self._images) >= IMAGES_MAX:
            raise ProtocolError(f"more than {IMAGES_MAX} images in one execution")
        data = self._blobs.take(event.image.data)
        image = decode_image(data, event.image.mime_type, event.image.source, pixels_left=self._pixels_left)
        if image.pil is not None:
            self._pixels_left -= image.width * image.height
        image = replace(image, log_offset=self._output.chars)
        self._images.append(image)
        return ImageEvent(event.number, image)

    def _tool_call(self, event: pb.Event) -> ToolRequest:
        call = event.tool_call
        if not call.call_id:
            raise ProtocolError("a tool call without an id")
        arguments = self._blobs.take(call.arguments.packed)
        told = ToolCallEvent(event.number, call.call_id, call.name)
        return ToolRequest(told, arguments, lambda: self._blobs.let_go(call.arguments.packed))

    def _result(self, wire: pb.ExecutionResult) -> ExecutionResult:
        if len(wire.artifacts) > ARTIFACTS_MAX:
            raise ProtocolError(f"more than {ARTIFACTS_MAX} artifacts of one execution")
        is_final_answer = bool(wire.final_answer_call_id)
        output: Any = None
        if is_final_answer:
            if wire.final_answer_call_id not in self.final_answers:
                raise ProtocolError("the final answer is of a call that no tool of ours has answered")
            output = self.final_answers[wire.final_answer_call_id]
        elif wire.HasField("output"):
            output = unpack_or_opaque(self._blobs.take(wire.output.packed))
        return ExecutionResult(
            execution_id=self.execution_id,
            outcome=_convert.outcome_from_wire(wire.outcome),
            state=_convert.variables_state_from_wire(wire.variables_state),
            generation=wire.generation,
            output=output,
            is_final_answer=is_final_answer,
            logs="".join(self._output.logs),
            stdout="".join(self._output.stdout),
            stderr="".join(self._output.stderr),
            omitted_output_bytes=self._output.omitted_bytes,
            image_entries=tuple(self._images),
            error=_convert.error_from_wire(wire.error) if wire.HasField("error") else None,
            usage=_convert.usage_from_wire(wire.usage),
            artifacts=tuple(map(_convert.file_from_wire, wire.artifacts)),
            artifacts_truncated=wire.artifacts_truncated,
            policy_fingerprint=wire.policy_fingerprint,
        )
