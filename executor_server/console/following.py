"""Follows the sessions that have viewers, once for all viewers of a session.

A `Watch` follows the executions of its session, whose events it writes into the feed, and keeps the panel with the
session's state up to date. It ends some time after its last viewer has left. An attacker may control what an execution
sends: texts and their number are bounded here before they become HTML, and blobs and values in `step_frames`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_client._core.terminal import last_states
from executor_client.replays.timeline import FrameKind, enum_text
from executor_client.results import Image
from executor_server.console import formats, panel
from executor_server.console.daemon import Changes, Daemon, DaemonError, again
from executor_server.console.feed import STEPS_MAX, Feed, Part, Step
from executor_server.console.panel import Templates
from executor_server.console.pictures import Pictures, checked
from executor_server.console.step_frames import PRINTED, StepFrames, frame_html

WATCHES_MAX = 32
"""Sessions that are followed at a time. Each takes at most 5 MiB."""
LINGER_S = 30.0
"""Least seconds for which a session is followed after its last viewer has left, unless another needs its place."""
REFRESH_MIN_S = 2.0
REFRESH_S = 15.0
"""Seconds between two checks of a session's processes, ports and connections: at least and at most."""
LAST_STEPS_S = 2.0
"""Seconds for the last steps of a session that has ended to arrive."""
REFUSED_RETRY_S = 30.0
"""Seconds until a call that the daemon refused is tried again."""
TEXT_CHARS_MAX = 8_000
"""Characters of output in one part. What was printed before is in the parts before."""
CALLS_MAX = 1_024
"""Open tool calls of one execution, as the daemon allows."""
CALL_CHARS_MAX = 4_000
ARTIFACTS_SHOWN = 100

_log = structlog.get_logger(__name__)


class TooMany(Exception):
    """Too many sessions are followed to add another one."""


@dataclass
class _Printed:
    """The part that output goes to."""

    kind: FrameKind
    part: Part
    text: str = ""
    withheld_bytes: int = 0


@dataclass(frozen=True)
class _Call:
    """A tool call, and the part that shows it."""

    part: Part
    text: str
    time_text: str


