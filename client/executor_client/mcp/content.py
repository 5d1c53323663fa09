"""Converts the output of executions, and files, to MCP's types: text, images, and bytes as embedded resources.

All of it becomes part of a model's context, so everything has a limit, and a note marks each cut.
"""

from __future__ import annotations

import base64
import io
import mimetypes
import sys
import urllib.parse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from executor_client._core.failure_text import headline, short_traceback, shortened
from executor_client._core.images import check_image
from executor_client._core.limits import IMAGE_PIXELS_MAX
from executor_client._core.terminal import last_states, sendable
from executor_client._core.value_text import value_text
from executor_client.events import ExecutionEvent, ImageEvent, LimitWarningEvent, LogEvent, OutputCutEvent
from executor_client.file_results import FileInfo
from executor_client.mcp.sdk import (
    CallToolResult,
    ContentBlock,
    TextContent,
    file_block,
    image_block,
    text_block,
    tool_result,
)
from executor_client.results import ExecutionResult, Image, Limits, VariablesState

if TYPE_CHECKING:
    import PIL.Image

LOG_CHARS_MAX = 50_000
VALUE_CHARS_MAX = 20_000
FILE_CHARS_MAX = 50_000
IMAGES_MAX = 8
"""Images of one execution."""
IMAGE_BYTES_MAX = 768 << 10
"""Bytes of one image before base64; hosts refuse results of some megabytes."""
IMAGE_SIDE_MAX = 1568
"""Pixels of the longer side of an image; models scale larger images down themselves."""
FILES_LISTED_MAX = 20

_NEWLINE = "\n"


class Transcript:
    """Collects the output of an execution from its events, in their order."""

    def __init__(self) -> None:
        self._parts: list[list[str] | Image] = []
        self._images = 0

    def add(self, event: ExecutionEvent) -> None:
        match event:
            case LogEvent():
                self._text(event.text)
            case OutputCutEvent():
                self._text(f"\n[... {event.omitted_bytes:,} bytes of output left out ...]\n")
            case LimitWarningEvent():
                self._text(f"\n[warning: {event.used:,} of {event.budget:,} {event.limit} are used up]\n")
            case ImageEvent() if event.image.refusal:
                self._text(f"\n[an image could not be shown: {event.image.refusal}]\n")
            case ImageEvent():
                self._images += 1
                if self._images <= IMAGES_MAX:
                    self._parts.append(event.image)

    def _text(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, list):
            last.append(text)
        else:
            self._parts.append([text])

    def blocks(self) -> list[ContentBlock]:
        """Returns texts and images in their order, the texts cut to LOG_CHARS_MAX in total."""
        texts = ["" if isinstance(part, Image) else last_states("".join(part)) for part in self._parts]
        chars = sum(map(len, texts))
        blocks: list[ContentBlock] = []
        for part, text in zip(self._parts, texts, strict=True):
            if isinstance(part, Image):
                blocks += image_blocks(part)
            else:
                share = len(text) if chars <= LOG_CHARS_MAX else LOG_CHARS_MAX * len(text) // chars
                blocks.append(_text(shortened(text, share)))
        if self._images > IMAGES_MAX:
            blocks.append(_text(f"[{self._images - IMAGES_MAX} more images are not shown]"))
        return blocks


def execution_content(
    result: ExecutionResult,
    transcript: Transcript,
    code: str,
    limits: Limits,
    *,
    session: str,
    replaced: bool,
    note: str = "",
) -> CallToolResult:
    """Returns the result of an execution for a model: its output, its value or failure, and the state of the session.

    `replaced` says that the interpreter was replaced since the last execution. `note` is the last line.
    """
    blocks = transcript.blocks()
    lines: list[str] = []
    if result.succeeded:
        blocks += _value_blocks(result.output)
    else:
        lines += [headline(result, code, limits), short_traceback(result)]
    if result.artifacts:
        lines.append(f"Files created or changed: {_files_listed(result.artifacts, more=result.artifacts_truncated)}")
    lines.append(_aftermath(result.state, failed=not result.succeeded, replaced=replaced))
    ending = f"[{result.outcome.value.replace('_', ' ')} after {result.usage.wall_time_s:.2f} s in session {session!r}]"
    text = _NEWLINE.join(filter(None, [*lines, ending, note]))
    return tool_result([*blocks, _text(text)], is_error=not result.succeeded)


