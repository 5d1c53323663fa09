"""The failures of an executor: errors for the model to read, and the exception that stops a run.

An agent turns every `Exception` of its executor into an observation for the model, which costs a step. That is right if
the program failed (`CodeExecutionError`: the model can correct it) and wrong if the daemon is gone (`DaemonLost`: no
code can correct that). So `DaemonLost` is not an `Exception`.

The text is for a model: the first line is worded like smolagents' local executor, for which prompts and agents are
tuned; a short traceback and the state of the variables follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smolagents import local_python_executor
from smolagents.local_python_executor import InterpreterError
from smolagents.utils import AgentError

from executor_client import ExecutionResult, Limits, Outcome, VariablesState
from executor_client._core.failure_text import headline, short_traceback

NAMES_LISTED_MAX = 50

_RAN_IN_PART = "The code of this step may have run in part; its effects outside the sandbox remain."

_TOO_LONG = (Outcome.TIMEOUT, Outcome.CPU_LIMIT)


class _NoLogger:
    """A logger that drops errors: `AgentError` logs itself when it is created, and the agent logs it once more."""

    def log_error(self, message: str) -> None:
        """Does nothing."""


class CodeExecutionError(AgentError, InterpreterError):  # type: ignore[misc]  # smolagents is untyped
    """The agent's code failed. Derives from the errors of smolagents' remote executors and of its local one."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message, _NoLogger())
        self.outcome = outcome


class _NoTimeoutUpstream(Exception):
    """A placeholder for `ExecutionTimeoutError`, which smolagents before 1.24 lacks."""


_UpstreamTimeout: Any = getattr(local_python_executor, "ExecutionTimeoutError", _NoTimeoutUpstream)


class CodeTimeoutError(CodeExecutionError, _UpstreamTimeout):  # type: ignore[misc]  # smolagents is untyped
    """The agent's code took too long. Derives from smolagents' `ExecutionTimeoutError` (1.24 and later)."""


def code_failure(text: str, outcome: Outcome) -> CodeExecutionError:
    """Returns the exception for an execution that did not succeed."""
    return (CodeTimeoutError if outcome in _TOO_LONG else CodeExecutionError)(text, outcome)


class DaemonLost(BaseException):
    """The daemon can't be reached or refuses to continue, after the client's bounded retries: the run must stop.

    It is not an `Exception`, because smolagents turns each `Exception` into an observation and asks the model for
    another step until none is left. Catch it by name around `agent.run()`. Its cause is the client's error.
    """


class StreamedDaemonLost(DaemonLost, Exception):
    """`DaemonLost` for the caller of `run(stream=True)`, where no agent would swallow an `Exception`.

    The caller is usually a web server, such as `GradioUI`, which only reports an `Exception` to its user.
    """


@dataclass(frozen=True)
class Restored:
    """The contents that a new interpreter or session gets automatically, in addition to the tools."""

    variables: Iterable[str] = ()
    prelude: bool = False
    beginnings: Iterable[str] = ()
    """Names of other contents of a new session."""
    replaced: bool = True
    """False for the caller's own session, which is never replaced."""


def describe(result: ExecutionResult, code: str, limits: Limits, restored: Restored) -> str:
    """Returns the whole observation for an execution that did not succeed."""
    partly = _RAN_IN_PART if result.outcome is Outcome.LOST else ""
    parts = [headline(result, code, limits), partly, short_traceback(result), _aftermath(result.state, restored)]
    return "\n".join(part for part in parts if part)


def describe_lost_session(reason: str, restored: Restored) -> str:
    """Returns the notice that the session of earlier steps is gone, for a loss that no result describes."""
    return f"The session of the earlier steps is gone ({reason}). {_aftermath(VariablesState.LOST, restored)}"


def describe_restart(restored: Restored) -> str:
    """Returns the notice that the interpreter was replaced between two steps."""
    return _aftermath(VariablesState.RESET, restored)


def _aftermath(state: VariablesState, restored: Restored) -> str:
    if state is VariablesState.KEPT:
        return "Variables, functions and imports defined before the failure are kept."
    if state is VariablesState.ROLLED_BACK:
        return "Variables, functions, imports and files are as before this step."
    if state is VariablesState.LOST and not restored.replaced:
        return "The sandbox is gone, with all variables, functions, imports and files. It is not replaced."
    replaced = "interpreter had to be restarted" if state is VariablesState.RESET else "sandbox had to be replaced"
    names = sorted(restored.variables)
    listed = ", ".join(names[:NAMES_LISTED_MAX]) + (" and others" if len(names) > NAMES_LISTED_MAX else "")
    back = f"the tools and the variables given with the task ({listed})" if names else "the tools"
    prelude = " The code that prepares the session has run again." if restored.prelude else ""
    begins = ", ".join(restored.beginnings) if state is VariablesState.LOST else ""
    begins = f" The new session starts with {begins}." if begins else ""
    return (
        f"The {replaced}: all variables, functions and imports that your code defined, in this step or before, are "
        f"lost and must be defined again. Restored: {back}.{prelude}{begins}"
    )
