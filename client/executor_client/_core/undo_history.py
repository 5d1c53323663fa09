"""The savepoints that were taken before the steps of a session, for going back by steps. No I/O."""

from __future__ import annotations

from executor_client.errors import InvalidRequest
from executor_client.results import ExecutionResult, VariablesState


class UndoHistory:
    """Knows the savepoint before each step that may be undone."""

    def __init__(self) -> None:
        self._before: list[int] = []

    def note(self, result: ExecutionResult) -> None:
        """Notes a step. One that was rolled back already has left nothing to undo."""
        if result.savepoint and result.state is not VariablesState.ROLLED_BACK:
            self._before.append(result.savepoint)

    def clear(self) -> None:
        """Forgets all: the session is another one."""
        self._before.clear()

    def __len__(self) -> int:
        return len(self._before)

    def before(self, steps: int) -> int:
        """Returns the savepoint before the last so many steps. Raises InvalidRequest when there is none."""
        if isinstance(steps, bool) or steps < 1:
            raise InvalidRequest(f"steps is a number from 1 on, not {steps!r}")
        if steps > len(self._before):
            raise InvalidRequest(f"{len(self._before)} steps can be undone, not {steps}")
        return self._before[-steps]

    def undone(self, steps: int) -> None:
        """Forgets the steps that were undone."""
        del self._before[-steps:]
