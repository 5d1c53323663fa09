"""The logs of a step: for the model all of them, for a person's console what it has not shown yet.

The console shows prints line by line as they come. smolagents writes the logs of a step to it once more when the step
has ended, and has one text for both: it puts a headline before it for the model, and makes rich's `Text` of it for the
console.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from smolagents.utils import truncate_content

from executor_client import ExecutionResult
from executor_client.smolagents.files import files_line
from executor_client.smolagents.images import logs_with_images

SHOWN_ABOVE = "(shown above, as they came)"


@dataclasses.dataclass
class Shown:
    """Says whether the console has shown all prints of a step."""

    whole: bool = False


class ShownLogs(str):
    """Logs whose prints the console has shown. Where rich makes a `Text` of them, `on_console` is what it shows.

    rich first translates a text, to take control characters out of it, which is where the other text comes in. Should a
    rich not do so, the prints are shown twice, and nothing else goes wrong. All else is done with the logs themselves.
    """

    on_console: str

    def __new__(cls, logs: str, on_console: str) -> Self:
        made = super().__new__(cls, logs)
        made.on_console = on_console
        return made

    def __str__(self) -> str:
        """Itself, not a plain copy: smolagents takes the logs of a step that failed through str()."""
        return self

    def translate(self, table: Any, /) -> str:
        return self.on_console.translate(table)


def step_logs(notice: str, result: ExecutionResult, shown: Shown, chars_max: int) -> str:
    """Return what is told of an execution besides its value: a notice, what it printed, the files that it made."""
    files = files_line(result.artifacts, truncated=result.artifacts_truncated)
    logs = _joined(truncate_content(_joined(notice, logs_with_images(result)), chars_max), files)
    if shown.whole and result.logs.strip() and not result.omitted_output_bytes:
        return ShownLogs(logs, _joined(notice, SHOWN_ABOVE, files))
    return logs


def _joined(*parts: str) -> str:
    """The parts that are not empty, each beginning on a line of its own."""
    text = ""
    for part in filter(None, parts):
        text += part if not text or text.endswith("\n") else f"\n{part}"
    return text
