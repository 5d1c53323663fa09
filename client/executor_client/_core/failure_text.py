"""Describes for a language model why an execution failed.

The first line is worded like smolagents' local executor, for which prompts and agents are tuned; a short traceback
follows. Text from the sandbox is cut, and stripped of terminal control sequences.
"""

from __future__ import annotations

import re

from executor_client.results import ErrorDetail, ExecutionResult, Limits, Outcome

STATEMENT_CHARS_MAX = 2_000
MESSAGE_CHARS_MAX = 8_000
TRACEBACK_LINES_MAX = 24
TRACEBACK_LINE_CHARS_MAX = 400

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_SYNTAX_ERRORS = frozenset({"SyntaxError", "IndentationError", "TabError"})
_TRACEBACK_HEAD = "Traceback (most recent call last):"


def headline(result: ExecutionResult, code: str, limits: Limits) -> str:
    """Describes how and where an execution failed; for a syntax error, with the line and a caret."""
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


def short_traceback(result: ExecutionResult) -> str:
    """Returns the traceback without its end, which is in the headline, and without its middle if it is long."""
    if result.error is None or _is_parse_error(result.error):
        return ""
    text = _ANSI.sub("", result.error.traceback).rstrip()
    cause = f"{result.error.type}: {result.error.message}".rstrip()
    if text.endswith(cause):
        text = text[: -len(cause)].rpartition("\n")[0]
    lines = [line[:TRACEBACK_LINE_CHARS_MAX] for line in text.splitlines()]
    if result.outcome is not Outcome.EXCEPTION:
        # It ends with the exception that stopped the code, which means nothing to the model.
        while lines and not lines[-1].startswith(" "):
            lines.pop()
    if len(lines) > TRACEBACK_LINES_MAX:
        half = TRACEBACK_LINES_MAX // 2
        lines = [*lines[:half], f"  ... {len(lines) - 2 * half} lines are left out ...", *lines[-half:]]
    return "\n".join(lines)


def shortened(text: str, chars_max: int) -> str:
    """Cuts a text to its beginning and its end, with the note that smolagents puts between them."""
    if len(text) <= chars_max:
        return text
    cut = f"\n..._This content has been truncated to stay below {chars_max} characters_...\n"
    return text[: chars_max // 2] + cut + text[-chars_max // 2 :]


def _failed_at(detail: ErrorDetail, code: str, cause: str) -> str:
    statement = detail.statement or _source_line(code, detail.line)
    if not statement:
        return f"Code execution failed due to: {cause}"
    return f"Code execution failed at line '{shortened(statement, STATEMENT_CHARS_MAX)}' due to: {cause}"


def _said(detail: ErrorDetail, otherwise: str) -> str:
    """Returns the sandbox's text. Only the sandbox knows the limit: an execution's may be below its session's."""
    return shortened(_ANSI.sub("", detail.message), MESSAGE_CHARS_MAX) or otherwise


def _cause(detail: ErrorDetail) -> str:
    return ": ".join(part for part in (detail.type, _said(detail, "")) if part)


def _source_line(code: str, line: int) -> str:
    lines = code.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def _is_parse_error(detail: ErrorDetail) -> bool:
    """True if nothing ran. A SyntaxError raised by the code itself (by `exec`, for example) has a stack."""
    return detail.type in _SYNTAX_ERRORS and _TRACEBACK_HEAD not in detail.traceback


def _source_and_caret(detail: ErrorDetail) -> str:
    lines = _ANSI.sub("", detail.traceback).splitlines()
    shown = [line for line in lines if not line.startswith((f"{detail.type}:", '  File "'))]
    return "\n".join(line[:TRACEBACK_LINE_CHARS_MAX] for line in shown[:TRACEBACK_LINES_MAX])
