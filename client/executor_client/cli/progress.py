"""Shows the daemon's progress: as a bar on a terminal, otherwise as one line for each step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from executor_client._core.terminal import shown
from executor_client.waits import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_BAR_CHARS = 30


class ProgressReport:
    """A thread of the client calls `show`; the main thread calls `close`."""

    def __init__(self, remark: Callable[[str], None]) -> None:
        """`remark` prints a line, and may call `close`."""
        self._remark = remark
        self._lock = threading.RLock()
        self._step = ""
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def show(self, what: str, progress: Progress) -> None:
        with self._lock:
            is_new, self._step = progress.step != self._step, progress.step
            if self._bar is None:
                self._bar = _new_bar()
            if self._bar is not None:
                self._show_bar(what, progress, is_new=is_new)
            elif is_new:
                self._remark(_line(f"building {what}: {progress}"))

    def close(self) -> None:
        """Removes the bar, so that other output can follow. Idempotent."""
        with self._lock:
            bar, self._bar, self._task = self._bar, None, None
            if bar is not None:
                bar.stop()

    def _show_bar(self, what: str, progress: Progress, *, is_new: bool) -> None:
        assert self._bar is not None
        counted = _line(f"{progress.done:,} of {progress.total:,} {progress.unit}") if progress.total else ""
        if is_new or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            text = _line(f"{what}: {progress.step}")
            total = progress.total or None  # without a total, the bar only shows activity
            self._task = self._bar.add_task(text, total=total, completed=progress.done, counted=counted)
            self._bar.start()
        elif progress.total:
            self._bar.update(self._task, total=progress.total, completed=progress.done, counted=counted, refresh=True)


def _new_bar() -> RichProgress | None:
    """Returns a hidden bar; None without a suitable terminal or without rich."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
    except ModuleNotFoundError:
        return None
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_CHARS),
        TextColumn("{task.fields[counted]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _line(text: str) -> str:
    """Returns text of the daemon as one line that is safe for a terminal."""
    return " ".join(shown(text).split())
