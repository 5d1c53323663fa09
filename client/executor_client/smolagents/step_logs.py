"""The logs of a step: complete for the model, and without the prints already shown for a person's console.

The console shows prints line by line as they happen. smolagents writes the logs of a step to it again when the step has
ended. It uses one text for both: with a headline for the model, and as rich's `Text` for the console.
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
    """Logs whose prints the console has shown. rich's `Text` of them is `on_console`; otherwise they are the logs.

    rich calls `translate` on a text to remove control characters: that call returns the other text. With a rich that
    does not call it, the prints are shown twice, which is harmless.
    """

    on_console: str

    def __new__(cls, logs: str, on_console: str) -> Self:
        self = super().__new__(cls, logs)
        self.on_console = on_console
        return self

    def __str__(self) -> str:
        """Returns itself, not a plain copy: smolagents passes the logs of a failed step through str()."""
        return self

    def translate(self, table: Any, /) -> str:
        return self.on_console.translate(table)


def step_logs(notice: str, result: ExecutionResult, shown: Shown, chars_max: int) -> str:
    """Returns the observation of an execution without its value: the notice, the prints, the files that it made."""
    files = files_line(result.artifacts, truncated=result.artifacts_truncated)
    logs = _joined(truncate_content(_joined(notice, last_states(logs_with_images(result))), chars_max), files)
    if shown.whole and result.logs.strip() and not result.omitted_output_bytes:
        return ShownLogs(logs, _joined(notice, SHOWN_ABOVE, files))
    return logs


def _joined(*parts: str) -> str:
    """Joins the parts that are not empty, each starting on a new line."""
    text = ""
    for part in filter(None, parts):
        text += part if not text or text.endswith("\n") else f"\n{part}"
    return text
