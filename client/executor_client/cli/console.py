"""The output of `executor`: the program's on stdout and stderr, our own remarks on stderr.

Output of a sandbox is untrusted. Control characters are shown as escapes wherever a terminal may interpret them: on a
terminal, and in a pipe while a person watches (`executor run x.py | tail`), because the pipe may lead to the terminal.
Files, and pipes in scripts, get the text unchanged; with `raw`, every stream does.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from executor_api.disk import is_disk_full
from executor_client._core.local import NewFile
from executor_client._core.terminal import encodable, shown
from executor_client._core.value_text import value_text
from executor_client.cli.progress import ProgressReport
from executor_client.events import (
    DisplayEvent,
    ExecutionEvent,
    ImageEvent,
    LimitWarningEvent,
    LogEvent,
    OutputCutEvent,
    QueuedEvent,
)
from executor_client.results import ExecutionResult, Image, Outcome, VariablesState
from executor_client.waits import Wait, WaitKind

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

VALUE_CHARS_MAX = 1_000_000
"""Characters of a value that are printed; a terminal takes a second for them."""

_ARTIFACTS_SHOWN = 10
_IMAGE_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg"}
_FAILURE = "bold red"
_REMARK = "dim"


class Console:
    """Prints the events of an execution as they arrive.

    Saves images in `image_dir`, or only mentions them if that is None. With `raw`, prints the program's output
    unchanged, even to a terminal.
    """

    def __init__(self, *, image_dir: Path | None = None, raw: bool = False) -> None:
        self._image_dir = image_dir
        self._raw = raw
        self._images = 0
        self._progress = ProgressReport(self.remark)
        self.asks = False
        """True if a person is asked for approvals here, so that these waits need no remark."""

    def keep_images(self, directory: Path) -> None:
        """Saves images there from now on."""
        self._image_dir = directory

    def show_event(self, event: ExecutionEvent) -> None:
        """Writes an event of an execution. The `on_event` of `execute`."""
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
            case DisplayEvent() if page := event.display.data.get("text/html"):
                self._keep("display-{}.html", page.encode("utf-8", "replace"), "an object with HTML output")
            case LimitWarningEvent():
                self.remark(f"warning: {event.used:,} of {event.budget:,} {event.limit} are used up")

    def show_wait(self, wait: Wait) -> None:
        """The client's `on_wait`. Shows waits on a terminal only, the progress of an environment everywhere."""
        if wait.progress is not None:
            self._progress.show(wait.what, wait.progress)
        elif sys.stderr.isatty() and not (self.asks and wait.kind is WaitKind.APPROVAL):
            self.remark(str(wait))

    def end_wait(self) -> None:
        """Removes the output of `show_wait` from the screen. Idempotent."""
        self._progress.close()

    def show_end(self, result: ExecutionResult) -> None:
        """Prints why a program failed, and whether its variables were lost."""
        exited_with_0 = result.error is not None and result.error.exit_code == 0
        if not result.succeeded and not exited_with_0:
            if result.outcome is not Outcome.EXCEPTION or result.error is None:
                self.fail(result.outcome.value.replace("_", " "))
            if result.error is not None:
                text = result.error.traceback or f"{result.error.type}: {result.error.message}"
                self._write(sys.stderr, text.rstrip("\n") + "\n")
        if result.state is VariablesState.RESET:
            self.remark("the interpreter was restarted, and its variables are lost")
        elif result.state is VariablesState.ROLLED_BACK:
            self.remark("the interpreter was restarted; variables and files are as before this program")
        elif result.state is VariablesState.LOST:
            self.remark("the sandbox is lost")

    def show_artifacts(self, result: ExecutionResult) -> None:
        """Prints the names of the files that the program created or changed, in one line."""
        names = [repr(artifact.path)[1:-1] for artifact in result.artifacts]
        if names:
            more = len(names) > _ARTIFACTS_SHOWN or result.artifacts_truncated
            self.remark(f"created or changed: {', '.join(names[:_ARTIFACTS_SHOWN])}{' and more' if more else ''}")

    def show_value(self, value: object) -> None:
        """Prints a value as an interactive Python does: nothing for None, otherwise its repr."""
        if value is not None:
            self._write(sys.stdout, value_text(value, VALUE_CHARS_MAX) + "\n")

    def show_output(self, stream: TextIO, text: str) -> None:
        """Prints output of a process to one of our streams."""
        if text:
            self._write(stream, text)

    def show_lines(self, lines: list[str]) -> None:
        """Prints our own lines."""
        self._write(sys.stdout, "".join(f"{line}\n" for line in lines))

    def show_styled(self, text: str, style: str) -> None:
        """Prints text in a style of rich's: a colour, "dim" or "bold"; "" for none."""
        self._write(sys.stdout, text, style)

    def show_json(self, value: object) -> None:
        """Prints dataclasses, and lists of them, as JSON."""
        self.show_lines([json.dumps(value, default=_plain, indent=2)])

    def remark(self, text: str) -> None:
        """Prints a remark of our own on stderr."""
        self._write(sys.stderr, f"[{text}]\n", _REMARK)

    def fail(self, text: str) -> None:
        """Prints the reason of a failure."""
        self._write(sys.stderr, f"executor: {text}\n", _FAILURE)

    def _show_image(self, image: Image) -> None:
        if image.problem:
            self.remark(f"an image was refused: {image.problem}")
        else:
            name = "image-{}" + _IMAGE_SUFFIXES[image.mime_type]
            self._keep(name, image.data, f"an image of {image.width}x{image.height} pixels")

    def _keep(self, name: str, data: bytes, what: str) -> None:
        if self._image_dir is None:
            self.remark(f"{what}; --save-images DIR saves it")
            return
        self._images += 1
        path = self._image_dir / name.format(self._images)
        try:
            self._image_dir.mkdir(parents=True, exist_ok=True)
            with NewFile(path) as file:
                file.write(data)
                file.commit()
        except OSError as error:
            self.remark(f"{what} was not saved: {error}{disk_advice(error)}")
        else:
            self.remark(f"saved {path}")

    def _write(self, stream: TextIO, text: str, style: str = "") -> None:
        self._progress.close()
        if not self._raw and may_reach_a_terminal(stream):
            text = shown(text)
        text = encodable(text, stream.encoding or "utf-8")
        colours = _colours(stream) if style else None
        if colours is None:
            stream.write(text)
        else:
            from rich.text import Text

            colours.print(Text(text, style=style), end="", soft_wrap=True)
        stream.flush()


def disk_advice(error: Exception) -> str:
    """Returns the end of a message about a local file: what to do if its disk is full, else nothing."""
    return "; free some space there, or choose another place" if is_disk_full(error) else ""


def _plain(value: Any) -> object:
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, Enum):
        return value.value
    return dict(value) if isinstance(value, Mapping) else str(value)


def may_reach_a_terminal(stream: TextIO) -> bool:
    """Returns True for a terminal, and for a pipe, which may lead to one, while stderr is a terminal."""
    if stream.isatty():
        return True
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # ValueError: a stream in memory has no descriptor
        return False
    return is_pipe and sys.stderr.isatty()


def _colours(stream: TextIO) -> RichConsole | None:
    """Returns a console for colours; None without a terminal, with NO_COLOR set, or if rich is not installed."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console as RichConsole
    except ModuleNotFoundError:
        return None
    console = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
    return None if console.no_color else console
