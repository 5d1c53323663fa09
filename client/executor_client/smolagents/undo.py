"""Undo for agents: a savepoint before each step, rollback by steps, and a tool for the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import smolagents

from executor_client import ExecutionResult, InvalidRequest, NotFoundError, PreconditionError, Rollback, Session
from executor_client._core.undo_history import UndoHistory
from executor_client.smolagents.lease import SessionLease

if TYPE_CHECKING:
    from executor_client.smolagents.executor import RemoteExecutor

EACH_STEP = "each-step"


class StepUndo:
    """The undoable steps of one executor. `mode` is "each-step", or None for no savepoints."""

    def __init__(self, lease: SessionLease, mode: str | None) -> None:
        if mode not in (None, EACH_STEP):
            raise ValueError(f'savepoints is {mode!r}; it must be "{EACH_STEP}" or None')
        self.mode = mode
        self._lease = lease
        self._history = UndoHistory()
        self._session: Session | None = None
        self._kept: int | None = None  # remaining steps after a requested undo

    def note(self, session: Session, code: str, result: ExecutionResult | None) -> None:
        """Records a step; None if its result did not arrive. Forgets steps of an earlier session."""
        if session is not self._session:
            self._history.clear()
            self._session = session
        if result is None:
            self._history.note_interrupted(code)
        else:
            self._history.note(code, result)

    def undo(self, steps: int) -> Rollback:
        """Raises InvalidRequest if these steps can't be undone, and the errors of `Session.rollback`."""
        if self._lease.current is not self._session:
            self._history.clear()
        done = self._lease.roll_back(self._history.before(steps))
        return replace(done, undone=self._history.undone(steps))

    def ask(self, steps: int) -> tuple[str, ...]:
        """Requests to undo the steps before the current one when it has ended. Returns their first lines.

        Raises InvalidRequest if they can't be undone.
        """
        if self.mode is None:
            raise InvalidRequest(
                f'no step can be undone: the executor takes no savepoints; pass savepoints="{EACH_STEP}"'
            )
        self._history.before(steps)
        self._kept = len(self._history) - steps
        return self._history.names(steps)

    def undo_if_asked(self) -> str:
        """Does a requested undo. Returns a notice of it, or an empty string."""
        kept, self._kept = self._kept, None
        if kept is None:
            return ""
        try:
            done = self.undo(len(self._history) - kept)  # the requesting step left nothing if it was rolled back
        except (InvalidRequest, NotFoundError, PreconditionError) as error:
            return f"No step was undone: {error.message}"
        left_out = (*done.savepoint.left_out, *done.left_out)
        rest = f" Not restored: {'; '.join(left_out)}." if left_out else ""
        names = ", ".join(f"`{name}`" for name in done.undone)
        return f"Undone: {names}. Variables, imports and files are as before.{rest}"


class UndoTool(smolagents.Tool):  # type: ignore[misc]  # smolagents is untyped
    """The tool `undo_last_step`, for an agent whose executor has `savepoints="each-step"`.

    `CodeAgent(tools=[UndoTool(executor)], executor=executor)`. If the agent created its executor:
    `agent.tools["undo_last_step"] = UndoTool(agent.python_executor)` before its first run.
    """

    name = "undo_last_step"
    description = (
        "When this step has ended, restores variables, imports and files to their state before the last code step. "
        "This step is undone too, so call the tool alone. Effects outside the sandbox are not undone."
    )
    inputs: dict[str, Any] = {  # noqa: RUF012 - smolagents reads it from the class
        "steps": {"type": "integer", "description": "how many of the last code steps, 1 by default", "nullable": True}
    }
    output_type = "string"
    skip_forward_signature_validation = True

    def __init__(self, executor: RemoteExecutor) -> None:
        super().__init__()
        self._executor = executor

    def forward(self, steps: int | None = None) -> str:
        try:
            names = self._executor.ask_undo(1 if steps is None else steps)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return f"undone when this step has ended: {', '.join(f'`{name}`' for name in names)}"
