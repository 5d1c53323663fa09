"""What the agent is told when its code failed, and what stops its run.

An agent swallows every `Exception` of its executor into an observation for the model and pays one step for it. That is
right for a program that failed (`CodeExecutionError`: the model can mend it) and wrong for a daemon that is gone
(`DaemonLost`: no code can mend that), which therefore is no `Exception`.

The text is made for a model: the first line in the words of smolagents' local executor, on which prompts and agents
are tuned, then a short traceback, then what became of the variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from smolagents.local_python_executor import InterpreterError
from smolagents.utils import AgentError, truncate_content

from executor_client import ErrorDetail, ExecutionResult, Limits, Outcome, VariablesState

STATEMENT_CHARS_MAX = 2_000
MESSAGE_CHARS_MAX = 8_000
TRACEBACK_LINES_MAX = 24
TRACEBACK_LINE_CHARS_MAX = 400
NAMES_LISTED_MAX = 50

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SYNTAX_ERRORS = frozenset({"SyntaxError", "IndentationError", "TabError"})
_TRACEBACK_HEAD = "Traceback (most recent call last):"


class _NoLogger:
    """`AgentError` logs itself when it is made, and the agent logs its text again: once is enough."""

    def log_error(self, message: str) -> None:
        """Leaves the logging to the agent."""


class CodeExecutionError(AgentError, InterpreterError):  # type: ignore[misc]  # smolagents is untyped
    """The agent's code failed. It is both of what smolagents' executors raise, remote (first) and local (second)."""

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message, _NoLogger())
        self.outcome = outcome


class DaemonLost(BaseException):
    """The daemon cannot be reached or refuses to go on, after the client's own bounded retries: the run must stop.

    Not an `Exception`, since smolagents turns each of those into an observation and asks the model for another step,
    until the steps are used up. Catch it by name around `agent.run()`. Its cause is the client's error.
    """


def describe(result: ExecutionResult, code: str, limits: Limits, restored: Iterable[str]) -> str:
    """The whole observation for an execution that did not succeed. `restored` names the variables put back."""
    parts = [_headline(result, code, limits), _short_traceback(result), _aftermath(result.state, restored)]
    return "\n".join(part for part in parts if part)


def describe_lost_session(reason: str, restored: Iterable[str]) -> str:
    """What to say when the session of the steps before is gone and there is no result that tells how."""
    return f"The session of the steps before is gone ({reason}). {_aftermath(VariablesState.LOST, restored)}"


def _headline(result: ExecutionResult, code: str, limits: Limits) -> str:
    detail = result.error or ErrorDetail(type="", message="")
    match result.outcome:
        case Outcome.EXCEPTION if _is_parse_error(detail):
            return f"Code parsing failed on line {detail.line} due to: {_cause(detail)}\n{_source_and_caret(detail)}"
        case Outcome.EXCEPTION:
            return _failed_at(detail, code, _cause(detail))
        case Outcome.IMPORT_DENIED:
            return _failed_at(detail, code, f"InterpreterError: {_said(detail, 'an import is not allowed')}")
        case Outcome.POLICY_DENIED:
            said = _said(detail, "the policy refuses it")
            return _failed_at(detail, code, f"InterpreterError: Forbidden access: {said}")
        case Outcome.OPERATION_LIMIT:
            return _failed_at(
                detail, code, f"InterpreterError: {_said(detail, 'Reached the max number of operations')}"
            )
        case Outcome.TIMEOUT:
            return f"Code execution exceeded the maximum execution time: {_said(detail, 'it took too long')}"
        case Outcome.CPU_LIMIT:
            return f"Code execution exceeded the maximum CPU time: {_said(detail, 'it calculated too long')}"
        case Outcome.OUT_OF_MEMORY:
            return f"Code execution ran out of memory: at most {limits.memory_bytes} bytes can be used"
        case Outcome.OUTPUT_LIMIT:
            return f"Code execution was stopped: {_said(detail, 'it printed far more than is kept')}"
        case Outcome.EXITED:
            return _failed_at(detail, code, _cause(detail) or "the code ended its own interpreter")
        case Outcome.CANCELLED:
            return "Code execution was cancelled"
        case Outcome.CRASHED:
            return f"Code execution failed: the interpreter crashed ({_cause(detail) or 'no reason is known'})"
        case _:
            return f"Code execution failed: the sandbox is gone ({_cause(detail) or 'no reason is known'})"


def _failed_at(detail: ErrorDetail, code: str, cause: str) -> str:
    statement = detail.statement or _source_line(code, detail.line)
    if not statement:
        return f"Code execution failed due to: {cause}"
    return f"Code execution failed at line '{truncate_content(statement, STATEMENT_CHARS_MAX)}' due to: {cause}"


def _said(detail: ErrorDetail, otherwise: str) -> str:
    """The sandbox's own words. Of a limit only it knows which one held: an execution's may be below its session's."""
    return truncate_content(_ANSI.sub("", detail.message), MESSAGE_CHARS_MAX) or otherwise


def _cause(detail: ErrorDetail) -> str:
    return ": ".join(part for part in (detail.type, _said(detail, "")) if part)


def _source_line(code: str, line: int) -> str:
    lines = code.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


# ---------------------------------------------------------------------------------------------------------------------
# Tracebacks


def _is_parse_error(detail: ErrorDetail) -> bool:
    """Whether nothing ran: a SyntaxError that the code raised itself (by `exec`, say) has a stack."""
    return detail.type in _SYNTAX_ERRORS and _TRACEBACK_HEAD not in detail.traceback


def _source_and_caret(detail: ErrorDetail) -> str:
    lines = _ANSI.sub("", detail.traceback).splitlines()
    shown = [line for line in lines if not line.startswith((f"{detail.type}:", '  File "'))]
    return "\n".join(line[:TRACEBACK_LINE_CHARS_MAX] for line in shown[:TRACEBACK_LINES_MAX])


def _short_traceback(result: ExecutionResult) -> str:
    """The traceback without its end, which the headline has already, and without its middle when it is long."""
    if result.error is None or _is_parse_error(result.error):
        return ""
    text = _ANSI.sub("", result.error.traceback).rstrip()
    cause = f"{result.error.type}: {result.error.message}".rstrip()
    if text.endswith(cause):
        text = text[: -len(cause)].rpartition("\n")[0]
    lines = [line[:TRACEBACK_LINE_CHARS_MAX] for line in text.splitlines()]
    if result.outcome is not Outcome.EXCEPTION:
        # It ends with what stopped the code, an exception of the sandbox's own that means nothing to the model.
        while lines and not lines[-1].startswith(" "):
            lines.pop()
    if len(lines) > TRACEBACK_LINES_MAX:
        half = TRACEBACK_LINES_MAX // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines are left out ...", *lines[-half:]]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Variables


def _aftermath(state: VariablesState, restored: Iterable[str]) -> str:
    if state is VariablesState.KEPT:
        return "Variables, functions and imports defined before the failure are kept."
    replaced = "interpreter had to be restarted" if state is VariablesState.RESET else "sandbox had to be replaced"
    names = sorted(restored)
    listed = ", ".join(names[:NAMES_LISTED_MAX]) + (" and others" if len(names) > NAMES_LISTED_MAX else "")
    back = f"the tools and the variables given with the task ({listed})" if names else "the tools"
    return (
        f"The {replaced}: all variables, functions and imports that your code defined, in this step or before, are "
        f"lost and must be defined again. In place again: {back}."
    )
