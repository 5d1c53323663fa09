"""A session as one HTML file: what is kept of its steps, in the form that `executor replay --html` writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from executor_api.recordings import payload_of
from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_client.replays.page import Page
from executor_client.replays.timeline import Frame, FrameKind, Timeline, enum_text, moment_text
from executor_server.console import formats
from executor_server.console.daemon import Daemon, DaemonError
from executor_server.console.following import VALUE_BYTES_MAX, Blobs, NotShown
from executor_server.console.pictures import PIXELS_MAX
from executor_server.console.text import clean

EXPORTS_MAX = 2
"""Files that are written at a time: images are decoded and written anew."""
EXPORT_CHARS_MAX = 64 << 20
"""Characters of a file after which the rest is left out."""


class Export:
    """Writes the file of one session."""

    def __init__(self, daemon: Daemon, view: admin_pb.SessionView) -> None:
        self._daemon = daemon
        self._view = view
        self._page = Page()
        self._begin_s = view.owned.session.create_time.ToMilliseconds() / 1000

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yields the text of the file. What the daemon refuses is said in it."""
        session = self._view.owned.session
        chars = 0
        about = f"Exported {moment_text(time.time())}."
        yield self._page.begin(f"Session {session.session_id}", about)
        for text in self._facts():
            yield self._page.add(Frame(0.0, 0, FrameKind.NOTE, text))
        try:
            async with aclosing(self._frames()) as frames:
                async for frame in frames:
                    text = await asyncio.to_thread(self._page.add, frame)  # images are decoded
                    chars += max(len(text), len(frame.text))
                    yield text
                    if chars > EXPORT_CHARS_MAX:
                        yield self._page.add(_note("The rest is left out: the file would be too large."))
                        break
        except DaemonError as error:
            ended = "The session has ended, and its steps are no longer kept."
            yield self._page.add(_note(ended if error.status == "NOT_FOUND" else error.message))
        yield self._page.end()

    def _facts(self) -> Iterator[str]:
        owned, session, use = self._view.owned, self._view.owned.session, self._view.use
        yield f"Tenant {owned.tenant}"
        yield f"Image {session.image}, backend {session.backend}, Python {session.python_version}"
        yield f"Created {formats.when(session.create_time)} UTC"
        if self._view.HasField("end_time"):
            yield f"Ended {formats.when(self._view.end_time)} UTC: {self._view.end_reason}"
        if session.policy.profile:
            yield f"Policy: profile {session.policy.profile}, version {session.policy.version}"
        yield f"{use.executions:,} executions, {use.cpu_time_s:.1f} s of CPU time"

    async def _frames(self) -> AsyncGenerator[Frame, None]:
        """Yields the frames of what is kept by now."""
        request = admin_pb.FollowSessionRequest(session_id=self._view.owned.session.session_id)
        step: _Step | None = None
        number = 0
        async with aclosing(self._daemon.admin.FollowSession(request)) as messages:
            async for message in messages:
                for part in message.parts:
                    if part.HasField("execution"):
                        number = number + 1 if number else part.execution.number
                        step = _Step(number, self._begin_s)
                    if step is not None:
                        for frame in await asyncio.to_thread(step.frames, part):
                            yield frame
                if message.complete:
                    break
        if step is not None and not step.has_ended:
            yield step.note("it had not ended")


def _note(text: str) -> Frame:
    return Frame(0.0, 0, FrameKind.NOTE, text)


class _Step:
    """Turns the messages about one execution into frames. Only the times of its begin and its end are known."""

    def __init__(self, number: int, begin_s: float) -> None:
        self._number = number
        self._begin_s = begin_s
        self._at_s = 0.0
        self._blobs = Blobs()
        self._timeline = Timeline(self._blobs.take, PIXELS_MAX)
        self._has_content = True
        self.has_ended = False

    def note(self, text: str) -> Frame:
        return Frame(self._at_s, self._number, FrameKind.NOTE, text)

    def frames(self, message: admin_pb.FollowExecutionResponse) -> Sequence[Frame]:
        found: list[Frame] = []
        if message.HasField("execution"):
            found.append(self._head(message))
        if message.missed_events:
            found.append(self.note(f"{message.missed_events:,} events are no longer kept"))
        for followed in message.events:
            found += self._event(followed)
        return found

    def _head(self, message: admin_pb.FollowExecutionResponse) -> Frame:
        view = message.execution
        self._has_content = message.has_content
        if view.HasField("start_time"):
            self._at_s = max(0.0, view.start_time.ToMilliseconds() / 1000 - self._begin_s)
        if not self._has_content:
            return self.note("the profile does not show contents (audit.view)")
        if not view.code:
            return self.note("the code is no longer kept")
        return Frame(self._at_s, self._number, FrameKind.CODE, str(clean(view.code)))

    def _event(self, followed: admin_pb.FollowedEvent) -> Iterator[Frame]:
        event, kind = followed.event, followed.event.WhichOneof("kind")
        if kind == "blob_chunk":
            self._blobs.add(event.blob_chunk)
            return
        if kind == "result":
            self.has_ended = True
            if not self._has_content:
                yield self._end(event.result)
                return
        elif not self._has_content:
            name = f" {event.tool_call.name}" if kind == "tool_call" else ""
            yield self.note(f"{str(kind).replace('_', ' ')}{name}, {formats.size(followed.withheld_bytes)} not shown")
            return
        payload = payload_of(event)
        size_bytes = 0 if payload is None else max(payload.blob.size_bytes, len(payload.inline))
        try:
            if kind != "image" and size_bytes > VALUE_BYTES_MAX:
                raise NotShown(f"a value of {size_bytes:,} bytes is not shown")
            for shown, text, image in self._timeline.event(
                event, took_s=event.result.usage.wall_time_s, final="the answer of a tool"
            ):
                yield Frame(self._at_s, self._number, shown, str(clean(text)), image)
        except NotShown as problem:
            yield self.note(str(problem))
            if kind == "result":
                yield self._end(event.result)

    def _end(self, result: pb.ExecutionResult) -> Frame:
        return Frame(self._at_s, self._number, FrameKind.END, enum_text(pb.Outcome, result.outcome, "OUTCOME_"))