class StepWriter:
    """Writes one execution into the feed."""

    def __init__(
        self,
        feed: Feed,
        templates: Templates,
        pictures: Pictures,
        number: int,
        first: admin_pb.FollowExecutionResponse,
    ) -> None:
        """`first` is the first message about it, which `take` gets next."""
        self._feed = feed
        self._templates = templates
        self._pictures = pictures
        self._number = number
        self._view = first.execution
        self._frames = StepFrames(first, sys.maxsize)  # a page decodes no image
        self._missed = 0
        self._printed: _Printed | None = None
        self._calls: dict[str, _Call] = {}
        self._is_live = False  # the events of the first message happened at an unknown time
        self._outcome = ""
        self._result: pb.ExecutionResult | None = None
        self._step: Step = feed.begin()
        feed.replace(self._step.code, "".join(self._html(kind, text) for kind, text, _ in self._frames.head()))

    async def take(self, message: admin_pb.FollowExecutionResponse) -> None:
        """Writes a message into the feed."""
        self._view.state = message.state
        self._missed += message.missed_events
        for followed, (kind, text, image) in await asyncio.to_thread(self._frames.events, message):
            if kind in PRINTED:
                self._print(kind, text, followed.withheld_bytes)
                continue
            self._end_printed()
            if kind is FrameKind.CALL:
                self._call(followed.event.tool_call.call_id, text)
            elif kind is FrameKind.END:
                self._end(followed.event.result)
            elif image is not None:
                self._image(image)
            else:
                self._add(kind, text)
        self._write_printed()
        for answer in message.answers:
            if (call := self._calls.pop(answer.call_id, None)) is not None:
                self._write_call(call, formats.seconds(answer.wait_s))
        if self.is_done:
            for call in self._calls.values():
                self._write_call(call, "an unknown time")
        self._write_head()
        self._is_live = True

    @property
    def is_done(self) -> bool:
        """True when it has its result."""
        return self._result is not None

    @property
    def execution_id(self) -> str:
        return self._view.execution_id

    @property
    def code(self) -> str:
        return self._view.code

    def remove(self) -> None:
        """Takes the execution out of the feed."""
        self._feed.remove(self._step)

    def _write_head(self) -> None:
        head = self._templates(
            "session_step_head.html",
            number=self._number,
            view=self._view,
            state=enum_text(admin_pb.ExecutionState, self._view.state, "EXECUTION_STATE_"),
            outcome=self._outcome,
            result=self._result,
        )
        self._feed.replace(self._step.head, head)
        if self._step.dropped or self._missed:
            notes = self._templates("session_step_notes.html", dropped=self._step.dropped, missed=self._missed)
            self._feed.replace(self._step.notes, notes)

    # -- output ------------------------------------------------------------------------------------------------------

    def _print(self, kind: FrameKind, text: str, withheld_bytes: int) -> None:
        if self._printed is not None and self._printed.kind is not kind:
            self._end_printed()
        rest = text if self._frames.has_content else ""
        while True:
            if self._printed is None:
                self._printed = _Printed(kind, self._feed.add(self._step, ""))
            printed = self._printed
            room = TEXT_CHARS_MAX - len(printed.text)
            printed.text += rest[:room]
            printed.withheld_bytes += withheld_bytes
            rest, withheld_bytes = rest[room:], 0
            if not rest:
                return
            self._end_printed()

    def _write_printed(self) -> None:
        if self._printed is None:
            return
        hidden = f"{self._printed.withheld_bytes:,} bytes were printed"
        text = last_states(self._printed.text) if self._frames.has_content else hidden
        self._feed.replace(self._printed.part, self._html(self._printed.kind, text), self._step)

    def _end_printed(self) -> None:
        self._write_printed()
        self._printed = None

    # -- other events ------------------------------------------------------------------------------------------------

    def _image(self, image: Image) -> None:
        picture, pixels = checked(image.data, image.mime_type)
        self._pictures.hold(picture, pixels)
        if picture.refusal:
            self._add(FrameKind.NOTE, f"an image was refused: {picture.refusal}")
        else:
            image_html = self._templates("session_image.html", picture=picture, number=self._number)
            self._feed.add(self._step, image_html)

    def _call(self, call_id: str, text: str) -> None:
        made = _Call(self._feed.add(self._step, ""), text[:CALL_CHARS_MAX], self._time())
        if len(self._calls) >= CALLS_MAX:
            del self._calls[next(iter(self._calls))]
        self._calls[call_id] = made
        self._write_call(made, "")

    def _write_call(self, call: _Call, took: str) -> None:
        """Shows a call; `took` is empty while it waits for its answer."""
        self._feed.replace(call.part, self._templates("session_call.html", call=call, took=took), self._step)

    def _end(self, result: pb.ExecutionResult) -> None:
        self._result = result
        self._outcome = enum_text(pb.Outcome, result.outcome, "OUTCOME_")
        self._view.state = admin_pb.EXECUTION_STATE_ENDED
        end = self._templates(
            "session_step_end.html",
            result=result,
            variables=enum_text(pb.VariablesState, result.variables_state, "VARIABLES_STATE_"),
            is_kept=result.variables_state == pb.VARIABLES_STATE_KEPT,
            files=result.artifacts[:ARTIFACTS_SHOWN],
            more_files=max(0, len(result.artifacts) - ARTIFACTS_SHOWN),
        )
        self._feed.replace(self._step.end, end)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _add(self, kind: FrameKind, text: str) -> None:
        for start in range(0, max(len(text), 1), TEXT_CHARS_MAX):
            self._feed.add(self._step, self._html(kind, text[start : start + TEXT_CHARS_MAX]))

    def _html(self, kind: FrameKind, text: str) -> str:
        return frame_html(self._templates, kind, text)

    def _time(self) -> str:
        if not self._is_live or not self._view.HasField("start_time"):
            return ""
        return f"{max(0.0, time.time() - self._view.start_time.ToMilliseconds() / 1000):.1f} s"


