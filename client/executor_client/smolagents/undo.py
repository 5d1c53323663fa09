"""Undo for agents: a savepoint before each step, going back by steps, and the tool with which a model asks for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import smolagents

from executor_client import ExecutionResult, Rollback, Session
from executor_client._core.undo_history import UndoHistory
from executor_client.smolagents.lease import SessionLease

if TYPE_CHECKING:
    from executor_client.smolagents.executor import RemoteExecutor

EACH_STEP = "each-step"


class StepUndo:
    """The steps of one executor that can be undone. `mode` is "each-step", or None for no savepoints."""

    def __init__(self, lease: SessionLease, mode: str | None) -> None:
        if mode not in (None, EACH_STEP):
            raise ValueError(f'savepoints is "{EACH_STEP}" or None, not {mode!r}')
        self.mode = mode
        self._lease = lease
        self._history = UndoHistory()
        self._session: Session | None = None
        self._is_asked = False

    def note(self, session: Session, result: ExecutionResult) -> None:
        """Notes a step. Those of an earlier session are gone with it."""
        if session is not self._session:
            self._history.clear()
            self._session = session
        self._history.note(result)

    def undo(self, steps: int) -> Rollback:
        """Raises InvalidRequest when there are not so many steps, and the errors of `Session.rollback`."""
        if self._lease.current is not self._session:
            self._history.clear()
        done = self._lease.roll_back(self._history.before(steps))
        self._history.undone(steps)
        return done

    def ask(self) -> bool:
        """Asks for the step before the current one to be undone when that has ended. False when there is none."""
        self._is_asked = self.mode is not None and len(self._history) > 0
        return self._is_asked

    def undo_if_asked(self) -> str:
        """Undoes what was asked for; returns the notice of it, or nothing."""
        asked, self._is_asked = self._is_asked, False
        if not asked:
            return ""
        done = self.undo(min(2, len(self._history)))
        left_out = (*done.savepoint.left_out, *done.left_out)
        rest = f" Not restored: {'; '.join(left_out)}." if left_out else ""
        return f"The last step is undone: variables, imports and files are as they were before it.{rest}"


class UndoTool(smolagents.Tool):  # type: ignore[misc]  # smolagents is untyped
    """The tool `undo_last_step`, for an agent whose executor has `savepoints="each-step"`.

    `CodeAgent(tools=[UndoTool(executor)], executor=executor)`, or, with the executor that the agent has made itself,
    `agent.tools["undo_last_step"] = UndoTool(agent.python_executor)` before its first run.
    """

    name = "undo_last_step"
    description = (
        "Takes variables, imports and files back to how they were before the last code step, when this step has ended. "
        "What this step does is undone, too, so call it alone. What was done outside of the sandbox is not undone."
    )
    inputs: dict[str, Any] = {}  # noqa: RUF012 - smolagents reads it from the class
    output_type = "string"
    skip_forward_signature_validation = True

    def __init__(self, executor: RemoteExecutor) -> None:
        super().__init__()
        self._executor = executor

    def forward(self) -> str:
        if not self._executor.ask_undo():
            raise ValueError("there is no step that could be undone")
        return "the last step is undone when this one has ended"