def _value_blocks(value: object) -> list[ContentBlock]:
    if value is None:
        return []
    if (image := _as_image(value)) is not None:
        return [_text("Value:"), *_encoded(image, note="")]
    text = value_text(value, VALUE_CHARS_MAX)
    return [_text(f"Value:\n{text}" if "\n" in text else f"Value: {text}")]  # a table's columns stay aligned


def _text(text: str) -> TextContent:
    return text_block(sendable(text))


def _as_image(value: object) -> PIL.Image.Image | None:
    # If PIL was never imported, the value cannot be one of its images.
    library = sys.modules.get("PIL.Image")
    return value if library is not None and isinstance(value, library.Image) else None


def _files_listed(files: Sequence[FileInfo], *, more: bool) -> str:
    listed = [f"{file.path!r} ({file.size_bytes:,} bytes)" for file in files[:FILES_LISTED_MAX]]
    return ", ".join(listed) + (" and more" if more or len(files) > FILES_LISTED_MAX else "")


def _aftermath(state: VariablesState, *, failed: bool, replaced: bool) -> str:
    if state is VariablesState.LOST:
        return "The sandbox is lost, with all variables and files. reset_session starts a new, empty one."
    if state is VariablesState.RESET:
        return (
            "The interpreter had to be restarted: all variables, functions and imports are lost and must be defined "
            "again. The files are still there."
        )
    if replaced:
        return (
            "Before this call the interpreter had to be restarted: all earlier variables, functions and imports are "
            "lost and must be defined again. The files are still there."
        )
    return "Variables, functions and imports defined before the failure are kept." if failed else ""


# ---------------------------------------------------------------------------------------------------------------------
# Images and files


def image_blocks(image: Image) -> list[ContentBlock]:
    """Returns an image; scales it down, with a note, if it is too large for a model."""
    if image.pil is None:
        return [_text(f"[an image could not be shown: {image.problem}]")]
    if len(image.data) <= IMAGE_BYTES_MAX and max(image.width, image.height) <= IMAGE_SIDE_MAX:
        return [image_block(_base64(image.data), image.mime_type)]
    return _encoded(image.pil, note=f"[scaled down from {image.width}x{image.height} pixels]")


def _encoded(image: PIL.Image.Image, *, note: str) -> list[ContentBlock]:
    """Encodes an image as PNG, or as JPEG if the PNG is too large; halves the sides until it fits."""
    if not 0 < image.width * image.height <= IMAGE_PIXELS_MAX:
        return [_text(f"[an image of {image.width}x{image.height} pixels cannot be shown]")]
    try:
        scaled = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA")
    except ValueError:
        return [_text(f"[an image of mode {image.mode} cannot be shown]")]
    if max(scaled.size) > IMAGE_SIDE_MAX:
        note = note or f"[scaled down from {image.width}x{image.height} pixels]"
        scaled = scaled.copy()
        scaled.thumbnail((IMAGE_SIDE_MAX, IMAGE_SIDE_MAX))
    notes = [_text(note)] if note else []
    while True:
        for mime_type in ("image/png", "image/jpeg"):
            picture = scaled if mime_type == "image/png" else scaled.convert("RGB")
            buffer = io.BytesIO()
            picture.save(buffer, format=mime_type.removeprefix("image/"))
            if buffer.tell() <= IMAGE_BYTES_MAX:
                return [image_block(_base64(buffer.getvalue()), mime_type), *notes]
        scaled = scaled.resize((max(1, scaled.width // 2), max(1, scaled.height // 2)))


def file_content(session: str, path: str, data: bytes) -> CallToolResult:
    """Returns a file: as an image if it is one that is safe to decode, as text if it is UTF-8, else as bytes."""
    for mime_type, start in (("image/png", b"\x89PNG"), ("image/jpeg", b"\xff\xd8\xff")):
        if data.startswith(start):
            image = check_image(data, mime_type, "file")
            if image.pil is not None:
                return tool_result(image_blocks(image))
    if (text := _as_text(data)) is not None:
        return tool_result([_text(shortened(text, FILE_CHARS_MAX))])
    mime_type = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return tool_result([file_block(file_uri(session, path), _base64(data), mime_type)])


def _as_text(data: bytes) -> str | None:
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def file_uri(session: str, path: str) -> str:
    """Returns the address of a file as an MCP resource."""
    return f"sandbox://{session}/{urllib.parse.quote(path)}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
