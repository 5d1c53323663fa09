"""The logs of a step: complete for the model, and without prints that a person's console has already shown.

The console shows prints live. At the end of a step, smolagents writes the logs to it again. It uses the same text for
the model, with a headline, and for the console, as rich's `Text`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from smolagents.utils import truncate_content

from executor_client import ExecutionResult
from executor_client._core.terminal import last_states
from executor_client.smolagents.files import files_line
from executor_client.smolagents.images import logs_with_images

SHOWN_ABOVE = "(shown above, as they came)"


@dataclasses.dataclass
class Shown:
    """Records whether the console has shown all prints of a step."""

    whole: bool = False


class ShownLogs(str):
    """Logs whose prints the console has shown. rich's `Text` shows `on_console` instead.

    rich calls `translate` on a text to remove control characters; that call returns the other text. If a version of
    rich does not call it, the prints are shown twice, which is harmless.
    """

    on_console: str

    def __new__(cls, logs: str, on_console: str) -> Self:
        self = super().__new__(cls, logs)
        self.on_console = on_console
        return self

    def __str__(self) -> str:
        """Returns itself, because smolagents passes the logs of a failed step through str()."""
        return self

    def translate(self, table: Any, /) -> str:
        return self.on_console.translate(table)


def step_logs(notice: str, result: ExecutionResult, shown: Shown, chars_max: int) -> str:
    """Returns the observation of an execution without its value: notice, prints and files."""
    files = files_line(result.artifacts, truncated=result.artifacts_truncated)
    logs = _joined(truncate_content(_joined(notice, last_states(logs_with_images(result))), chars_max), files)
    if shown.whole and result.logs.strip() and not result.omitted_output_bytes:
        return ShownLogs(logs, _joined(notice, SHOWN_ABOVE, files))
    return logs


def _joined(*parts: str) -> str:
    """Joins the non-empty parts, each on a new line."""
    text = ""
    for part in filter(None, parts):
        text += part if not text or text.endswith("\n") else f"\n{part}"
    return text
