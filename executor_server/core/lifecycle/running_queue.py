"""The running queue: the executions of a session run one after the other, in the order in which they began.

For observers that are notified when executions begin and end, and must know which of them run. Keeps one value for
each execution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Entry(Generic[T]):
    kept: T
    runs: bool = False


class RunningQueue(Generic[T]):
    """The unfinished executions of all sessions. `on_run` gets the value of each execution that begins to run."""

    def __init__(self, on_run: Callable[[T], None]) -> None:
        self._on_run = on_run
        self._sessions: dict[str, dict[str, _Entry[T]]] = {}

    def add(self, session_id: str, execution_id: str, kept: T) -> bool:
        """Appends an execution. Returns False, and changes nothing, when it is there already."""
        queue = self._sessions.setdefault(session_id, {})
        if execution_id in queue:
            return False
        queue[execution_id] = _Entry(kept)
        self._advance(queue)
        return True

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def get(self, session_id: str, execution_id: str) -> T | None:
        entry = self._sessions.get(session_id, {}).get(execution_id)
        return entry.kept if entry is not None else None

    def end(self, session_id: str, execution_id: str) -> T | None:
        """Removes an execution and returns its value; the next one begins to run."""
        queue = self._sessions.get(session_id, {})
        entry = queue.pop(execution_id, None)
        if queue:
            self._advance(queue)
        else:
            self._sessions.pop(session_id, None)
        return entry.kept if entry is not None else None

    def forget(self, session_id: str) -> list[T]:
        """Removes the executions of an ended session, and returns their values."""
        return [entry.kept for entry in self._sessions.pop(session_id, {}).values()]

    def _advance(self, queue: dict[str, _Entry[T]]) -> None:
        first = next(iter(queue.values()))
        if not first.runs:
            first.runs = True
            self._on_run(first.kept)