class Watch:
    """A session that is followed. `changes` counts what happens to its feed."""

    def __init__(self, session_id: str, daemon: Daemon, templates: Templates, pictures: Pictures) -> None:
        self.session_id = session_id
        self.feed = Feed()
        self.changes = Changes()
        self.viewers = 0
        self.used_at = time.monotonic()
        self.has_ended = False
        self.caught_up = asyncio.Event()
        """Set when the executions that had ended are in the feed."""
        self._daemon = daemon
        self._templates = templates
        self._pictures = pictures
        self._inspected: panel.Inspected | None = None
        self._writer: StepWriter | None = None  # of the last execution
        self._number = 0  # of that
        self._last_id = ""  # the last execution that has ended
        self._task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """True when it no longer follows: the session has ended, or has no viewers."""
        return self._task.done()

    @property
    def is_unseen(self) -> bool:
        return not self.viewers and time.monotonic() - self.used_at > LINGER_S

    async def changes_since(self, version: int) -> AsyncIterator[str]:
        """Yields the changes of the feed as HTML (see `Feed.changes`), until the session has ended."""
        self.viewers += 1
        try:
            while True:
                count = self.changes.count
                if self.feed.version > version:
                    html, version = self.feed.changes(version), self.feed.version
                    yield html
                elif self.is_over:
                    return
                else:
                    await self.changes.after(count)
        finally:
            self.viewers -= 1
            self.used_at = time.monotonic()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(again(self._follow, self._failed))
                inspecting = again(self._inspect, self._failed)
                others = [tasks.create_task(each) for each in (inspecting, self._heed_approvals())]
                await self._heed_changes()
                if self.has_ended and self.caught_up.is_set():
                    await asyncio.wait([following], timeout=LAST_STEPS_S)
                for task in (following, *others):
                    task.cancel()
        except Exception:  # noqa: BLE001 - no other owner would report it
            _log.exception("following_failed", session_id=self.session_id)
            self._note("The console failed; its log has the reason. Load the page again.")
        finally:
            if self.has_ended and not self.feed.steps:
                self._note("Its steps are no longer kept. If it was recorded, it is among the recordings.")
            self.caught_up.set()
            self.changes.notify()

    def _failed(self, error: DaemonError) -> float:
        if error.is_away or error.status == "NOT_FOUND":  # the table of sessions shows that
            return 0.0
        self._note(error.message)
        self.caught_up.set()
        return REFUSED_RETRY_S

    def _note(self, text: str) -> None:
        self.feed.replace(self.feed.note, self._templates("session_note.html", text=text) if text else "")
        self.changes.notify()

    # -- the session -------------------------------------------------------------------------------------------------

    async def _heed_changes(self) -> None:
        """Shows the session as the table has it, until the session has ended or has no viewers."""
        shown, changes = None, self._daemon.sessions_changes
        while not self.is_unseen:
            seen, view = changes.count, self._daemon.sessions.get(self.session_id)
            if view is None:
                return
            if view is not shown:
                shown = view
                self._show()
            if view.HasField("end_time"):
                self.has_ended = True
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await changes.after(seen)

    async def _heed_approvals(self) -> None:
        seen = self._daemon.approvals_changes.count
        while True:
            seen = await self._daemon.approvals_changes.after(seen)
            self._show()

    async def _inspect(self) -> None:
        """Requests what the table lacks, after changes and now and then. Each request is audited."""
        daemon = self._daemon
        while True:
            seen, view = daemon.sessions_changes.count, daemon.sessions.get(self.session_id)
            self._inspected = await panel.ask(daemon.admin, self.session_id)
            self._show()
            await asyncio.sleep(REFRESH_MIN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S - REFRESH_MIN_S):
                    while daemon.sessions.get(self.session_id) is view:
                        seen = await daemon.sessions_changes.after(seen)

    def _show(self) -> None:
        view = self._daemon.sessions.get(self.session_id)
        if view is not None:
            html = panel.html(self._templates, view, self._inspected, self._daemon.approvals)
            self.feed.replace(self.feed.panel, html)
            self.changes.notify()

    # -- its executions ----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Follows the newest executions of the session and all that come, until it has ended."""
        admin = self._daemon.admin
        if not self._last_id:  # older ones than the feed keeps are not even read
            listing = await admin.ListExecutions(admin_pb.ListExecutionsRequest(session_id=self.session_id))
            if len(listing.executions) > STEPS_MAX:
                self._last_id = listing.executions[-STEPS_MAX - 1].execution_id
        request = admin_pb.FollowSessionRequest(session_id=self.session_id, after_execution_id=self._last_id)
        async for message in admin.FollowSession(request):
            if self.feed.note.html:
                self._note("")
            for part in message.parts:
                await self._take(part)
            self.changes.notify()
            if message.complete:
                self.caught_up.set()

    async def _take(self, part: admin_pb.FollowExecutionResponse) -> None:
        if part.HasField("execution"):
            if self._writer is not None and not self._writer.is_done:  # it is sent again after a reconnection
                self._writer.remove()
                self._number -= 1
                if not part.execution.code and self._writer.execution_id == part.execution.execution_id:
                    part.execution.code = self._writer.code  # a restarted daemon no longer has it
            self._number = self._number + 1 if self._number else part.execution.number
            templates = partial(self._templates, session_id=self.session_id)
            self._writer = StepWriter(self.feed, templates, self._pictures, self._number, part)
        if self._writer is not None:
            await self._writer.take(part)
            if self._writer.is_done:
                self._last_id = self._writer.execution_id


class Watches:
    """The sessions that are followed."""

    def __init__(self, daemon: Daemon, templates: Templates) -> None:
        self.pictures = Pictures()
        self._daemon = daemon
        self._templates = templates
        self._watches: dict[str, Watch] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def of(self, session_id: str) -> Watch:
        """Returns the watch of a session, and starts it if there is none. Raises TooMany."""
        watch = self._watches.get(session_id)
        if watch is None or (watch.is_over and not watch.has_ended):
            if len(self._watches) >= WATCHES_MAX:
                self._end_one()
            watch = self._watches[session_id] = Watch(session_id, self._daemon, self._templates, self.pictures)
        watch.used_at = time.monotonic()
        return watch

    def _end_one(self) -> None:
        """Ends the watch that has been without viewers for the longest time. Raises TooMany if each has some."""
        unseen = [each for each in self._watches.values() if not each.viewers]
        if not unseen:
            raise TooMany(f"{WATCHES_MAX} sessions are being watched; close a page of another session")
        gone = min(unseen, key=lambda each: each.used_at)
        del self._watches[gone.session_id]
        ending = asyncio.create_task(gone.stop())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Ends all watches."""
        await asyncio.gather(*self._ending, *(each.stop() for each in self._watches.values()))
