"""A session as one HTML file: the steps that are still kept, in the form that `executor replay --html` writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client.replays.page import Page
from executor_client.replays.timeline import Frame, FrameKind, moment_text
from executor_client.results import Image
from executor_server.console import formats
from executor_server.console.daemon import Daemon, DaemonError
from executor_server.console.pictures import PIXELS_MAX
from executor_server.console.step_frames import StepFrames
from executor_server.console.text import clean

EXPORTS_MAX = 2
"""Files that are written at a time: images are decoded and encoded again."""
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
        """Yields the text of the file. It also reports what the daemon refuses."""
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
        """Yields the frames of the steps that are kept now."""
        request = admin_pb.FollowSessionRequest(session_id=self._view.owned.session.session_id)
        step: StepFrames | None = None
        number, at_s, has_ended = 0, 0.0, True

        def frame(kind: FrameKind, text: str, image: Image | None = None) -> Frame:
            return Frame(at_s, number, kind, str(clean(text)), image)

        async with aclosing(self._daemon.admin.FollowSession(request)) as messages:
            async for message in messages:
                for part in message.parts:
                    if part.HasField("execution"):
                        number = number + 1 if number else part.execution.number
                        at_s, has_ended = self._at_s(part), False
                        step = StepFrames(part, PIXELS_MAX)
                        for shown in step.head():
                            yield frame(*shown)
                    if part.missed_events:
                        yield frame(FrameKind.NOTE, f"{part.missed_events:,} events are no longer kept")
                    if step is not None:
                        for _, shown in await asyncio.to_thread(step.events, part):
                            yield frame(*shown)
                            has_ended = shown[0] is FrameKind.END
                if message.complete:
                    break
        if not has_ended:
            yield frame(FrameKind.NOTE, "it had not ended")

    def _at_s(self, part: admin_pb.FollowExecutionResponse) -> float:
        """Returns when an execution began; only the times of its begin and its end are known."""
        start = part.execution.start_time
        return max(0.0, start.ToMilliseconds() / 1000 - self._begin_s) if part.execution.HasField("start_time") else 0.0


def _note(text: str) -> Frame:
    return Frame(0.0, 0, FrameKind.NOTE, text)
