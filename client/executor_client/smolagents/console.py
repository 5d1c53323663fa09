"""Shows what the agent's code prints on the agent's console, line by line, as it comes.

The text comes from a sandbox and goes to a person's terminal: nothing in it may move the cursor, change colours, ring,
reorder text, or be taken for rich markup. The whole of it is bounded; the agent shows (and keeps) the logs again at the
end of the step, cut by its own rule.
"""

from __future__ import annotations

import re
from typing import Any

from rich.text import Text
from smolagents.monitoring import LogLevel

LINE_CHARS_MAX = 2_000

# C0 without tab and newline, DEL, C1, and the characters that override the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LINE_BREAK = re.compile(r"\r\n?|\n")


def escape(text: str) -> str:
    """The text with each unsafe character made visible, as `\\x1b` or `\\u202e`."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


class LogStream:
    """Collects pieces of text and logs them as whole lines; `close` logs the unfinished last one."""

    def __init__(self, logger: Any, chars_max: int) -> None:
        self._logger = logger
        self._chars_left = chars_max
        self._line = ""

    def feed(self, text: str) -> None:
        """Logs the lines that `text` completes. Past the bound it says once that there is more, then nothing."""
        if self._chars_left <= 0:
            return
        pending = self._line + text
        if len(pending) > LINE_CHARS_MAX and not _LINE_BREAK.search(pending):
            lines, self._line = [pending], ""
        elif pending.endswith("\r") and len(pending) <= LINE_CHARS_MAX:
            lines, self._line = [], pending  # may be the first half of a line break
        else:
            *lines, self._line = _LINE_BREAK.split(pending)
        self._log(lines)

    def close(self) -> None:
        """Logs what waits for the end of its line."""
        if self._line and self._chars_left > 0:
            self._log([self._line.rstrip("\r")])
        self._line = ""

    def _log(self, lines: list[str]) -> None:
        """Logs lines in one piece: for rich, each call costs more than a hundred lines do."""
        shown: list[str] = []
        for line in lines:
            self._chars_left -= len(line) + 1
            shown.append("| " + escape(line[:LINE_CHARS_MAX]) + (" ..." if len(line) > LINE_CHARS_MAX else ""))
            if self._chars_left <= 0:
                shown.append("| ... the rest is not shown as it comes")
                break
        if shown:
            # A Text, not a str: rich would take "[red]" in a str for markup. The bars tell it from the agent's lines.
            self._logger.log(Text("\n".join(shown), style="dim"), level=LogLevel.INFO)
