"""Recordings: those that the daemon made, and files from elsewhere, shown step by step with their times.

A recording is a hostile file. Its bounds and hashes are checked before anything is shown. One is read at a time, in a
thread, and only its images are kept, for a while.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_client._core.fetched_recording import FetchedRecording
from executor_client._core.terminal import last_states
from executor_client.errors import ProtocolError, RecordingError
from executor_client.recording import Recording
from executor_client.replays.timeline import Frame, FrameKind, completeness, frames, moment_text
from executor_server.console.access import UPLOAD_BYTES_MAX
from executor_server.console.console import Console
from executor_server.console.daemon import DaemonError
from executor_server.console.panel import Templates
from executor_server.console.pictures import Picture, checked
from executor_server.console.step_frames import PRINTED, frame_html
from executor_server.console.text import cut

FETCH_BYTES_MAX = 256 << 20
"""Bytes of a recording that is fetched from the daemon to be shown."""
FRAMES_MAX = 5_000
HTML_CHARS_MAX = 4 << 20
"""Frames and characters of a page after which the rest is left out."""
IMAGES_BYTES_MAX = 64 << 20
LISTED_MAX = 200
TEXT_CHARS_MAX = 16_000
"""Characters of one text, except code; a longer one is cut."""


@dataclass(frozen=True)
class Step:
    """The frames of an execution as HTML; number 0 is outside of executions."""

    number: int
    at_s: float
    is_continued: bool
    html: Markup


@dataclass(frozen=True)
class Shown:
    """A recording as a page shows it."""

    begun: str
    completeness: str
    steps: list[Step]
    images: list[tuple[Picture, bytes]]
    is_cut: bool


def routes(console: Console) -> list[BaseRoute]:
    reading = asyncio.Semaphore()

    async def listed(request: Request) -> Response:
        problem, kept = "", list[service_pb.RecordingInfo]()
        try:
            answer = await console.daemon.executor.ListRecordings(service_pb.ListRecordingsRequest())
            kept = list(answer.recordings)[::-1]
        except DaemonError as error:
            problem = error.message
        return console.page(
            request,
            "recordings.html",
            kept=kept[:LISTED_MAX],
            more=max(0, len(kept) - LISTED_MAX),
            problem=problem,
            most_bytes=UPLOAD_BYTES_MAX,
        )

    async def uploaded(request: Request) -> Response:
        file = request.state.form.get("recording")
        if not isinstance(file, UploadFile):
            raise HTTPException(400, "Choose a file.")
        _require_free(reading)
        async with reading:
            with tempfile.TemporaryDirectory(prefix="executor-console-") as directory:
                path = Path(directory) / "recording.rxr"
                await asyncio.to_thread(_copy, file, path)
                return await _page(request, path, file.filename or "file")

    async def kept(request: Request) -> Response:
        session_id = str(request.path_params["session_id"])
        _require_free(reading)
        async with reading:
            with tempfile.TemporaryDirectory(prefix="executor-console-") as directory:
                path = Path(directory) / "recording.rxr"
                await _fetch(console, session_id, path)
                return await _page(request, path, session_id)

    async def _page(request: Request, path: Path, name: str) -> Response:
        try:
            shown = await asyncio.to_thread(_read, console.fragment, path)
        except (RecordingError, OSError) as error:
            raise HTTPException(400, f"The file can't be shown: {error}".replace(str(path), "it")) from error
        for picture, pixels in shown.images:
            console.watches.pictures.hold(picture, pixels)
        return console.page(
            request,
            "recording.html",
            name=name,
            begun=shown.begun,
            completeness=shown.completeness,
            steps=shown.steps,
            is_cut=shown.is_cut,
        )

    return [
        Route("/recordings", listed),
        Route("/recordings", uploaded, methods=["POST"]),
        Route("/recordings/{session_id:str}", kept),
    ]


def _require_free(reading: asyncio.Semaphore) -> None:
    if reading.locked():
        raise HTTPException(503, "Another recording is being read. Try again in a minute.")


def _copy(file: UploadFile, path: Path) -> None:
    with path.open("xb") as copy:
        shutil.copyfileobj(file.file, copy)


async def _fetch(console: Console, session_id: str, path: Path) -> None:
    """Gets a recording from the daemon. Raises DaemonError and HTTPException."""
    request = service_pb.GetRecordingRequest(session_id=session_id)
    try:
        with FetchedRecording(path) as file:
            async with aclosing(console.daemon.executor.GetRecording(request)) as messages:
                async for message in messages:
                    if message.recording.size_bytes > FETCH_BYTES_MAX:
                        text = f"It has {message.recording.size_bytes:,} bytes, too many for a page."
                        raise HTTPException(413, f"{text} `executor record get {session_id}` fetches it.")
                    await asyncio.to_thread(file.take, message)
            await asyncio.to_thread(file.commit)
    except (ProtocolError, OSError) as error:
        raise HTTPException(502, f"The recording can't be fetched: {error}") from error


def _read(templates: Templates, path: Path) -> Shown:
    """Reads a recording and renders it. Raises RecordingError and OSError."""
    with Recording(path) as recording:
        first = next(recording.entries(), None)
        reader = _Reader(templates)
        steps = list(reader.steps(frames(recording)))
        begun = moment_text(0.0 if first is None else first.time_s)
        return Shown(begun, completeness(recording.manifest), steps, reader.images, reader.is_cut)


class _Reader:
    """Renders frames, up to the bounds of a page."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._chars = 0
        self._frames = 0
        self.images: list[tuple[Picture, bytes]] = []
        self._images_bytes = 0
        self.is_cut = False

    def steps(self, found: Iterable[Frame]) -> Iterator[Step]:
        for number, of_step in groupby(self._bounded(found), lambda frame: frame.step):
            rendered, at_s, is_continued = list[str](), 0.0, True
            for kind, same in groupby(of_step, lambda frame: frame.kind):
                group = list(same)
                if not rendered:
                    at_s, is_continued = group[0].at_s, kind is not FrameKind.CODE
                if kind in PRINTED:
                    text = last_states("".join(each.text for each in group))
                    rendered.append(self._text(kind, text))
                else:
                    rendered += [self._frame(each) for each in group]
            yield Step(number, at_s, is_continued, Markup("".join(rendered)))

    def _bounded(self, found: Iterable[Frame]) -> Iterator[Frame]:
        for frame in found:
            self._frames += 1
            self._chars += len(frame.text)
            if self._frames > FRAMES_MAX or self._chars > HTML_CHARS_MAX:
                self.is_cut = True
                return
            yield frame

    def _frame(self, frame: Frame) -> str:
        if frame.image is None:
            return self._text(frame.kind, frame.text)
        picture, pixels = checked(frame.image.data, frame.image.mime_type)
        if picture.refusal or self._images_bytes + len(pixels) > IMAGES_BYTES_MAX:
            refusal = picture.refusal or "there are too many"
            return self._text(FrameKind.NOTE, f"an image is not shown: {refusal}")
        self._images_bytes += len(pixels)
        self.images.append((picture, pixels))
        return self._templates("session_image.html", picture=picture, number=frame.step)

    def _text(self, kind: FrameKind, text: str) -> str:
        html = frame_html(self._templates, kind, text if kind is FrameKind.CODE else cut(text, TEXT_CHARS_MAX))
        self._chars += len(html) - len(text)
        return html
