"""Whose turn it is: the executions of a session run one after the other, in the order in which they were begun.

For who is told when executions begin and end, and wants to know which of them run. Keeps something for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Place(Generic[T]):
    kept: T
    has_turn: bool = False


class Turns(Generic[T]):
    """The unfinished executions of every session. `on_turn` is given what is kept for one when its turn comes."""

    def __init__(self, on_turn: Callable[[T], None]) -> None:
        self._on_turn = on_turn
        self._sessions: dict[str, dict[str, _Place[T]]] = {}

    def add(self, session_id: str, execution_id: str, kept: T) -> bool:
        """Puts it last. False, and nothing has changed, when it is there already."""
        queue = self._sessions.setdefault(session_id, {})
        if execution_id in queue:
            return False
        queue[execution_id] = _Place(kept)
        self._advance(queue)
        return True

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._sessions.values())

    def get(self, session_id: str, execution_id: str) -> T | None:
        place = self._sessions.get(session_id, {}).get(execution_id)
        return place.kept if place is not None else None

    def end(self, session_id: str, execution_id: str) -> T | None:
        """What was kept for it; the next one's turn has come."""
        queue = self._sessions.get(session_id, {})
        place = queue.pop(execution_id, None)
        if queue:
            self._advance(queue)
        else:
            self._sessions.pop(session_id, None)
        return place.kept if place is not None else None

    def forget(self, session_id: str) -> list[T]:
        """What was kept for those of a session that is no more."""
        return [place.kept for place in self._sessions.pop(session_id, {}).values()]

    def _advance(self, queue: dict[str, _Place[T]]) -> None:
        first = next(iter(queue.values()))
        if not first.has_turn:
            first.has_turn = True
            self._on_turn(first.kept)
