"""Text from a sandbox on a person's terminal.

A terminal obeys control characters: it can be made to hide text, rewrite lines, set titles, even type. So they are
shown instead of sent. What goes to a file or a pipe is passed as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from executor_client.events import (
    ExecutionEvent,
    ImageEvent,
    LimitWarningEvent,
    LogEvent,
    OutputCutEvent,
    QueuedEvent,
)
from executor_client.results import ExecutionResult, Image, VariablesState
from executor_client.waits import Wait

# Control characters but newline and tab; those that turn the direction of text; line separators; lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_ARTIFACTS_SHOWN = 10
_IMAGE_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg"}


def shown(text: str) -> str:
    """The text with every character that a terminal would act on written as an escape."""
    return escaped(text.replace("\r\n", "\n"))


def escaped(text: str) -> str:
    """The text with each unsafe character made visible, as `\\x1b` or `\\u202e`."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def encodable(text: str, encoding: str) -> str:
    """The text with whatever the encoding has no form for written as an escape."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: one for each row, whatever is in its cells."""
    safe = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in safe]


class Console:
    """Writes what happens in an execution as it happens: output to stdout and stderr, remarks to stderr.

    Images are saved into `image_dir`, or only mentioned where that is None.
    """

    def __init__(self, *, image_dir: Path | None) -> None:
        self._image_dir = image_dir
        self._images = 0

    def show_event(self, event: ExecutionEvent) -> None:
        """To be given to `execute` as `on_event`."""
        match event:
            case LogEvent(stream="stdout"):
                self._write(sys.stdout, event.text)
            case LogEvent():
                self._write(sys.stderr, event.text)
            case OutputCutEvent():
                self.remark(f"{event.omitted_bytes} bytes of output left out")
            case QueuedEvent() if event.ahead:
                self.remark(f"waiting for {event.ahead} other executions")
            case ImageEvent():
                self._show_image(event.image)
            case LimitWarningEvent():
                self.remark(f"warning: {event.used:,} of {event.budget:,} {event.limit} are used up")

    def show_wait(self, wait: Wait) -> None:
        """To be given to a client as `on_wait`. For a person only: nobody reads the progress in a file."""
        if sys.stderr.isatty():
            self.remark(str(wait))

    def show_end(self, result: ExecutionResult) -> None:
        """Says why a program failed and what became of its variables."""
        left_well = result.error is not None and result.error.exit_code == 0  # sys.exit() says that all is well
        if not result.succeeded and not left_well:
            self.fail(result.outcome.value.replace("_", " "))
            if result.error is not None:
                text = result.error.traceback or f"{result.error.type}: {result.error.message}"
                self._write(sys.stderr, text.rstrip("\n") + "\n")
        if result.state is VariablesState.RESET:
            self.remark("the interpreter was replaced, its variables are gone")
        elif result.state is VariablesState.LOST:
            self.remark("the sandbox is gone")

    def show_artifacts(self, result: ExecutionResult) -> None:
        """Names the files that the program made or changed, in one line."""
        names = [repr(artifact.path)[1:-1] for artifact in result.artifacts]
        if names:
            more = len(names) > _ARTIFACTS_SHOWN or result.artifacts_truncated
            self.remark(f"made or changed: {', '.join(names[:_ARTIFACTS_SHOWN])}{' and more' if more else ''}")

    def show_value(self, value: object) -> None:
        """A value, as an interactive Python shows it."""
        self._write(sys.stdout, f"{value!r}\n")

    def remark(self, text: str) -> None:
        self._write(sys.stderr, f"[{text}]\n")

    def fail(self, text: str) -> None:
        self._write(sys.stderr, f"executor: {text}\n")

    def _show_image(self, image: Image) -> None:
        if image.problem:
            self.remark(f"an image was refused: {image.problem}")
        elif self._image_dir is None:
            self.remark(f"an image of {image.width}x{image.height} pixels; --save-images DIR keeps them")
        else:
            self._images += 1
            self._image_dir.mkdir(parents=True, exist_ok=True)
            path = self._image_dir / f"image-{self._images}{_IMAGE_SUFFIXES[image.mime_type]}"
            path.write_bytes(image.data)
            self.remark(f"saved {path}")

    def _write(self, stream: TextIO, text: str) -> None:
        if stream.isatty():
            text = shown(text)
        stream.write(encodable(text, stream.encoding or "utf-8"))
        stream.flush()
