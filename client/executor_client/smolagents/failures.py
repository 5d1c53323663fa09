"""What the agent is told when its code failed, and what stops its run.

An agent swallows every `Exception` of its executor into an observation for the model and pays one step for it. That is
right for a program that failed (`CodeExecutionError`: the model can mend it) and wrong for a daemon that is gone
(`DaemonLost`: no code can mend that), which therefore is no `Exception`.

The text is made for a model: the first line in the words of smolagents' local executor, on which prompts and agents
are tuned, then a short traceback, then what became of the variables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smolagents import local_python_executor
from smolagents.local_python_executor import InterpreterError
from smolagents.utils import AgentError

from executor_client import ExecutionResult, Limits, Outcome, VariablesState
from executor_client._failure_text import headline, short_traceback

NAMES_LISTED_MAX = 50

_TOO_LONG = (Outcome.TIMEOUT, Outcome.CPU_LIMIT)


class _NoLogger:
    """`AgentError` logs itself when it is made, and the agent logs its text again: once is enough."""

    def log_error(self, message: str) -> None:
        """Leaves the logging to the agent."""


class CodeExecutionError(AgentError, InterpreterError):  # type: ignore[misc]  # smolagents is untyped
    """The agent's code failed. It is both of what smolagents' executors raise, remote (first) and local (second)."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message, _NoLogger())
        self.outcome = outcome


class _NoTimeoutUpstream(Exception):
    """In the place of what a smolagents before 1.24 does not have."""


_UpstreamTimeout: Any = getattr(local_python_executor, "ExecutionTimeoutError", _NoTimeoutUpstream)


class CodeTimeoutError(CodeExecutionError, _UpstreamTimeout):  # type: ignore[misc]  # smolagents is untyped
    """The agent's code took too long. It is also what smolagents' local executor raises then, `ExecutionTimeoutError`
    (1.24 and later)."""


def code_failure(text: str, outcome: Outcome) -> CodeExecutionError:
    """The exception for an execution that did not succeed."""
    return (CodeTimeoutError if outcome in _TOO_LONG else CodeExecutionError)(text, outcome)


class DaemonLost(BaseException):
    """The daemon cannot be reached or refuses to go on, after the client's own bounded retries: the run must stop.

    Not an `Exception`, since smolagents turns each of those into an observation and asks the model for another step,
    until the steps are used up. Catch it by name around `agent.run()`. Its cause is the client's error.
    """


class StreamedDaemonLost(DaemonLost, Exception):
    """`DaemonLost` for who follows a run by `run(stream=True)`, where there is no agent left to swallow it.

    That is a web server as a rule (`GradioUI` is), which tells its user of an `Exception`, and of nothing else.
    """


@dataclass(frozen=True)
class InPlaceAgain:
    """What a new interpreter or session is given without the agent's doing, besides the tools."""

    variables: Iterable[str] = ()
    prelude: bool = False
    beginnings: Iterable[str] = ()
    """Words for what else a new session begins with."""
    replaced: bool = True
    """False where the session is the caller's own: no other takes its place."""


def describe(result: ExecutionResult, code: str, limits: Limits, again: InPlaceAgain) -> str:
    """The whole observation for an execution that did not succeed."""
    parts = [headline(result, code, limits), short_traceback(result), _aftermath(result.state, again)]
    return "\n".join(part for part in parts if part)


def describe_lost_session(reason: str, again: InPlaceAgain) -> str:
    """What to say when the session of the steps before is gone and there is no result that tells how."""
    return f"The session of the steps before is gone ({reason}). {_aftermath(VariablesState.LOST, again)}"


def describe_restart(again: InPlaceAgain) -> str:
    """What to say when the interpreter was replaced between two steps."""
    return _aftermath(VariablesState.RESET, again)


# ---------------------------------------------------------------------------------------------------------------------
# Variables


def _aftermath(state: VariablesState, again: InPlaceAgain) -> str:
    if state is VariablesState.KEPT:
        return "Variables, functions and imports defined before the failure are kept."
    if state is VariablesState.LOST and not again.replaced:
        return "The sandbox is gone, with all variables, functions, imports and files. No other takes its place."
    replaced = "interpreter had to be restarted" if state is VariablesState.RESET else "sandbox had to be replaced"
    names = sorted(again.variables)
    listed = ", ".join(names[:NAMES_LISTED_MAX]) + (" and others" if len(names) > NAMES_LISTED_MAX else "")
    back = f"the tools and the variables given with the task ({listed})" if names else "the tools"
    prelude = " The code that prepares the session has run again." if again.prelude else ""
    begins = ", ".join(again.beginnings) if state is VariablesState.LOST else ""
    begins = f" The new session begins with {begins}." if begins else ""
    return (
        f"The {replaced}: all variables, functions and imports that your code defined, in this step or before, are "
        f"lost and must be defined again. In place again: {back}.{prelude}{begins}"
    )
