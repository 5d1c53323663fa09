"""The messages about one execution as frames: for the page of its session, and for the file that it is exported to.

An attacker may control what an execution sends: blobs, values and their number are bounded here. If the profile does
not show contents, the frames report what happened without them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_client.replays.timeline import FrameKind, Shown, Timeline
from executor_server.console import formats
from executor_server.console.highlight import highlight
from executor_server.console.panel import Templates
from executor_server.console.pictures import IMAGE_BYTES_MAX

PRINTED = (FrameKind.OUTPUT, FrameKind.ERRORS)
VALUE_BYTES_MAX = 256 * 1024
"""Bytes of a value that is decoded to be shown."""
BLOBS_BYTES_MAX = 2 * IMAGE_BYTES_MAX
BLOBS_MAX = 64
"""Bytes of blobs of one execution that have arrived in part, and their number."""

_WITHOUT_CONTENTS = ("queued", "output_cut", "limit_warning")


class NotShown(Exception):
    """A payload that is too large, or did not arrive whole; the message says so."""


@dataclass
class Blobs:
    """Blobs that arrive in pieces. The oldest are dropped when they exceed the bounds."""

    data: OrderedDict[str, bytearray] = field(default_factory=OrderedDict)
    size_bytes: int = 0

    def add(self, chunk: pb.BlobChunk) -> None:
        piece = chunk.data
        self.data.setdefault(chunk.blob_id, bytearray()).extend(piece)
        self.size_bytes += len(piece)
        while self.size_bytes > BLOBS_BYTES_MAX or len(self.data) > BLOBS_MAX:
            _, gone = self.data.popitem(last=False)
            self.size_bytes -= len(gone)

    def take(self, payload: pb.Payload) -> bytes:
        """Returns the bytes of a payload. Raises NotShown."""
        if payload.WhichOneof("content") != "blob":
            return payload.inline
        data = self.data.pop(payload.blob.blob_id, bytearray())
        self.size_bytes -= len(data)
        if len(data) != payload.blob.size_bytes:
            raise NotShown(f"{payload.blob.size_bytes:,} bytes are not shown")
        return bytes(data)


class StepFrames:
    """Turns the messages about one execution into frames. Decoding values may take a while: use it in a thread."""

    def __init__(self, first: admin_pb.FollowExecutionResponse, pixels_max: int) -> None:
        """`first` is the first message. `pixels_max` bounds all its images together."""
        self.has_content = first.has_content
        self._view = first.execution
        self._blobs = Blobs()
        self._bytes_max = 0
        self._timeline = Timeline(self._payload, pixels_max)

    def head(self) -> Iterator[Shown]:
        """Yields the code, or why it is missing."""
        view, size = self._view, formats.size(self._view.code_bytes)
        if view.code:
            yield FrameKind.CODE, view.code, None
            if view.code_bytes > len(view.code.encode()):
                yield FrameKind.NOTE, f"Cut: the code has {size}.", None
        elif self.has_content:
            yield FrameKind.NOTE, "The code is no longer kept.", None
        else:
            of_code = f"{size} of code. " if view.code_bytes else ""
            yield FrameKind.NOTE, f"{of_code}The profile does not show contents (audit.view).", None

    def events(self, message: admin_pb.FollowExecutionResponse) -> list[tuple[admin_pb.FollowedEvent, Shown]]:
        """Returns the events of a message with their frames; the last frame of a result is its END."""
        return [(followed, shown) for followed in message.events for shown in self._event(followed)]

    def _event(self, followed: admin_pb.FollowedEvent) -> list[Shown]:
        event, kind = followed.event, followed.event.WhichOneof("kind")
        if kind == "blob_chunk":
            self._blobs.add(event.blob_chunk)
            return []
        if not self.has_content and kind not in _WITHOUT_CONTENTS:
            return list(self._without_contents(event, followed.withheld_bytes))
        self._bytes_max = BLOBS_BYTES_MAX if kind == "image" else VALUE_BYTES_MAX
        try:
            return self._shown(event)
        except NotShown as problem:
            if kind == "tool_call":
                return [(FrameKind.CALL, f"{event.tool_call.name}(…)  {problem}", None)]
            end = self._end(event.result) if kind == "result" else ()
            return [(FrameKind.NOTE, str(problem), None), *end]

    def _without_contents(self, event: pb.Event, withheld_bytes: int) -> Iterator[Shown]:
        match event.WhichOneof("kind"):
            case "log":
                kind = FrameKind.ERRORS if event.log.stream == pb.OUTPUT_STREAM_STDERR else FrameKind.OUTPUT
                yield kind, f"{withheld_bytes:,} bytes were printed\n", None
            case "image":
                yield FrameKind.NOTE, "drew an image", None
            case "display":
                yield FrameKind.NOTE, "displayed an object", None
            case "tool_call":
                yield FrameKind.CALL, f"{event.tool_call.name}(…)", None
            case "result":
                error = event.result.error
                if error.type:
                    line = f", line {error.line}" if error.line else ""
                    yield FrameKind.NOTE, f"{error.type}{line}", None
                yield from self._end(event.result)

    def _shown(self, event: pb.Event) -> list[Shown]:
        took_s = event.result.usage.wall_time_s
        return list(self._timeline.event(event, took_s=took_s, final="the answer of a tool"))

    def _end(self, result: pb.ExecutionResult) -> list[Shown]:
        """Returns how an execution ended, without its value and its error."""
        end = pb.ExecutionResult(outcome=result.outcome, variables_state=result.variables_state, usage=result.usage)
        return self._shown(pb.Event(result=end))[-1:]

    def _payload(self, payload: pb.Payload) -> bytes:
        data = self._blobs.take(payload)
        if len(data) > self._bytes_max:
            raise NotShown(f"a value of {len(data):,} bytes is not shown")
        return data


def frame_html(templates: Templates, kind: FrameKind, text: str) -> str:
    """Returns a frame's text as HTML."""
    if kind is FrameKind.CODE:
        return templates("session_step_code.html", code=highlight(text))
    return templates("session_event.html", kind=kind.value, text=text)
