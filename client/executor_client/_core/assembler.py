"""Assembles one execution from its numbered wire events. No I/O; both clients share it.

The events come from the daemon and partly from the sandbox. So numbers must rise by one, everything is counted against
a limit, and the result only contains what has arrived. It must never know about streams, threads or retries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from executor_api.displays import unpack
from executor_api.limits import (
    ARTIFACTS_MAX,
    DISPLAYS_MAX,
    EXECUTION_BLOBS_BYTES_MAX,
    EXECUTION_BLOBS_OPEN_MAX,
    IMAGES_MAX,
)
from executor_api.v1 import types_pb2 as pb
from executor_api.values import DEFAULT_LIMITS, ValueLimits
from executor_client._core import convert
from executor_client._core.blobs import IncomingBlobs
from executor_client._core.images import check_image
from executor_client._core.limits import IMAGES_PIXELS_MAX, LOG_CHARS_MAX, MESSAGES_MAX
from executor_client._core.values import unpack_or_opaque
from executor_client.errors import ProtocolError
from executor_client.events import (
    DisplayEvent,
    ExecutionEvent,
    ImageEvent,
    LimitWarningEvent,
    LogEvent,
    OutputCutEvent,
    QueuedEvent,
    ToolCallEvent,
)
from executor_client.results import Display, ExecutionResult, Image


class EventGap(ProtocolError):
    """An event's number does not follow the last one: an event was lost on the way."""


@dataclass
class ToolRequest:
    """A call of a host tool. The arguments are still packed; the tool's thread unpacks them."""

    event: ToolCallEvent
    packed_arguments: bytes | memoryview
    release: Callable[[], None]

    def take_arguments(self) -> bytes | memoryview:
        """Returns the packed arguments once. They are not kept in memory while the tool runs."""
        packed, self.packed_arguments = self.packed_arguments, b""
        self.release()
        return packed


@dataclass
class _Output:
    """The pieces of printed text."""

    logs: list[str] = field(default_factory=list)
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    chars: int = 0
    omitted_bytes: int = 0


class Assembler:
    """Takes every event in order; the last one sets `result`.

    Others may share the event loop that decodes the output. So the output has limits here, too: code that took over its
    interpreter sends what it likes.
    """

    def __init__(self, execution_id: str, output_limits: ValueLimits = DEFAULT_LIMITS) -> None:
        self.execution_id = execution_id
        self.output_limits = output_limits
        self.last_number = 0
        self.result: ExecutionResult | None = None
        # The host's objects that final-answer tools returned, by call. They are never sent to the sandbox.
        self.final_answers: dict[str, object] = {}
        self._output = _Output()
        self._blobs = IncomingBlobs(bytes_max=EXECUTION_BLOBS_BYTES_MAX, open_max=EXECUTION_BLOBS_OPEN_MAX)
        self._images: list[Image] = []
        self._displays: list[Display] = []
        self._pixels_left = IMAGES_PIXELS_MAX
        self._messages = 0

    def feed(self, event: pb.Event) -> ExecutionEvent | ToolRequest | None:
        """Takes an event; returns the event to report or the tool call to answer. Raises ProtocolError."""
        self._messages += 1
        if self._messages > MESSAGES_MAX:
            raise ProtocolError(f"more than {MESSAGES_MAX} messages in one execution")
        if self.result is not None:
            raise ProtocolError("an event came after the result")
        kind = event.WhichOneof("kind")
        if event.number <= self.last_number and kind == "tool_call":
            # Repeated after a reconnection, because the daemon had no answer yet. The tool only runs once; its answer
            # is repeated until the daemon has it.
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
        if kind == "display":
            return self._display(event)
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
        # The event does not name the stream, so each stream gets the note.
        note = f"\n[... {omitted_bytes} bytes of output left out ...]\n"
        for pieces in (self._output.logs, self._output.stdout, self._output.stderr):
            pieces.append(note)
        self._output.chars += len(note)
        return OutputCutEvent(event.number, omitted_bytes)

    def _limit_warning(self, event: pb.Event) -> LimitWarningEvent:
        warning = event.limit_warning
        if warning.limit not in convert.LIMIT_NAMES:
            raise ProtocolError("a warning of an unknown limit")
        return LimitWarningEvent(event.number, warning.limit, warning.used, warning.budget)

    def _image(self, event: pb.Event) -> ImageEvent:
        if len(self._images) >= IMAGES_MAX:
            raise ProtocolError(f"more than {IMAGES_MAX} images in one execution")
        data = bytes(self._blobs.take(event.image.data))
        image = check_image(data, event.image.mime_type, event.image.source, pixels_left=self._pixels_left)
        if not image.refusal:
            self._pixels_left -= image.width * image.height
        image = replace(image, log_offset=self._output.chars)
        self._images.append(image)
        return ImageEvent(event.number, image)

    def _display(self, event: pb.Event) -> DisplayEvent:
        if len(self._displays) >= DISPLAYS_MAX:
            raise ProtocolError(f"more than {DISPLAYS_MAX} displays in one execution")
        packed, log_offset = self._blobs.take(event.display.data), self._output.chars
        try:
            display = Display(unpack(packed), log_offset)
        except ValueError as error:  # the program may have sent anything
            display = Display({}, log_offset, str(error))
        self._displays.append(display)
        return DisplayEvent(event.number, display)

    def _tool_call(self, event: pb.Event) -> ToolRequest:
        call = event.tool_call
        if not call.call_id:
            raise ProtocolError("a tool call without an id")
        arguments = self._blobs.take(call.arguments.packed)
        called = ToolCallEvent(event.number, call.call_id, call.name)
        return ToolRequest(called, arguments, lambda: self._blobs.release(call.arguments.packed))

    def lost(self, reason: str, generation: int) -> ExecutionResult:
        """Returns the result of an execution that was lost with its sandbox, as its daemon would have sent it."""
        wire = pb.ExecutionResult(
            outcome=pb.OUTCOME_LOST,
            variables_state=pb.VARIABLES_STATE_LOST,
            generation=generation,
            error=pb.ErrorDetail(type="SandboxLost", message=reason),
        )
        return self._result(wire)

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
            output = unpack_or_opaque(self._blobs.take(wire.output.packed), self.output_limits)
        return convert.from_wire(
            ExecutionResult,
            wire,
            execution_id=self.execution_id,
            output=output,
            is_final_answer=is_final_answer,
            logs="".join(self._output.logs),
            stdout="".join(self._output.stdout),
            stderr="".join(self._output.stderr),
            omitted_output_bytes=self._output.omitted_bytes,
            image_entries=tuple(self._images),
            displays=tuple(self._displays),
        )
