"""The steps of a session and the savepoints before them, for going back by steps. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_client.errors import InvalidRequest
from executor_client.results import ExecutionResult, VariablesState
from executor_client.savepoint import Savepoint

_NAME_CHARS = 60


@dataclass(frozen=True)
class _Step:
    name: str  # its first line
    savepoint: int  # 0: there is none
    refused: str = ""


class UndoHistory:
    """Knows the steps, the oldest first. One without a savepoint counts as a step that can't be gone back to."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._last = 0  # newest savepoint, even if its step left nothing to undo

    def note(self, code: str, result: ExecutionResult) -> None:
        """Notes a step. One that was rolled back already has left nothing to undo."""
        self._last = max(self._last, result.savepoint)
        if result.state is not VariablesState.ROLLED_BACK:
            self._steps.append(_Step(_name(code), result.savepoint, result.savepoint_refused))

    def note_interrupted(self, code: str, savepoints: Sequence[Savepoint] = ()) -> bool:
        """Notes a step whose result did not arrive. True if a savepoint of the session was taken for it."""
        newest = max((each.number for each in savepoints if not each.is_branch), default=0)
        found = newest if newest > self._last else 0
        self._steps.append(_Step(_name(code), found, "" if found else "it was interrupted"))
        self._last = max(self._last, newest)
        return found > 0

    def clear(self) -> None:
        """Forgets all steps, because the session is a new one."""
        self._steps.clear()
        self._last = 0

    def __len__(self) -> int:
        return len(self._steps)

    def before(self, steps: int) -> int:
        """Returns the savepoint before the last `steps` steps. Raises InvalidRequest when there is none."""
        if type(steps) is not int or steps < 1:
            raise InvalidRequest(f"steps is a number from 1 on, not {steps!r}")
        if steps > len(self._steps):
            raise InvalidRequest(f"{len(self._steps)} steps can be undone, not {steps}")
        step = self._steps[-steps]
        if step.savepoint:
            return step.savepoint
        further = [count for count in range(steps + 1, len(self._steps) + 1) if self._steps[-count].savepoint]
        what_to_do = "no earlier step has one either"
        if further:
            names = ", ".join(f"`{each}`" for each in self.names(further[0]))
            what_to_do = f"undo {further[0]} steps to go back to the nearest one, which undoes {names}"
        why = step.refused or "none was requested"
        raise InvalidRequest(f"nothing was undone: there is no savepoint before `{step.name}`: {why}; {what_to_do}")

    def names(self, steps: int) -> tuple[str, ...]:
        """The first lines of the last `steps` steps, the oldest first."""
        return tuple(step.name for step in self._steps[-steps:])

    def undone(self, steps: int) -> tuple[str, ...]:
        """Forgets the steps that were undone, and returns their names."""
        names = self.names(steps)
        del self._steps[-steps:]
        return names


def _name(code: str) -> str:
    first, *others = code.strip().splitlines() or [""]
    return first[:_NAME_CHARS] + "…" * (bool(others) or len(first) > _NAME_CHARS)
