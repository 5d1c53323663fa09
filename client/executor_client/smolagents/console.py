"""Shows prints of the agent's code, and waits of the client, live on the agent's console.

The text comes from a sandbox and goes to a person's terminal: it must not move the cursor, change colours, ring the
bell, reorder text, or look like rich markup or the agent's own lines. Its total length is limited; the agent shows the
logs again at the end of the step, cut by its own rule.

Lines can't be erased once shown, because panels of the agent may follow them. So a line that the program rewrites, like
a progress bar, is shown at intervals and at its end.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from smolagents.monitoring import LogLevel

from executor_client._core.terminal import encodable, escaped
from executor_client.waits import Wait

LINE_CHARS_MAX = 2_000
COUNTS_SHOWN_EVERY_S = 5.0
"""Seconds between two lines about one step of a wait."""
REWRITTEN_SHOWN_EVERY_S = 3.0
TAB_CELLS = 8

# Colours and styles, and the sequences of progress bars: clear a line, go up a line, hide the cursor.
_ORNAMENT = re.compile(r"\x1b\[(?:[0-9;:]*m|[0-9]*[AK]|\?25[hl])")
_LINE_BREAK = re.compile(r"\r?\n")


def escape(text: str) -> str:
    """Returns the text without colours and with each unsafe character made visible, as `\\x1b` or `\\u202e`."""
    return escaped(_ORNAMENT.sub("", text))


def show_wait(logger: Any, wait: Wait) -> None:
    """Logs a wait as one line on the agent's console, if there is a logger."""
    if logger is not None:
        _show(logger, Text(_for(logger, escape(str(wait))), style="dim italic"))


class WaitLog:
    """Logs waits. For a wait with progress, logs each step, and counts at intervals."""

    def __init__(self) -> None:
        self._step = ""
        self._shown_at_s = 0.0

    def show(self, logger: Any, wait: Wait) -> None:
        step = "" if wait.progress is None else wait.progress.step
        if step and step == self._step and 0 <= wait.waited_s - self._shown_at_s < COUNTS_SHOWN_EVERY_S:
            return
        self._step, self._shown_at_s = step, wait.waited_s
        show_wait(logger, wait)


@dataclass
class _Line:
    """The unfinished line of a stream."""

    text: str = ""
    shown: str = ""
    shown_s: float = float("-inf")


class LogStream:
    """Collects pieces of text and logs them as whole lines; `close` logs the unfinished last ones."""

    def __init__(self, logger: Any, chars_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._chars_left = chars_max
        self._cut = False
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    @property
    def showed_all(self) -> bool:
        """True if nothing was omitted so far, except states of rewritten lines."""
        return not self._cut

    def feed(self, text: str, stream: str = "stdout") -> None:
        """Logs the lines that `text` completes. Past the limit it logs one notice, then nothing.

        The streams are separate: text of one never continues an unfinished line of the other.
        """
        if self._chars_left <= 0:
            return
        line = self._lines.setdefault(stream, _Line())
        *whole, line.text = _LINE_BREAK.split(line.text + text)
        finished: list[str] = []
        for each in whole:
            state = _states(each)[-1]
            if not (state and state == line.shown):
                finished.append(state)
            line.shown = ""
        *rewritten, last = _states(line.text)
        if rewritten:
            # A return at the very end may be half of a line break, or the new state of the line is yet to come.
            line.text = last + "\r" if line.text.endswith("\r") else last
            finished.extend(self._progress(line, rewritten[-1]))
        if len(line.text) > LINE_CHARS_MAX:
            finished.append(line.text)
            line.text = ""
        self._log(finished)

    def _progress(self, line: _Line, state: str) -> list[str]:
        now_s = self._clock()
        if now_s - line.shown_s < REWRITTEN_SHOWN_EVERY_S:
            return []
        line.shown, line.shown_s = state, now_s
        return [state]

    def close(self) -> None:
        """Logs the unfinished lines."""
        lines, self._lines = self._lines, {}
        rest = [(line, line.text.rstrip("\r")) for line in lines.values()]
        if self._chars_left > 0:
            self._log([text for line, text in rest if text and text != line.shown])

    def _log(self, lines: list[str]) -> None:
        """Logs all lines in one call, because a call of rich costs more than a hundred lines do."""
        shown: list[str] = []
        for line in lines:
            cut = escape(line[:LINE_CHARS_MAX])
            self._chars_left -= len(cut) + 1
            self._cut |= len(line) > LINE_CHARS_MAX or self._chars_left <= 0
            shown.append(_for(self._logger, cut) + (" ..." if len(line) > LINE_CHARS_MAX else ""))
            if self._chars_left <= 0:
                shown.append("... the rest is not shown live")
                break
        if shown:
            _show(self._logger, _Barred(shown))


class _Barred:
    """Renders lines with a bar at the start of each row, wrapped rows included.

    The bar distinguishes them from the agent's own lines. They become Text, because rich would read "[red]" in a str
    as markup.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - 2)
        parts = [
            part.plain.rstrip()
            for line in self._lines
            for part in Text(line, tab_size=TAB_CELLS).wrap(console, width, overflow="fold") or [Text()]
        ]
        yield Text("\n".join(f"| {part}" for part in parts), style="dim", no_wrap=True, overflow="ignore")


_latest_display: weakref.ref[Any] | None = None
"""The live display of rich that was seen last."""


def _show(logger: Any, lines: _Barred | Text) -> None:
    """Logs the lines above text that another agent's model streams on the same terminal.

    While rich shows streamed text, it replaces `sys.stdout` and redraws the text below new output. Another console
    would write into the middle of it and be overwritten. So the display is locked meanwhile. Rich has no public lock;
    if its private lock is missing, a line may break.

    A display that ends restores `sys.stdout` before it has written its text to the end. So the latest display is locked
    even if it is no longer found there, and `sys.stdout` is read again under the lock.
    """
    global _latest_display
    console = getattr(logger, "console", None)
    for display in getattr(_drawing(sys.stdout), "_live_stack", ())[:1]:
        _latest_display = weakref.ref(display)
    with getattr(_latest_display and _latest_display(), "_lock", nullcontext()):
        output = cast("Any", sys.stdout)
        if _drawing(output) in (None, console) or console is None or console.file is not output.rich_proxied_file:
            logger.log(lines, level=LogLevel.INFO)
            return
        with console.capture() as captured:
            logger.log(lines, level=LogLevel.INFO)
        output.write(captured.get())


def _drawing(output: object) -> Any:
    """Returns the console that draws a live display where `output` would write; None if there is none."""
    return getattr(output, "_FileProxy__console", None)


def _states(line: str) -> list[str]:
    """Returns the successive states of a line that the program rewrote; one state for any other line."""
    return [state for state in line.split("\r") if state] or [""]


def _for(logger: Any, text: str) -> str:
    """Escapes characters that the logger's console can't encode."""
    console = getattr(logger, "console", None)
    return encodable(text, getattr(console, "encoding", None) or "utf-8")
